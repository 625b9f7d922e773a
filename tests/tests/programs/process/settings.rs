use super::rig::{Rig, node};

const CONNTRACK: &str = "net/netfilter/nf_conntrack";

// rows: 88
#[test]
fn row_88_timeouts_of_connection_tracking_are_set() {
    let rig = Rig::new();
    let before = rig.parameter(&format!("{CONNTRACK}_udp_timeout"));
    // The size of the conntrack table applies to the whole machine, and a namespace cannot set this
    // size. The agent logs a warning and sets all other parameters.
    let (status, log) = rig.run_agent(&["--init-only", "--conntrack-tcp-timeout-established=10h"]);
    assert!(status.success(), "{log}");
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_tcp_timeout_established")), "36000");
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_tcp_timeout_close_wait")), "3600");
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_tcp_be_liberal")), "0");
    assert_eq!(
        rig.parameter(&format!("{CONNTRACK}_udp_timeout")),
        before,
        "a timeout changed although no option sets it"
    );
    let arguments = ["--init-only", "--conntrack-udp-timeout=7s", "--conntrack-udp-timeout-stream=1m10s"];
    assert!(rig.run_agent(&arguments).0.success());
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_udp_timeout")), "7");
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_udp_timeout_stream")), "70");
}

fn web() -> Rig {
    Rig::web_with(10, node(""), "  externalIPs: [198.51.100.7]\n")
}

fn drops_invalid(rules: &[String]) -> bool {
    rules.iter().any(|rule| rule.contains("--ctstate INVALID") && rule.ends_with("-j DROP"))
}

// rows: 87
#[test]
fn row_87_invalid_packets_are_dropped_unless_connection_tracking_is_liberal() {
    let rig = web();
    let agent = rig.agent(&[]);
    rig.until_rules("invalid packets are dropped", "filter", drops_invalid);
    assert!(agent.terminate().0.success());
    let _agent = rig.agent(&["--conntrack-tcp-be-liberal"]);
    rig.until_rules("invalid packets pass", "filter", |rules| !drops_invalid(rules));
    assert_eq!(rig.parameter(&format!("{CONNTRACK}_tcp_be_liberal")), "1");
}

/// No kernel parameter lets packets from ::1 leave the loopback interface. A node without a proxy
/// is worse than this limit, so the agent starts and names it.
#[test]
fn the_log_says_that_node_ports_do_not_answer_on_ipv6_loopback() {
    let rig = web();
    let agent = rig.agent(&["--nodeport-addresses=127.0.0.0/8,::/0"]);
    rig.until_programmed();
    assert!(!agent.log().contains("do not answer on ::1"), "no range names ::1: {}", agent.log());
    assert!(agent.terminate().0.success());
    let agent = rig.agent(&["--nodeport-addresses=127.0.0.0/8,::1/128"]);
    rig.until_programmed();
    assert!(agent.log().contains("NodePorts do not answer on ::1"), "{}", agent.log());
}
