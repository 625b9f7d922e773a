//! Programs whose log nobody reads any more, as after `2>&1 | head -1`.

use std::time::Instant;

use super::rig::{REPLICA_OPTIONS, Rig, eventually, node, service};

fn rig() -> (Rig, String) {
    let rig = Rig::new();
    rig.put("node", &node(""));
    rig.put("web", &service("web", 10, ""));
    let source = rig.manifests();
    (rig, source)
}

#[test]
fn a_closed_log_ends_no_program() {
    const AGENT: [&str; 4] = ["--node-name=node-a", "--state-dir=", "--proxy-mode=iptables", "--iptables-variant=nft"];
    let (rig, source) = rig();
    let options = [&[source.as_str()], &REPLICA_OPTIONS[..]].concat();
    let control_plane = rig.unheard("headgate-control-plane", &options);
    let to = ["--control-plane=http://127.0.0.1:7443", "--insecure-loopback"];
    let agent = rig.unheard("headgate-node-agent", &[&AGENT[..], &to].concat());
    rig.until_programmed();
    assert!(agent.terminate().0.success());
    assert!(control_plane.terminate().0.success());
    let headgate = rig.unheard("headgate", &[&AGENT[..], &[&source]].concat());
    rig.until_programmed();
    assert!(headgate.terminate().0.success());
}

#[test]
fn the_status_of_an_error_does_not_depend_on_who_reads_it() {
    let (rig, _) = rig();
    for (name, arguments) in [
        ("headgate-control-plane", &["--source=nothing"][..]),
        ("headgate-node-agent", &["--log=["]),
        ("headgate", &["--log=["]),
        // The socket of another test's `headgate` would answer by default.
        ("headgatectl", &["--server=http://127.0.0.1:7444", "status"]),
    ] {
        let (status, _) = rig.unheard(name, arguments).ended();
        assert!(status.code().is_some_and(|code| (1..=4).contains(&code)), "{name}: {status}");
    }
}

/// A line for each burst says what was programmed. After the first line, there is at most one in 10
/// seconds.
#[test]
fn the_log_says_what_was_programmed() {
    let begun = Instant::now();
    let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
    let agent = rig.agent(&[]);
    rig.until_programmed();
    let lines = || {
        let log = agent.log();
        log.lines().filter(|line| line.contains(" programmed version=")).map(str::to_owned).collect::<Vec<_>>()
    };
    let first = eventually("the line", || lines().first().cloned().ok_or_else(|| agent.log()));
    assert!(first.contains(" INFO ") && first.contains(" syncs=1 services=1 objects="), "{first}");
    for name in ["a", "b", "c", "d"] {
        rig.put(name, &service(name, name.as_bytes()[0], ""));
        rig.until_rule("filter", &format!("ns/{name}:http"));
    }
    let (lines, seconds) = (lines(), begun.elapsed().as_secs());
    assert!(lines.len() as u64 <= 2 + seconds / 10, "in {seconds} s: {lines:?}");
    assert!(!agent.log().contains("NodeInputs {"), "{}", agent.log());
}

/// The epoch of a replica is written alike by the replica and by the agent that has held its state.
#[test]
fn an_epoch_has_one_notation_in_all_logs() {
    let rig = Rig::serving(&[("node", node("")), ("web", service("web", 10, ""))]);
    let state = format!("--state-dir={}", rig.path("state").display());
    let agent = rig.agent(&[&state]);
    rig.until_programmed();
    assert!(agent.terminate().0.success());
    // The next agent reads the state that the first one has saved.
    let agent = rig.agent(&[&state]);
    rig.until_programmed();
    let epoch = |log: &str, message: &str| {
        let line = log.lines().find(|line| line.contains(message)).unwrap_or_else(|| panic!("no {message}: {log}"));
        let (_, rest) = line.split_once(" epoch=").unwrap_or_else(|| panic!("no epoch: {line}"));
        rest.split(' ').next().unwrap_or_default().trim_matches('"').to_owned()
    };
    let of_replica = epoch(&rig.control_plane_log(), "control plane runs");
    assert!(of_replica.len() == 16 && of_replica.chars().all(|digit| digit.is_ascii_hexdigit()), "{of_replica}");
    assert_eq!(epoch(&agent.log(), "read the last good state"), of_replica);
}
