use headgate_proto::v1::{AgentInfo, ChangeTimes, FleetInfo, NodeVerification, Shadow, SourceAge};

use super::*;

const PLAIN: Style = Style { colour: false, width: None };

fn strings<const N: usize>(items: [&str; N]) -> Vec<String> {
    items.map(str::to_owned).to_vec()
}

fn agent(node: &str) -> AgentInfo {
    AgentInfo {
        node: node.into(),
        address: "192.0.2.11:40112".into(),
        agent_version: "0.1.0".into(),
        backend: "iptables-nft".into(),
        head_version: 18,
        sent_version: 18,
        programmed_version: 18,
        apply_microseconds: 4_200,
        services_planned: 2,
        objects_written: 24,
        resume: "full".into(),
        resumed_resources: 12,
        connected_unix_ms: 1_000_000,
        replica: "cp-1".into(),
        ..AgentInfo::default()
    }
}

#[test]
fn the_table_of_agents_shows_states_errors_and_rejections() {
    let failing = AgentInfo {
        programmed_version: 16,
        lag_ms: 4_200,
        last_error: "iptables-nft-restore: line 7 failed".into(),
        ..agent("node-b")
    };
    let behind = AgentInfo { programmed_version: 17, sent_version: 17, lag_ms: 12, ..agent("node-c") };
    let degraded = AgentInfo {
        degraded: strings(["IPv6 has no iptables here"]),
        rejections: vec![Problem {
            object: "Endpoint demo/web 10.1.2.3".into(),
            field: "ports[0].port".into(),
            message: "0 is not a valid port".into(),
            origin: String::new(),
        }],
        ..agent("node-d")
    };
    let all = [agent("node-a"), failing, behind, degraded];
    let expected = "\
NODE    STATE       PROGRAMMED  SENT       LAG  BACKEND
node-a  up to date          18    18         0  iptables-nft
node-b  failing             16    18  2 (4.2s)  iptables-nft
node-c  up to date          17    17  1 (12ms)  iptables-nft
node-d  rejecting           18    18         0  iptables-nft
node-b: error: iptables-nft-restore: line 7 failed
node-d: degraded: IPv6 has no iptables here
node-d: rejected Endpoint demo/web 10.1.2.3, ports[0].port: 0 is not a valid port
";
    assert_eq!(agents(&all, 1_192_000, false, PLAIN), expected);
    let wide = agents(&all[..1], 1_192_000, true, PLAIN);
    let row = "node-a  up to date          18    18    0  iptables-nft  4.2ms        2       24  full (12)      3m12s  192.0.2.11:40112  0.1.0  cp-1";
    assert_eq!(wide.lines().nth(1), Some(row));
}

#[test]
fn nodes_without_an_agent_have_a_row_with_what_is_known() {
    let absent = |node: &str, programmed_version, departed_ms, reason: &str| AgentInfo {
        node: node.into(),
        state: "no_agent".into(),
        reason: reason.into(),
        programmed_version,
        departed_ms,
        ..AgentInfo::default()
    };
    let verified = AgentInfo { verified_unix_ms: 1_180_000, ..agent("worker-1.eu-west.example") };
    let all = [
        absent("worker-2.eu-west.example", 17, 252_000, "its stream to cp-1 ended"),
        absent("worker-3.eu-west.example", 0, 0, "it never had an agent"),
        verified,
    ];
    let expected = "\
NODE                      STATE       PROGRAMMED  SENT  LAG  BACKEND            SEEN  VERIFIED
worker-2.eu-west.example  no agent            17     -    -  -             4m12s ago         -
worker-3.eu-west.example  no agent             -     -    -  -                 never         -
worker-1.eu-west.example  up to date          18    18    0  iptables-nft        now   12s ago
worker-2.eu-west.example: no agent: its stream to cp-1 ended
worker-3.eu-west.example: no agent: it never had an agent
";
    let table = agents(&all, 1_192_000, false, PLAIN);
    assert_eq!(table, expected);
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    let wide = agents(&all, 1_192_000, true, PLAIN);
    let row: Vec<&str> = wide.lines().nth(2).unwrap().split_whitespace().collect();
    assert_eq!(row[..3], ["worker-3.eu-west.example", "no", "agent"], "{wide}");
    assert!(row.len() == 17 && row[3..].iter().all(|cell| ["-", "never"].contains(cell)), "{wide}");
    let info = FleetInfo { up_to_date: 2, no_agent: 1, nodes: 3, ..FleetInfo::default() };
    assert_eq!(fleet(&info), "fleet: 2 of 3 nodes up to date, 1 without an agent");
}

