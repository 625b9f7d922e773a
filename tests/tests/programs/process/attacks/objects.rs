//! Attacks of a tenant who may write Services and EndpointSlices.

use crate::process::rig::{Rig, eventually, node, service, service_v4, slice};

/// The lines of the control plane's log that warn about an object.
fn warnings(rig: &Rig, object: &str) -> Vec<String> {
    let log = rig.control_plane_log();
    let about = format!("object=\"{object}\"");
    log.lines().filter(|line| line.contains("WARN") && line.contains(&about)).map(str::to_owned).collect()
}

/// The lines of `headgatectl status` about an object, once there are some.
fn problems(rig: &Rig, object: &str) -> Vec<String> {
    eventually(&format!("a problem of {object}"), || {
        let said = rig.headgatectl(&["status"])?;
        let of_object = said.lines().map(str::trim).filter(|line| line.starts_with(&format!("{object}, ")));
        let of_object: Vec<String> = of_object.map(str::to_owned).collect();
        if of_object.is_empty() { Err(said) } else { Ok(of_object) }
    })
}

/// Waits until the Service `web` of another tenant leads to an endpoint with this last byte.
fn until_web_leads_to(rig: &Rig, last: u8) {
    rig.put("web-1", &slice("web", &[("node-a", last)], ""));
    rig.until_rule("nat", &format!("--to-destination 10.244.1.{last}:8080"));
}

/// A Service whose externalIPs are all refused, and a slice whose weights are.
#[test]
fn an_object_with_60000_mistakes_delays_no_other_and_costs_one_line() {
    let rig = Rig::web(10);
    let _agent = rig.agent(&[]);
    until_web_leads_to(&rig, 1);
    let addresses = |count: usize| {
        let addresses = (0..count).map(|n| format!("239.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255));
        format!("  externalIPs: [{}]\n", addresses.collect::<Vec<_>>().join(", "))
    };
    let weights = |count: usize| {
        let text = "x=1,".repeat(count);
        slice("attack", &[("node-a", 7)], &format!("  annotations: {{headgate.io/weights: \"{text}\"}}\n"))
    };
    for (round, last) in [(1, 2), (2, 3)] {
        rig.put("attack", &service("attack", 11, &addresses(60_000 + round)));
        rig.put("attack-1", &weights(60_000 + round));
        until_web_leads_to(&rig, last);
        for object in ["Service ns/attack", "EndpointSlice ns/attack-1"] {
            let count = 59_990 + round;
            let last =
                format!("{object}, …: {count} more problems are not shown: correct the ones that are shown first");
            eventually(&format!("{object} has {count} more problems"), || {
                let problems = problems(&rig, object);
                let is_so = problems.len() <= 11 && problems.iter().any(|problem| problem.starts_with(&last));
                if is_so { Ok(()) } else { Err(problems.join("\n")) }
            });
            let warnings = eventually("the log warns", || match warnings(&rig, object) {
                lines if lines.len() >= round => Ok(lines),
                lines => Err(lines.join("\n")),
            });
            assert_eq!(warnings.len(), round, "{warnings:?}");
        }
    }
    // The rest of both objects is used.
    rig.until_rule("nat", "--to-destination 10.244.1.7:8080");
    rig.until_rule("nat", "10.96.0.11/32");
}

/// A Service with more frontends, and one with more endpoint ports than the budget.
#[test]
fn a_service_over_its_budget_gets_what_fits_and_its_problem_names_the_remedy() {
    let rig = Rig::new();
    for (name, text) in [("node", node("")), ("web", service("web", 10, ""))] {
        rig.put(name, &text);
    }
    let source = rig.manifests();
    let mut options = vec![source.as_str(), "--service-budget=1000"];
    options.extend(crate::process::rig::REPLICA_OPTIONS);
    let control_plane = rig.control_plane(&options, &[]);
    let _agent = rig.agent(&[]);
    until_web_leads_to(&rig, 1);
    let ports = |count: u16| {
        let ports = (0..count).map(|n| format!("{{name: p{n}, protocol: TCP, port: {}}}", 8000 + n));
        format!("ports: [{}]\n", ports.collect::<Vec<_>>().join(", "))
    };
    let addresses: Vec<String> = (1..=100).map(|n| format!("203.0.113.{n}")).collect();
    // 10 ports have room for 20 addresses: one of them is the ClusterIP.
    let attack = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: ns, name: attack}}\nspec:\n  clusterIP: 10.96.0.11\n  \
         externalIPs: [{}]\n  {}",
        addresses.join(", "),
        ports(10)
    );
    rig.put("attack", &attack);
    for number in 1..=3 {
        let endpoints: Vec<String> = (1..=50)
            .map(|last| format!("- {{addresses: [10.244.{}.{last}], nodeName: node-a}}\n", 10 + number))
            .collect();
        let text = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{namespace: ns, name: attack-{number}, labels: \
             {{kubernetes.io/service-name: attack}}}}\naddressType: IPv4\n{}endpoints:\n{}",
            ports(10),
            endpoints.concat()
        );
        rig.put(&format!("attack-{number}"), &text);
    }
    eventually("all budgets are problems", || {
        let problems = problems(&rig, "Service ns/attack").join("\n");
        let parts = [
            "spec.externalIPs: the Service has 1010 frontends",
            "may have 200: give fewer addresses, ports or ranges, or raise --service-budget of the control plane",
            "endpoints: its EndpointSlices have 1500 endpoint ports",
            "such as EndpointSlice ns/attack-3, are left out",
            // 4,000 destinations are 40 addresses with ports for 100 endpoints.
            "spec.externalIPs: the last 16 of the externalIPs and addresses of load balancers are left out",
        ];
        if parts.iter().all(|part| problems.contains(part)) { Ok(()) } else { Err(problems) }
    });
    until_web_leads_to(&rig, 2);
    let leads = |rules: &[String], text: &str| rules.iter().any(|rule| rule.contains(text));
    let rules = rig.until_rules("the ClusterIP and the first externalIPs are served", "nat", |rules| {
        leads(rules, "10.96.0.11/32") && leads(rules, "203.0.113.3/32") && leads(rules, "10.244.12.50:8009")
    });
    assert!(!leads(&rules, "203.0.113.4/32") && !leads(&rules, "10.244.13."), "{}", rules.join("\n"));
    drop(control_plane);
}

