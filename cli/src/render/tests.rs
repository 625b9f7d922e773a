use headgate_proto::v1::{AgentInfo, FleetInfo, NodeVerification, OpenConnection, SourceAge};

use super::*;

const PLAIN: Style = Style { colour: false };

fn strings<const N: usize>(items: [&str; N]) -> Vec<String> {
    items.map(str::to_owned).to_vec()
}

fn web() -> ServiceInfo {
    ServiceInfo {
        namespace: "demo".into(),
        name: "web".into(),
        cluster_ips: strings(["10.96.0.10", "fd00:10:96::a"]),
        ports: vec![ServicePortInfo { name: "http".into(), protocol: "TCP".into(), port: 80, node_port: 30080 }],
        internal_traffic_policy: "Cluster".into(),
        external_traffic_policy: "Cluster".into(),
        endpoints: 3,
        ready_endpoints: 2,
        version: 18,
        ..ServiceInfo::default()
    }
}

fn dns() -> ServiceInfo {
    let port = |name: &str, protocol: &str| ServicePortInfo {
        name: name.into(),
        protocol: protocol.into(),
        port: 53,
        node_port: 0,
    };
    ServiceInfo {
        namespace: "kube-system".into(),
        name: "kube-dns".into(),
        cluster_ips: strings(["10.96.0.2"]),
        external_ips: strings(["198.51.100.7"]),
        load_balancer_ips: strings(["203.0.113.9"]),
        ports: vec![port("dns", "UDP"), port("dns-tcp", "TCP")],
        internal_traffic_policy: "Cluster".into(),
        external_traffic_policy: "Local".into(),
        session_affinity_timeout_seconds: 10_800,
        version: 2,
        conflicts: strings(["203.0.113.9 53/UDP is held by Service prod/dns, which is older"]),
        ..ServiceInfo::default()
    }
}

#[test]
fn services_are_a_table_with_conflicts_below() {
    let expected = "\
NAMESPACE    NAME      CLUSTER-IP                EXTERNAL-IP               PORTS          READY  POLICY                            AFFINITY        VERSION
demo         web       10.96.0.10,fd00:10:96::a  -                         80:30080/TCP     2/3  Cluster                           -                    18
kube-system  kube-dns  10.96.0.2                 198.51.100.7,203.0.113.9  53/UDP,53/TCP    0/0  internal Cluster, external Local  ClientIP 3h00m        2
kube-system/kube-dns: conflict: 203.0.113.9 53/UDP is held by Service prod/dns, which is older
";
    assert_eq!(services(&[web(), dns()], PLAIN), expected);
}

#[test]
fn settings_by_annotation_have_a_column_and_problems_have_a_line() {
    let problem = Problem {
        object: "Service demo/web".into(),
        field: "metadata.annotations[headgate.io/scheduler]".into(),
        message: "\"fastest\" is not a scheduler of IPVS; the cluster's scheduler is used".into(),
        origin: "web.yaml, document 2".into(),
    };
    let checked = ServiceInfo { health_check: "tcp".into(), health_check_interval_ms: 5000, ..dns() };
    let output = services(&[ServiceInfo { problems: vec![problem], ..web() }, checked], PLAIN);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].ends_with("VERSION  HEALTH-CHECK") && lines[1].ends_with("18  -"), "{output}");
    assert!(lines[2].ends_with("2  tcp 5.0s"), "{output}");
    let expected = "Service demo/web, metadata.annotations[headgate.io/scheduler]: \"fastest\" is not a scheduler of IPVS; the cluster's \
                scheduler is used [web.yaml, document 2]";
    assert_eq!(lines[3], expected);
    let output = services(&[ServiceInfo { scheduler: "mh".into(), ..web() }], PLAIN);
    assert!(output.lines().next().unwrap().ends_with("VERSION  SCHEDULER"), "{output}");
    assert!(output.lines().nth(1).unwrap().ends_with("18  mh"), "{output}");
}

