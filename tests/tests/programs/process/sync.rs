use std::time::{Duration, Instant};

use super::rig::{Rig, node, service, slice};

const SYNCS: &str = "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}";

// rows: 94
#[test]
fn row_94_after_a_failure_the_agent_tries_again_until_everything_is_programmed() {
    let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
    rig.make_breakable("iptables-nft-restore");
    rig.break_tool("iptables-nft-restore");
    let agent = rig.agent(&[]);
    rig.until_metric("headgate_agent_applies_failed_total{kind=\"full\"}", |failures| failures >= 2.0);
    assert_eq!(rig.metric("headgate_agent_version_programmed"), 0.0);
    assert!(agent.log().contains("broken on purpose"), "{}", agent.log());
    rig.mend_tool("iptables-nft-restore");
    rig.until_rule("filter", "ns/web:http");
    // A change that arrives during a failure is programmed too.
    rig.break_tool("iptables-nft-restore");
    rig.put("web-1", &slice("web", &[("node-a", 10)], ""));
    rig.until_metric("headgate_agent_applies_failed_total{kind=\"partial\"}", |failures| failures >= 1.0);
    rig.put("more", &service("more", 20, ""));
    rig.mend_tool("iptables-nft-restore");
    rig.until_rules("both changes are programmed", "filter", |rules| {
        rules.iter().any(|rule| rule.contains("ns/more:http")) && !rules.iter().any(|rule| rule.contains("ns/web:http"))
    });
}

// rows: 95
#[test]
fn row_95_a_burst_of_changes_is_combined_into_few_syncs() {
    let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
    let _agent = rig.agent(&["--iptables-min-sync-period=3s", "--iptables-sync-period=30s"]);
    rig.until_programmed();
    let changes_before = rig.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total");
    let before = rig.metric(SYNCS);
    for last in 1..=20 {
        rig.put("web-1", &slice("web", &[("node-a", last)], ""));
        let seen = changes_before + f64::from(last);
        rig.until_metric("kubeproxy_sync_proxy_rules_endpoint_changes_total", |changes| changes >= seen);
    }
    rig.until_rule("nat", "10.244.1.20:8080");
    let syncs = rig.until_metric(SYNCS, |syncs| syncs > before) - before;
    assert!(syncs < 20.0, "{syncs} syncs for 20 changes");
    // No change waits after the sync.
    rig.until_metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending", |pending| pending == 0.0);
}

// rows: 95
#[test]
fn row_95_rules_are_verified_again_without_any_change() {
    let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
    let _agent = rig.agent(&["--iptables-sync-period=1s"]);
    rig.until_programmed();
    rig.flush("iptables-nft");
    rig.until_rule("filter", "ns/web:http");
    rig.until_metric("headgate_agent_repairs_total", |repairs| repairs >= 1.0);
}

// rows of iptables: 96
#[test]
fn row_96_a_flush_by_another_program_is_repaired_within_a_second() {
    for variant in ["nft", "legacy"] {
        let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
        let _agent = rig.agent(&["--iptables-sync-period=1h", &format!("--iptables-variant={variant}")]);
        rig.until_programmed();
        let save = format!("iptables-{variant}-save");
        let mut flushes: Vec<Box<dyn Fn()>> = vec![
            Box::new(|| rig.flush(&format!("iptables-{variant}"))),
            Box::new(|| drop(rig.tool(&format!("iptables-{variant}"), &["-t", "nat", "-F"]))),
        ];
        if variant == "nft" {
            flushes.push(Box::new(|| drop(rig.tool("nft", &["flush", "ruleset"]))));
        }
        for flush in flushes {
            // The thread has seen the rules.
            std::thread::sleep(Duration::from_secs(1));
            let at = Instant::now();
            flush();
            rig.until_rules_of(&save, "the rules are restored", "filter", |rules| {
                rules.iter().any(|rule| rule.contains("ns/web:http"))
            });
            rig.until_rules_of(&save, "the jumps are restored", "nat", |rules| {
                rules.iter().any(|rule| rule.starts_with("-A PREROUTING") && rule.ends_with("-j KUBE-SERVICES"))
            });
            assert!(at.elapsed() < Duration::from_secs(3), "{variant}: repaired after {:?}", at.elapsed());
        }
    }
}
