//! What `headgatectl wait` and `agents` say of a real agent, held against the kernel.

use super::rig::{Rig, eventually, node, service, slice};

const RESTORE: &str = "iptables-nft-restore";

fn translates_to(rig: &Rig, address: &str) -> bool {
    let target = format!("{address}:8080");
    rig.rules("iptables-nft-save", "nat").iter().any(|rule| rule.contains("DNAT") && rule.contains(&target))
}

/// Commits of which the replica has measured how long they took to be in the kernel everywhere.
fn measured(rig: &Rig) -> u64 {
    let (_, page) = rig.replica_page("/metrics").unwrap();
    let count = "headgate_control_plane_programmed_everywhere_seconds_count ";
    let found = page.lines().find_map(|line| line.strip_prefix(count)?.parse().ok());
    found.unwrap_or_else(|| panic!("{page}"))
}

#[test]
fn wait_returns_when_the_kernel_has_it_and_says_why_it_has_not() {
    let rig = Rig::serving(&[
        ("node", node("")),
        ("web", service("web", 1, "")),
        ("web-1", slice("web", &[("node-a", 1)], "")),
    ]);
    rig.make_breakable(RESTORE);
    let _agent = rig.agent(&["--iptables-sync-period=1s"]);
    rig.until_programmed();
    let said = rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(said.starts_with("service ns/web: 1 node has programmed it, "), "{said}");
    assert!(translates_to(&rig, "10.244.1.1"));
    // The first commit is among them if the agent was there before the manifests had been read.
    let before = measured(&rig);

    rig.break_tool(RESTORE);
    rig.put("web-1", &slice("web", &[("node-a", 1), ("node-a", 2)], ""));
    // At first the change has not been read, then not been sent, then not been tried.
    eventually("wait names the node that has not programmed it, and says why", || {
        let said = rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.2", "--timeout", "2s"]).unwrap_err();
        let is_counted = said.contains("exit status: 3") && said.contains("0 of 1 nodes have programmed it");
        let is_told = said.contains("node-a: at version 1 of 2, ") && said.contains("broken on purpose");
        if is_counted && is_told { Ok(()) } else { Err(said) }
    });
    eventually("headgatectl agents shows the failure", || {
        let said = rig.headgatectl(&["agents"])?;
        let row = said.lines().nth(1).unwrap_or_default();
        let is_shown = row.starts_with("node-a  failing") && row.contains("iptables-nft");
        let is_told = said.contains("node-a: error: version 2, attempt ") && said.contains("broken on purpose");
        let is_counted = said.contains("fleet: 0 of 1 up to date, 1 failing");
        if is_shown && is_told && is_counted { Ok(()) } else { Err(said) }
    });
    assert!(!translates_to(&rig, "10.244.1.2"));

    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.2"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.2"), "wait returned before the kernel had it");
    rig.put("web-1", &slice("web", &[("node-a", 2)], ""));
    rig.headgatectl(&["wait", "ns/web", "--endpoint", "10.244.1.1", "--gone"]).unwrap();
    assert!(!translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had it");

    let agents = rig.headgatectl(&["agents", "-o", "json"]).unwrap();
    let agents: serde_json::Value = serde_json::from_str(&agents).unwrap();
    let agent = &agents[0];
    assert_eq!((&agent["sent_version"], &agent["programmed_version"]), (&3.into(), &3.into()), "{agent}");
    let counts = ["apply_microseconds", "services_planned", "objects_written"].map(|field| agent[field].as_u64());
    assert!(counts.into_iter().all(|count| count > Some(0)), "{agent}");
    assert_eq!(measured(&rig) - before, 2);
    let fleet = rig.headgatectl(&["agents"]).unwrap();
    assert!(fleet.contains("fleet: 1 of 1 up to date; everywhere after p50 "), "{fleet}");
}

/// The agent has forgotten nothing and the kernel has: what it acknowledged before is no more,
/// whichever way it got lost.
#[test]
fn what_was_acknowledged_and_is_gone_from_the_kernel_does_not_count() {
    let rig = Rig::serving(&[("web", service("web", 1, "")), ("web-1", slice("web", &[("node-a", 1)], ""))]);
    rig.make_breakable(RESTORE);
    let state = format!("--state-dir={}", rig.path("state").display());
    let arguments = [state.as_str(), "--state-save-period=100ms", "--iptables-sync-period=1s"];
    let agent = rig.agent(&arguments);
    rig.until_programmed();
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    let is_told = |what: &str| {
        eventually(what, || {
            let said = rig.headgatectl(&["wait", "ns/web", "--timeout", "300ms"]).unwrap_or_else(|error| error);
            let is_counted = said.contains("exit status: 3") && said.contains("0 of 1 nodes have programmed it");
            if is_counted && said.contains("broken on purpose") { Ok(()) } else { Err(said) }
        });
    };

    // Somebody flushes the rules, and they cannot be written again.
    rig.break_tool(RESTORE);
    rig.flush("iptables-nft");
    is_told("the agent finds that the rules are gone, and wait says so");
    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had it");

    // The node reboots: its disk has the state, with the version at this very replica, and its
    // kernel nothing.
    agent.terminate();
    rig.break_tool(RESTORE);
    rig.flush("iptables-nft");
    let agent = rig.agent(&arguments);
    eventually("the agent is back, by the log", || {
        let agents = rig.headgatectl(&["agents", "-o", "wide"])?;
        if agents.contains("log (0)") { Ok(()) } else { Err(agents) }
    });
    is_told("wait names the node whose kernel has nothing after the reboot");
    rig.mend_tool(RESTORE);
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    assert!(translates_to(&rig, "10.244.1.1"), "wait returned before the kernel had it");
    drop(agent);
}
