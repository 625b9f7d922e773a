//! Compares the reports of `headgatectl wait` and `headgatectl agents` about a real agent with the
//! kernel's rules.

use super::rig::{Rig, eventually, service, slice};

const RESTORE: &str = "iptables-nft-restore";

fn translates_to(rig: &Rig, address: &str) -> bool {
    let target = format!("{address}:8080");
    rig.rules("iptables-nft-save", "nat").iter().any(|rule| rule.contains("DNAT") && rule.contains(&target))
}

/// The number of commits for which the replica has measured the time until every node had
/// programmed the commit.
fn measured(rig: &Rig) -> u64 {
    let (_, page) = rig.replica_page("/metrics").unwrap();
    let count = "headgate_control_plane_programmed_everywhere_seconds_count ";
    let found = page.lines().find_map(|line| line.strip_prefix(count)?.parse().ok());
    found.unwrap_or_else(|| panic!("{page}"))
}

#[test]
fn wait_returns_once_the_kernel_has_the_change_and_otherwise_reports_the_reason() {
    let rig = Rig::web(1);
    rig.make_breakable(RESTORE);
    let _agent = rig.agent(&["--iptables-sync-period=1s"]);
    rig.until_programmed();
    let said = rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(said.starts_with("service ns/web: 1 node has programmed it, "), "{said}");
    assert!(translates_to(&rig, "10.244.1.1"));
    // The count includes the first commit only if the agent connected before the control plane had
    // read the manifests.
    let before = measured(&rig);

    rig.break_tool(RESTORE);
    rig.put("web-1", &slice("web", &[("node-a", 1), ("node-a", 2)], ""));
    // At first, `wait` may report another reason: the change has not been read, sent or tried yet.
    eventually("wait names the node that has not programmed the change, and says why", || {
        let said = rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.2", "--timeout", "2s"]).unwrap_err();
        let is_counted = said.contains("exit status: 3") && said.contains("0 of 1 nodes have programmed it");
        let names_reason = said.contains("node-a: at version 1 of 2, ") && said.contains("broken on purpose");
        if is_counted && names_reason { Ok(()) } else { Err(said) }
    });
    eventually("headgatectl agents shows the failure", || {
        let said = rig.headgatectl(&["agents"])?;
        let row = said.lines().nth(1).unwrap_or_default();
        let is_shown = row.starts_with("node-a  failing") && row.contains("iptables-nft");
        let names_error = said.contains("node-a: error: version 2, attempt ") && said.contains("broken on purpose");
        let is_counted = said.contains("fleet: 0 of 1 nodes up to date, 1 failing");
        if is_shown && names_error && is_counted { Ok(()) } else { Err(said) }
    });
    assert!(!translates_to(&rig, "10.244.1.2"));

    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.2"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.2"), "wait returned before the kernel had the change");
    rig.put("web-1", &slice("web", &[("node-a", 2)], ""));
    rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.1", "--gone"]).unwrap();
    assert!(!translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had the change");

    let agents = rig.headgatectl(&["agents", "-o", "json"]).unwrap();
    let agents: serde_json::Value = serde_json::from_str(&agents).unwrap();
    let agent = &agents[0];
    assert_eq!((&agent["sent_version"], &agent["programmed_version"]), (&3.into(), &3.into()), "{agent}");
    let counts = ["apply_microseconds", "services_planned", "objects_written"].map(|field| agent[field].as_u64());
    assert!(counts.into_iter().all(|count| count > Some(0)), "{agent}");
    assert_eq!(measured(&rig) - before, 2);
    let fleet = rig.headgatectl(&["agents"]).unwrap();
    assert!(fleet.contains("fleet: 1 of 1 nodes up to date; time until all nodes have a change: p50 "), "{fleet}");
}

/// The kernel loses rules that the agent has acknowledged, by a flush or by a reboot. These rules
/// must not count as programmed.
#[test]
fn acknowledged_rules_that_the_kernel_lost_do_not_count_as_programmed() {
    let rig = Rig::serving(&[("web", service("web", 1, "")), ("web-1", slice("web", &[("node-a", 1)], ""))]);
    rig.make_breakable(RESTORE);
    let state = format!("--state-dir={}", rig.path("state").display());
    let arguments = [state.as_str(), "--state-save-period=100ms", "--iptables-sync-period=1s"];
    let agent = rig.agent(&arguments);
    rig.until_programmed();
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    let wait_reports = |what: &str| {
        eventually(what, || {
            let said = rig.headgatectl(&["wait", "ns/web", "--timeout", "300ms"]).unwrap_or_else(|error| error);
            let is_counted = said.contains("exit status: 3") && said.contains("0 of 1 nodes have programmed it");
            if is_counted && said.contains("broken on purpose") { Ok(()) } else { Err(said) }
        });
    };

    // Another program flushes the rules, and the agent cannot write them again.
    rig.break_tool(RESTORE);
    rig.flush("iptables-nft");
    wait_reports("wait reports that the agent cannot restore the flushed rules");
    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had the rules");

    // The node reboots. The node's disk has the state of this replica's last version, and the
    // node's kernel has no rules.
    agent.terminate();
    rig.break_tool(RESTORE);
    rig.flush("iptables-nft");
    let agent = rig.agent(&arguments);
    // The agent resumes by log.
    rig.until_said(&["agents", "-o", "wide"], &["log (0)"]);
    wait_reports("wait reports that the agent cannot program the kernel after the reboot");
    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had the rules");
    drop(agent);
}