/// An older Service claims the ClusterIP of another tenant's Service, and an address that the API
/// server may give to a Service later. Every mode decides alike: `further_service_range` and
/// `a_cluster_ip_belongs_to_its_service` send packets in each.
#[test]
fn an_external_ip_takes_no_cluster_ip_also_no_future_one() {
    let rig = Rig::web(10);
    let range = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\nspec: {cidrs: [10.96.0.0/16]}\n";
    rig.put("range", range);
    let spec = "  externalIPs: [10.96.0.10, 10.96.0.12]\nstatus: {loadBalancer: {ingress: [{ip: 10.96.0.13}]}}\n";
    let older = "namespace: ns, creationTimestamp: \"2020-01-01T00:00:00Z\"";
    rig.put("attack", &service_v4("attack", 11, spec).replace("namespace: ns", older));
    rig.put("attack-1", &slice("attack", &[("node-a", 7)], ""));
    let _agent = rig.agent(&[]);
    until_web_leads_to(&rig, 1);
    rig.until_rule("nat", "--to-destination 10.244.1.7:8080");
    let claimed = |rules: &[String]| {
        let of_attack = rules.iter().filter(|rule| rule.contains("ns/attack"));
        of_attack.filter(|rule| [10, 12, 13].iter().any(|last| rule.contains(&format!("10.96.0.{last}/32")))).count()
    };
    rig.until_rules("no rule leads from the claimed addresses to the older Service", "nat", |rules| {
        claimed(rules) == 0
    });
    assert!(problems(&rig, "Service ns/attack")[0].contains("spec.externalIPs: 10.96.0.10 belongs to Service ns/web"));
    let said = rig.headgatectl(&["services", "ns/attack"]).unwrap();
    let of_range = |last: u8| format!("10.96.0.{last} is in the range of a ServiceCIDR, which is for ClusterIPs");
    assert!(said.contains(&of_range(12)) && said.contains(&of_range(13)), "{said}");
    // The API server gives the address to a Service of another tenant.
    rig.put("later", &service_v4("later", 12, ""));
    rig.put("later-1", &slice("later", &[("node-a", 8)], ""));
    let rules = rig.until_rules("the later Service has its ClusterIP", "nat", |rules| {
        rules.iter().any(|rule| rule.contains("ns/later") && rule.contains("10.96.0.12/32"))
    });
    assert_eq!(claimed(&rules), 0);
}

/// Addresses that name each node itself, or many machines at once.
#[test]
fn a_load_balancer_address_of_loopback_is_refused() {
    let rig = Rig::web(10);
    let ingress: Vec<String> = ["127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.169.254", "203.0.113.7"]
        .iter()
        .map(|ip| format!("{{ip: {ip}}}"))
        .collect();
    let status = format!("status: {{loadBalancer: {{ingress: [{}]}}}}\n", ingress.join(", "));
    let attack = service_v4("attack", 11, &status).replace("type: NodePort", "type: LoadBalancer");
    rig.put("attack", &attack);
    rig.put("attack-1", &slice("attack", &[("node-a", 7)], ""));
    let _agent = rig.agent(&[]);
    until_web_leads_to(&rig, 1);
    let rules = rig.until_rules("the routable address is served", "nat", |rules| {
        rules.iter().any(|rule| rule.contains("203.0.113.7/32"))
    });
    for address in ["127.0.0.1/32", "0.0.0.0/32", "224.0.0.1/32", "169.254.169.254/32"] {
        let found = rules.iter().find(|rule| rule.contains("ns/attack") && rule.contains(address));
        assert!(found.is_none(), "{found:?}");
    }
    let problems = problems(&rig, "Service ns/attack").join("\n");
    for (index, class) in ["a loopback", "the unspecified", "a multicast", "a link-local"].iter().enumerate() {
        let text = format!("status.loadBalancer.ingress[{index}].ip: ");
        assert!(problems.contains(&text) && problems.contains(&format!("is {class} address")), "{problems}");
    }
}
