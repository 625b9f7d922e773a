use std::time::{Duration, Instant};

use super::rig::{Rig, eventually, node, service, slice};

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

/// Those who ask about the node do not take a failure for a success.
#[test]
fn a_change_that_the_kernel_does_not_have_is_not_acknowledged() {
    let rig = Rig::web(10);
    rig.make_breakable("iptables-nft-restore");
    let _agent = rig.agent(&[]);
    rig.until_programmed();
    rig.break_tool("iptables-nft-restore");
    rig.put("more", &service("more", 20, ""));
    rig.until_metric("headgate_agent_applies_failed_total{kind=\"partial\"}", |failures| failures >= 1.0);
    // The agent may be late with its report of the failure, but must not report success.
    eventually("the failure is named", || match rig.headgatectl(&["wait", "ns/more", "--timeout=2s"]) {
        Err(error) if error.contains("broken on purpose") => Ok(()),
        Err(other) => Err(other),
        Ok(said) => panic!("{said}"),
    });
    rig.mend_tool("iptables-nft-restore");
    rig.until_said(&["wait", "ns/more"], &["1 node has programmed it"]);
}

/// The state on disk is older than the rules of an agent that was killed.
#[test]
fn newer_rules_stay_while_the_next_agent_cannot_look_at_them() {
    let mut rig = Rig::web(10);
    rig.make_breakable("iptables-nft");
    let folder = format!("--state-dir={}", rig.path("state").display());
    let agent = rig.agent(&[&folder, "--state-save-period=1h"]);
    let file = rig.path("state/state");
    eventually("the state is saved", || if file.exists() { Ok(()) } else { Err("no file".to_owned()) });
    rig.put("web-1", &slice("web", &[("node-a", 11)], ""));
    rig.until_rule("nat", "10.244.1.11:8080");
    drop(agent);
    rig.stop_control_plane();
    rig.break_tool("iptables-nft");
    let agent = rig.agent(&[&folder]);
    agent.until_logged("could not find out whether the rules of the last run are in place");
    rig.mend_tool("iptables-nft");
    agent.until_logged("the agent does not change them until");
    let rules = rig.rules("iptables-nft-save", "nat");
    assert!(rules.iter().any(|rule| rule.contains("10.244.1.11:8080")), "{rules:#?}");
    assert!(!rules.iter().any(|rule| rule.contains("10.244.1.10:8080")), "{rules:#?}");
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
        let agent = rig.agent(&["--iptables-sync-period=1h", &format!("--iptables-variant={variant}")]);
        rig.until_programmed();
        let save = format!("iptables-{variant}-save");
        let mut flushes: Vec<Box<dyn Fn()>> = vec![
            Box::new(|| rig.flush(&format!("iptables-{variant}"))),
            Box::new(|| drop(rig.tool(&format!("iptables-{variant}"), &["-w", "-t", "nat", "-F"]))),
        ];
        if variant == "nft" {
            flushes.push(Box::new(|| drop(rig.tool("nft", &["flush", "ruleset"]))));
        }
        let repaired_after = |flush: &dyn Fn()| {
            // The sync before ends.
            std::thread::sleep(Duration::from_secs(1));
            if variant == "legacy" {
                // The thread must have seen the rules.
                agent.until_whole_turn("iptables");
            }
            let at = Instant::now();
            flush();
            rig.until_rules_of(&save, "the rules are restored", "filter", |rules| {
                rules.iter().any(|rule| rule.contains("ns/web:http"))
            });
            rig.until_rules_of(&save, "the jumps are restored", "nat", |rules| {
                rules.iter().any(|rule| rule.starts_with("-A PREROUTING") && rule.ends_with("-j KUBE-SERVICES"))
            });
            at.elapsed()
        };
        for flush in flushes {
            // A busy machine may pause during some of the repairs.
            let mut took = (0..10).map(|_| repaired_after(&*flush));
            assert!(took.any(|took| took < Duration::from_secs(3)), "{variant}: no repair takes less than 3 s");
        }
    }
}
