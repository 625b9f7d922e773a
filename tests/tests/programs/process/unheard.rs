//! Programs whose log nobody reads any more, as after `2>&1 | head -1`.

use super::rig::{Rig, node, service};

fn rig() -> (Rig, String) {
    let rig = Rig::new();
    rig.put("node", &node(""));
    rig.put("web", &service("web", 10, ""));
    let source = format!("--source=files:{}", rig.path("manifests").display());
    (rig, source)
}

#[test]
fn a_closed_log_ends_no_program() {
    const AGENT: [&str; 4] = ["--node-name=node-a", "--state-dir=", "--proxy-mode=iptables", "--iptables-variant=nft"];
    let (rig, source) = rig();
    let control_plane = rig.unheard(
        "headgate-control-plane",
        &[&source, "--listen=127.0.0.1:7443", "--insecure-loopback", "--metrics-listen=127.0.0.1:7480"],
    );
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
    for (name, argument) in [
        ("headgate-control-plane", "--source=nothing"),
        ("headgate-node-agent", "--log=["),
        ("headgate", "--log=["),
        ("headgatectl", "status"),
    ] {
        let (status, _) = rig.unheard(name, &[argument]).ended();
        assert!(status.code().is_some_and(|code| (1..=4).contains(&code)), "{name}: {status}");
    }
}