fn ready(address: &str) -> EndpointInfo {
    EndpointInfo {
        namespace: "demo".into(),
        name: "web".into(),
        address: address.into(),
        ports: strings(["http 8081/TCP"]),
        ready: true,
        serving: true,
        node: "node-a".into(),
        zone: "zone-1".into(),
        weight: 1,
        version: 7,
        ..EndpointInfo::default()
    }
}

#[test]
fn endpoints_of_one_service_have_no_service_column() {
    let leaving = EndpointInfo {
        ready: false,
        terminating: true,
        hint_zones: strings(["zone-1"]),
        node: String::new(),
        ..ready("10.244.1.11")
    };
    // An address whose ports differ has a row for each state.
    let metrics =
        EndpointInfo { ports: strings(["metrics 9090/TCP"]), ready: false, serving: false, ..ready("10.244.1.10") };
    let expected = "\
ADDRESS      PORTS             STATE                 NODE    ZONE    HINTS        VERSION
10.244.1.10  http 8081/TCP     ready                 node-a  zone-1  -                  7
10.244.1.10  metrics 9090/TCP  not ready             node-a  zone-1  -                  7
10.244.1.11  http 8081/TCP     terminating, serving  -       zone-1  zone zone-1        7
";
    assert_eq!(endpoints(&[ready("10.244.1.10"), metrics, leaving], PLAIN), expected);
}

#[test]
fn endpoints_of_several_services_have_a_service_column() {
    let other = EndpointInfo { name: "api".into(), ready: false, serving: false, ..ready("10.244.2.10") };
    let output = endpoints(&[ready("10.244.1.10"), other], PLAIN);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("SERVICE   ADDRESS"), "{output}");
    assert!(lines[2].starts_with("demo/api  10.244.2.10  http 8081/TCP  not ready"), "{output}");
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
fn the_last_verification_of_an_agent_is_shown_with_its_differences() {
    let drift = Drift { service: "demo/web".into(), difference: "connections are dropped".into() };
    let differs = AgentInfo { verified_unix_ms: 1_180_000, drift_count: 1_200, drift: vec![drift], ..agent("node-a") };
    let all = [differs, AgentInfo { verified_unix_ms: 1_191_000, ..agent("node-b") }, agent("node-c")];
    let expected = "\
NODE    STATE       PROGRAMMED  SENT  LAG  BACKEND                    VERIFIED
node-a  up to date          18    18    0  iptables-nft  12s ago, 1,200 differ
node-b  up to date          18    18    0  iptables-nft               1.0s ago
node-c  up to date          18    18    0  iptables-nft                      -
node-a: differed at the last verification: Service demo/web: connections are dropped
";
    assert_eq!(agents(&all, 1_192_000, false, PLAIN), expected);
}

