//! A Service whose rules iptables refuses. Session affinity needs the match `recent`, which is not
//! installed.

use super::rig::{Program, Rig, eventually, node, service, slice};

const EXTENSION: &str = "libxt_recent.so";
const AFFINITY: &str = "  sessionAffinity: ClientIP\n";

fn start(rig: &Rig, variant: &str) -> Program {
    rig.agent_without_extension(EXTENSION, &[&format!("--iptables-variant={variant}")])
}

fn translations(rules: &[String], service: &str) -> Vec<String> {
    let rules = rules.iter().filter(|rule| rule.contains("DNAT") && rule.contains(&format!("ns/{service}:")));
    rules.filter_map(|rule| Some(rule.rsplit_once("--to-destination ")?.1.to_owned())).collect()
}

fn until_translated(rig: &Rig, variant: &str, service: &str, to: &[&str]) {
    let mut to: Vec<&str> = to.to_vec();
    to.sort_unstable();
    rig.until_rules_of(
        &format!("iptables-{variant}-save"),
        &format!("{service} is translated to {to:?}"),
        "nat",
        |rules| {
            let mut found = translations(rules, service);
            found.sort_unstable();
            found == to
        },
    );
}

/// Waits until `headgatectl agents` lists the refused Service. If `listed` is false, waits until
/// `headgatectl agents` lists no refusal.
fn until_listed(rig: &Rig, listed: bool) {
    eventually(&format!("headgatectl agents lists the refusal: {listed}"), || {
        let said = rig.headgatectl(&["agents"])?;
        let is_listed = said.contains("rejected Service ns/sticky") && said.contains("Couldn't load match `recent'");
        let is_current = said.contains("up to date") && !said.contains("rejected");
        if (listed && is_listed) || (!listed && is_current) { Ok(()) } else { Err(said) }
    });
}

fn check_that_a_refused_service_delays_no_other(variant: &str) {
    let rig = Rig::serving(&[
        ("node", node("")),
        ("sticky", service("sticky", 1, "")),
        ("sticky-1", slice("sticky", &[("node-a", 1)], "")),
        ("plain", service("plain", 2, "")),
        ("plain-1", slice("plain", &[("node-a", 2)], "")),
    ]);
    let agent = start(&rig, variant);
    rig.until_programmed();
    until_translated(&rig, variant, "sticky", &["10.244.1.1:8080"]);

    // Both Services change together, and iptables refuses one of them.
    rig.put("sticky", &service("sticky", 1, AFFINITY));
    rig.put("plain-1", &slice("plain", &[("node-a", 2), ("node-b", 3)], ""));
    until_translated(&rig, variant, "plain", &["10.244.1.2:8080", "10.244.1.3:8080"]);
    rig.until_metric("headgate_agent_services_refused", |count| count == 1.0);
    until_listed(&rig, true);
    rig.put("sticky-1", &slice("sticky", &[("node-a", 4)], ""));
    rig.put("plain-1", &slice("plain", &[("node-a", 5)], ""));
    until_translated(&rig, variant, "plain", &["10.244.1.5:8080"]);
    until_translated(&rig, variant, "sticky", &["10.244.1.1:8080"]);
    rig.until_health("/healthz", 200);
    assert_eq!(rig.metric("headgate_agent_service_refusals_total"), 1.0);

    // A new agent programs the other Services. The new agent has no copy of the last good rules of
    // the refused Service.
    drop(agent);
    let _agent = start(&rig, variant);
    rig.until_metric("headgate_agent_services_refused", |count| count == 1.0);
    rig.put("plain-1", &slice("plain", &[("node-a", 6)], ""));
    until_translated(&rig, variant, "plain", &["10.244.1.6:8080"]);
    until_translated(&rig, variant, "sticky", &[]);
    until_listed(&rig, true);

    // Install the missing match and change the Service.
    rig.give_extension(EXTENSION);
    rig.put("sticky-1", &slice("sticky", &[("node-a", 7)], ""));
    until_translated(&rig, variant, "sticky", &["10.244.1.7:8080"]);
    let save = format!("iptables-{variant}-save");
    let rules = rig.rules(&save, "nat");
    assert!(rules.iter().any(|rule| rule.contains("-m recent")), "{rules:#?}");
    let canaries =
        |table: &str| rig.rules(&save, table).iter().filter(|rule| rule.starts_with("-A KUBE-PROXY-CANARY")).count();
    // The agent tries the rules of a Service separately, and the agent's next step removes these
    // trial rules. An agent that is up to date has removed the trial rules.
    until_listed(&rig, false);
    assert_eq!((canaries("nat"), canaries("filter")), (0, 0), "rules of trials are left");
    assert_eq!(rig.metric("headgate_agent_services_refused"), 0.0);
}

#[test]
fn a_service_that_iptables_legacy_refuses_delays_no_other() {
    check_that_a_refused_service_delays_no_other("legacy");
}

#[test]
fn a_service_that_iptables_nft_refuses_delays_no_other() {
    check_that_a_refused_service_delays_no_other("nft");
}