#[test]
fn status_lists_problems_and_the_state_of_the_source() {
    let response = GetStatusResponse {
        replica: "control".into(),
        epoch: "00c0ffee".into(),
        version: 18,
        build: "0.1.0".into(),
        source: "files:/etc/headgate".into(),
        synced: true,
        source_age_ms: 850,
        services: 2,
        endpoints: 6,
        nodes: 3,
        agents: 3,
        problems: vec![Problem {
            object: "Service demo/web".into(),
            field: "spec.ports".into(),
            message: "is empty: give at least one port".into(),
            origin: "web.yaml, document 2".into(),
        }],
        source_ages: [("endpoint_slices", 250), ("services", 61_000)]
            .map(|(kind, age_ms)| SourceAge { kind: kind.into(), age_ms })
            .to_vec(),
        fleet: Some(FleetInfo { up_to_date: 2, behind: 1, ..FleetInfo::default() }),
        source_state: "following".into(),
        ..GetStatusResponse::default()
    };
    let expected = "\
replica     control (headgate 0.1.0)
source      files:/etc/headgate
synced      yes
last heard  850ms ago (endpoint_slices 250ms, services 1m01s)
version     18 (epoch 00c0ffee)
services    2
endpoints   6
nodes       3
agents      3
fleet       2 of 3 nodes up to date, 1 behind
problems    1
  Service demo/web, spec.ports: is empty: give at least one port [web.yaml, document 2]
";
    assert_eq!(status(&response, PLAIN), expected);
    let other = |name: &str, state: &str, for_ms, agents, problem: &str| ReplicaInfo {
        replica: name.into(),
        epoch: "0badcafe".into(),
        state: state.into(),
        for_ms,
        agents,
        problem: problem.into(),
        ..ReplicaInfo::default()
    };
    let replicas = vec![
        other("cp-2", "joined", 18_180_000, 1_024, ""),
        other("10.0.0.9:7444", "unreachable", 4_250, 0, "connection\u{7} refused"),
    ];
    let with_others = status(&GetStatusResponse { replicas, ..response }, PLAIN);
    let others = "
OTHER REPLICA  STATE          FOR  AGENTS  EPOCH
cp-2           joined       5h03m   1,024  0badcafe
10.0.0.9:7444  unreachable   4.2s       0  0badcafe
10.0.0.9:7444: connection\\u{7} refused
";
    assert_eq!(with_others.strip_prefix(expected), Some(others));
}

#[test]
fn control_characters_from_agents_and_manifests_are_escaped() {
    let evil = "\u{1b}]0;title\u{7}\nnode-z  current\u{9b}2J\u{202e}";
    let agent = AgentInfo {
        node: evil.into(),
        backend: evil.into(),
        degraded: strings([evil]),
        last_error: evil.into(),
        rejections: vec![Problem { object: evil.into(), message: evil.into(), ..Problem::default() }],
        ..AgentInfo::default()
    };
    let service =
        ServiceInfo { namespace: evil.into(), name: evil.into(), conflicts: strings([evil]), ..ServiceInfo::default() };
    let endpoint = EndpointInfo { name: evil.into(), node: evil.into(), zone: evil.into(), ..EndpointInfo::default() };
    let problem = Problem { object: evil.into(), origin: evil.into(), ..Problem::default() };
    let status = GetStatusResponse { replica: evil.into(), problems: vec![problem], ..GetStatusResponse::default() };
    let of_service = WatchEvent { service: Some(service.clone()), action: evil.into(), ..WatchEvent::default() };
    let of_endpoint = WatchEvent { endpoint: Some(endpoint.clone()), ..WatchEvent::default() };
    let tables = [
        (agents(&[agent], 0, true, PLAIN), 5),
        (services(&[service], false, PLAIN), 3),
        (endpoints(&[endpoint], false, PLAIN), 2),
        (super::status(&status, PLAIN), 12),
        (event(&of_service, PLAIN) + "\n", 1),
        (event(&of_endpoint, PLAIN) + "\n", 1),
    ];
    for (text, lines) in tables {
        assert!(text.contains("\\u{1b}]0;title"), "{text}");
        assert!(!text.chars().any(|character| character.is_control() && character != '\n'), "{text:?}");
        assert!(text.contains("\\u{202e}") && !text.contains('\u{202e}'), "{text:?}");
        assert_eq!(text.lines().count(), lines, "{text}");
    }
}

#[test]
fn rules_of_another_proxy_are_shown_with_differences_by_design_and_times() {
    let drift = |difference: &str| Drift { service: "shop/web".into(), difference: difference.into() };
    let times = |count, median_us| ChangeTimes { count, median_us, p99_us: 2 * median_us, longest_us: 3 * median_us };
    let node = NodeVerification {
        node: "node-b".into(),
        result: "drift".into(),
        frontends: 412,
        drift: vec![drift("connections to 10.96.0.1 port 80/TCP are not served, but should be rejected")],
        drift_count: 2,
        shadow: Some(Shadow {
            proxy: "kube-proxy (iptables)".into(),
            by_design: vec![drift("one thing (a reason)"), drift("another thing (a reason)")],
            by_design_count: 2,
            headgate: Some(times(4, 250)),
            other: Some(times(3, 400_000)),
            resolution: Some(times(3, 50_000)),
            ..Shadow::default()
        }),
        ..NodeVerification::default()
    };
    let shown = shadows(&[node], PLAIN);
    for part in [
        "node-b  differs        412            2          2        0  kube-proxy (iptables)",
        "node-b: Service shop/web: connections to 10.96.0.1 port 80/TCP are not served, but should be rejected\n",
        "node-b: 1 more difference left out\n",
        "node-b: by design, 2 times: a reason; such as Service shop/web: one thing\n",
        "from a change to its rules: median 400ms, p99 800ms, longest 1.2s (3 changes), at most 50.0ms too long",
        "Headgate could write after: median 250µs, p99 500µs, longest 750µs (4 changes)\n",
    ] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
}