#[test]
fn agents_that_wait_or_are_cut_off_are_not_up_to_date() {
    let state = |node: &str, state: &str, reason: &str| AgentInfo {
        state: state.into(),
        reason: reason.into(),
        lag_ms: 5_000,
        ..agent(node)
    };
    let all = [
        state("node-a", "waiting", "the replica has not listed its source; the node holds no state"),
        state("node-b", "cut_off", "the replica is cut off from its source: it is silent"),
        state("node-c", "up_to_date", ""),
        state("node-d", "behind", ""),
    ];
    let expected = "\
NODE    STATE       PROGRAMMED  SENT  LAG  BACKEND
node-a  waiting             18    18    0  iptables-nft
node-b  cut off             18    18    0  iptables-nft
node-c  up to date          18    18    0  iptables-nft
node-d  behind              18    18    0  iptables-nft
node-a: waiting: the replica has not listed its source; the node holds no state
node-b: cut off: the replica is cut off from its source: it is silent
";
    assert_eq!(agents(&all, 1_192_000, false, PLAIN), expected);
    let info = FleetInfo { up_to_date: 1, waiting: 2, cut_off: 3, ..FleetInfo::default() };
    assert_eq!(fleet(&info), "fleet: 1 of 6 nodes up to date, 2 waiting, 3 at a replica that is cut off");
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
fn verifications_have_a_row_for_nodes_without_an_agent() {
    let node = |node: &str, result: &str| NodeVerification {
        node: node.into(),
        result: result.into(),
        ..NodeVerification::default()
    };
    let absent = NodeVerification { unverified: strings(["it never had an agent"]), ..node("node-b", "absent") };
    let verified = NodeVerification {
        version: 18,
        services: 2,
        frontends: 4,
        backend: "nftables".into(),
        ..node("node-a", "verified")
    };
    let expected = "\
NODE    RESULT    VERSION  SERVICES  FRONTENDS  DIFFERENCES  BACKEND
node-b  absent          -         -          -            -  -
node-a  verified       18         2          4            0  nftables
node-b: no agent: it never had an agent
";
    assert_eq!(verifications(&[absent, verified], PLAIN), expected);
}

#[test]
fn the_fleet_is_summarized_in_one_line() {
    let info = FleetInfo { up_to_date: 4998, behind: 2, ..FleetInfo::default() };
    assert_eq!(fleet(&info), "fleet: 4,998 of 5,000 nodes up to date, 2 behind");
    let info = FleetInfo {
        measured_commits: 9,
        everywhere_p50_ms: 18,
        everywhere_p99_ms: 41,
        everywhere_max_ms: 2300,
        ..info
    };
    let expected = "fleet: 4,998 of 5,000 nodes up to date, 2 behind; time until all nodes have a change: p50 18ms, p99 41ms, max 2.3s";
    assert_eq!(fleet(&info), expected);
    assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
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
    let with_others = status(&GetStatusResponse { replicas, ..response.clone() }, PLAIN);
    let others = "
OTHER REPLICA  STATE          FOR  AGENTS  EPOCH
cp-2           joined       5h03m   1,024  0badcafe
10.0.0.9:7444  unreachable   4.2s       0  0badcafe
10.0.0.9:7444: connection\\u{7} refused
";
    assert_eq!(with_others.strip_prefix(expected), Some(others));
    let shown = |source_state: &str, synced, source_problem: &str| {
        let (source_state, source_problem) = (source_state.into(), source_problem.into());
        let response = GetStatusResponse { source_state, synced, source_problem, ..response.clone() };
        status(&response, PLAIN).lines().nth(2).map(str::to_owned)
    };
    assert_eq!(shown("cut_off", true, "it is silent").as_deref(), Some("synced      cut off: it is silent"));
    assert_eq!(shown("unlisted", false, "it refuses").as_deref(), Some("synced      no: it refuses"));
    let expected = "synced      no: not every kind has been listed yet";
    assert_eq!(shown("unlisted", false, "").as_deref(), Some(expected));
}

#[test]
fn each_event_is_one_line() {
    let base = WatchEvent { version: 19, unix_ms: 33_221_250, action: "changed".into(), service: None, endpoint: None };
    let shown = |changed: WatchEvent| event(&changed, PLAIN);
    let shown = [
        shown(WatchEvent { service: Some(web()), ..base.clone() }),
        shown(WatchEvent { endpoint: Some(ready("10.244.1.10")), ..base.clone() }),
        shown(WatchEvent { action: "removed".into(), endpoint: Some(ready("10.244.1.10")), ..base }),
    ];
    let expected = [
        "09:13:41.250  v19     changed   service   demo/web  10.96.0.10,fd00:10:96::a  80:30080/TCP  2/3 ready",
        "09:13:41.250  v19     changed   endpoint  demo/web  10.244.1.10  http 8081/TCP  ready  on node-a",
        "09:13:41.250  v19     removed   endpoint  demo/web  10.244.1.10",
    ];
    assert_eq!(shown, expected);
}

#[test]
fn colours_are_used_only_if_requested() {
    let coloured = Style { colour: true };
    assert!(services(&[web()], coloured).contains("\u{1b}["));
    assert!(agents(&[agent("node-a")], 0, true, coloured).contains("\u{1b}["));
    for plain in
        [services(&[web(), dns()], PLAIN), endpoints(&[ready("::1")], PLAIN), agents(&[agent("n")], 0, true, PLAIN)]
    {
        assert!(!plain.contains('\u{1b}'), "{plain}");
    }
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
    let service = ServiceInfo { namespace: evil.into(), name: evil.into(), conflicts: strings([evil]), ..web() };
    let endpoint = EndpointInfo { name: evil.into(), node: evil.into(), zone: evil.into(), ..EndpointInfo::default() };
    let problem = Problem { object: evil.into(), origin: evil.into(), ..Problem::default() };
    let status = GetStatusResponse { replica: evil.into(), problems: vec![problem], ..GetStatusResponse::default() };
    let of_service = WatchEvent { service: Some(service.clone()), action: evil.into(), ..WatchEvent::default() };
    let of_endpoint = WatchEvent { endpoint: Some(endpoint.clone()), ..WatchEvent::default() };
    let tables = [
        (agents(&[agent], 0, true, PLAIN), 5),
        (services(&[service], PLAIN), 3),
        (endpoints(&[endpoint], PLAIN), 2),
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
fn connections_are_a_table_with_a_remark_below() {
    let connection = |client: &str, state: &str, bytes| OpenConnection {
        service: "demo/web:http".into(),
        client: client.into(),
        address: "10.96.0.10:80".into(),
        endpoint: "10.244.1.7:8080".into(),
        state: state.into(),
        age_ms: 192_000,
        idle_ms: 40,
        bytes_to_endpoint: 812,
        bytes_to_client: bytes,
        ..OpenConnection::default()
    };
    let session = OpenConnection {
        protocol: "UDP".into(),
        datagrams_to_endpoint: 12,
        datagrams_to_client: 11,
        ..connection("192.0.2.1:5353", "awaits reply", 900)
    };
    let connections =
        vec![connection("10.244.1.20:51324", "open", 33_000_000), connection("192.0.2.1:1025", "client done", 4_300)];
    let mut list = Connections { connections, left_out: 7 };
    let expected = "\
SERVICE        PROTOCOL  CLIENT             ADDRESS        ENDPOINT         STATE          AGE  IDLE   SENT  RECEIVED
demo/web:http  TCP       10.244.1.20:51324  10.96.0.10:80  10.244.1.7:8080  open         3m12s  40ms  812 B    31 MiB
demo/web:http  TCP       192.0.2.1:1025     10.96.0.10:80  10.244.1.7:8080  client done  3m12s  40ms  812 B   4.1 KiB
7 more connections with fewer bytes: name a Service, or raise --limit
";
    assert_eq!(connections_text(&list), expected);
    list.left_out = 0;
    assert_eq!(connections_text(&list).lines().count(), 3);
    list.connections = vec![connection("10.244.1.20:51324", "open", 33_000_000), session];
    let expected = "\
SERVICE        PROTOCOL  CLIENT             ADDRESS        ENDPOINT         STATE           AGE  IDLE   SENT  RECEIVED  DATAGRAMS
demo/web:http  TCP       10.244.1.20:51324  10.96.0.10:80  10.244.1.7:8080  open          3m12s  40ms  812 B    31 MiB          -
demo/web:http  UDP       192.0.2.1:5353     10.96.0.10:80  10.244.1.7:8080  awaits reply  3m12s  40ms  812 B     900 B      12/11
";
    assert_eq!(connections_text(&list), expected);
}

fn connections_text(list: &Connections) -> String {
    super::connections(list, PLAIN)
}
