//! The nftables dataplane against the real kernel, without the programs: quarantine, background
//! verification and counters of Services.

use std::{
    collections::BTreeSet,
    fs,
    net::{TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    process,
    sync::{
        Mutex,
        atomic::{AtomicU16, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, NodeFacts, Protocol, Service, ServiceKey, ServicePort, State,
    frontends::Frontend, view::MasqueradeConfig,
};
use headgate_node_agent::dataplane::{
    DataplaneError, ErrorKind, Finding, FixedState, NodeDataplane, StateSource,
    nftables::{Counts, NftablesDataplane, NftablesOptions, read_counters},
};
use headgate_tests::testbed::{Namespace, process::output};

/// Runs `work` in a new network namespace.
fn in_namespace(name: &str, work: impl FnOnce() -> Result<()> + Send) {
    Namespace::for_test(&format!("nftd-{name}")).unwrap().run(work).unwrap();
}

/// A dataplane for IPv4 whose table other programs may change.
fn dataplane() -> Result<NftablesDataplane> {
    with_counters(false)
}

/// Like [`dataplane`]. The kernel counts Services if `counts_services` is true.
fn with_counters(counts_services: bool) -> Result<NftablesDataplane> {
    NftablesDataplane::new(&NftablesOptions { counts_services, ..config() }).context("starting mode nftables")
}

pub(crate) fn config() -> NftablesOptions {
    NftablesOptions {
        families: vec![Family::V4],
        masquerade: MasqueradeConfig::default(),
        localhost_node_ports: false,
        conntrack_tcp_be_liberal: true,
        owns_tables: false,
        replies_to_ping: false,
        unused_features: Vec::new(),
        counts_services: false,
        has_proxy: false,
    }
}

/// A Service with the ClusterIP 10.96.0.`last`, these ports, and one endpoint.
fn service(name: &str, last: u8, ports: &[u16]) -> [Change; 2] {
    let key = ServiceKey::new("ns", name);
    let port =
        |port: &u16| ServicePort { name: port.to_string().into(), protocol: Protocol::Tcp, port: *port, node_port: 0 };
    let targets: Vec<EndpointPort> =
        ports.iter().map(|port| EndpointPort::new(port.to_string(), Protocol::Tcp, 8080)).collect();
    let service = Service::new(key.clone(), vec![[10, 96, 0, last].into()], ports.iter().map(port).collect());
    [Change::from(service), Change::Endpoint(key, Endpoint::new([10, 244, 0, last].into(), targets.into()))]
}

fn apply(state: &mut State, changes: impl IntoIterator<Item = Change>) -> Dirty {
    let mut dirty = Dirty::default();
    for change in changes {
        state.apply(change, &mut dirty);
    }
    dirty
}

fn nft(arguments: &[&str]) -> String {
    output("nft", arguments)
}

fn services() -> String {
    nft(&["list", "map", "ip", "headgate", "services"])
}

/// A state during whose planning another program adds an element. The dataplane has then read the
/// kernel, so the kernel rejects the element of the plan.
struct Interfered<'a>(FixedState<'a>);

impl StateSource for Interfered<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        self.0.look(read);
    }
}

#[test]
fn a_service_that_the_kernel_rejects_is_quarantined_and_keeps_its_last_good_elements() {
    in_namespace("quarantine", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        apply(&mut state, service("one", 1, &[80]).into_iter().chain(service("two", 2, &[80])));
        dataplane.sync_full(&FixedState(&state, &node))?;

        let dirty = apply(&mut state, service("two", 2, &[80, 81]).into_iter().chain(service("three", 3, &[80])));
        // Another program has taken the key. First the agent believes that the table changed.
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        dataplane.plan(&state, &node, &dirty);
        let error = dataplane.apply().unwrap_err();
        assert_eq!(error.kind, ErrorKind::NeedsFullSync, "{error}");
        nft(&["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 }"]);
        let error = dataplane.sync_full(&Interfered(FixedState(&state, &node))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Rejected, "{error}");

        let faults = dataplane.find_faults(&FixedState(&state, &node), None, &error.families)?;
        let named: Vec<String> = faults.iter().map(|fault| fault.service.to_string()).collect();
        assert_eq!(named, ["ns/two"], "{faults:?}");
        assert!(faults[0].reason.contains("set services of table ip headgate"), "{faults:?}");
        dataplane.set_quarantined(&faults);
        dataplane.sync_full(&FixedState(&state, &node))?;
        let listed = services();
        for (frontend, is_there) in [
            ("10.96.0.1 . tcp . 80", true),
            ("10.96.0.2 . tcp . 80", true),
            ("10.96.0.2 . tcp . 81", false),
            ("10.96.0.3 . tcp . 80", true),
        ] {
            assert_eq!(listed.contains(frontend), is_there, "{frontend} in\n{listed}");
        }
        assert!(is_intact(&mut dataplane, &FixedState(&state, &node))?);

        // The last good elements come back after a flush. Other Services do not get their numbers.
        nft(&["delete", "table", "ip", "headgate"]);
        apply(&mut state, service("four", 4, &[80]));
        dataplane.sync_full(&FixedState(&state, &node))?;
        let listed = services();
        let line = |address: &str| listed.lines().find(|line| line.contains(address)).unwrap_or_default().to_owned();
        let numbers: BTreeSet<String> = ["10.96.0.1 ", "10.96.0.2 ", "10.96.0.3 ", "10.96.0.4 "]
            .into_iter()
            .filter_map(|address| Some(line(address).trim_end_matches([',', ' ', '}']).rsplit(' ').next()?.to_owned()))
            .collect();
        assert_eq!(numbers.len(), 4, "{listed}");
        assert!(listed.contains("10.96.0.2 . tcp . 80") && !listed.contains("10.96.0.2 . tcp . 81"), "{listed}");
        assert!(is_intact(&mut dataplane, &FixedState(&state, &node))?);

        // While another program has the key, another attempt fails and changes nothing.
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        let two = BTreeSet::from([faults[0].service.clone()]);
        let again = dataplane.find_faults(&FixedState(&state, &node), Some(&two), &[])?;
        assert_eq!(again.len(), 1, "{again:?}");
        nft(&["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 }"]);
        assert_eq!(dataplane.find_faults(&FixedState(&state, &node), Some(&two), &[])?, []);
        assert_eq!(services(), listed);
        dataplane.set_quarantined(&[]);
        dataplane.plan(&state, &node, &Dirty { services: two, ..Dirty::default() });
        dataplane.apply()?;
        assert!(services().contains("10.96.0.2 . tcp . 81"));
        assert!(is_intact(&mut dataplane, &FixedState(&state, &node))?);
        Ok(())
    });
}

/// Closes all connections of this process to nftables, as an error of the kernel could.
#[allow(unsafe_code)]
fn lose_connections() -> Result<()> {
    // The column of the inode is the last one, and the protocol is the second one.
    let table = fs::read_to_string("/proc/thread-self/net/netlink")?;
    let is_netfilter = |line: &&str| line.split_whitespace().nth(1) == Some("12");
    let inodes: BTreeSet<&str> =
        table.lines().filter(is_netfilter).filter_map(|line| line.split_whitespace().last()).collect();
    let nothing = fs::File::open("/dev/null")?;
    let mut closed = 0;
    for entry in fs::read_dir("/proc/self/fd")?.flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let inode = target.to_string_lossy().strip_prefix("socket:[").map(|rest| rest.trim_end_matches(']').to_owned());
        let descriptor: Option<i32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(inode), Some(descriptor)) = (inode, descriptor)
            && inodes.contains(inode.as_str())
        {
            // SAFETY: the descriptor stays open, and its owner only reads, writes and closes it.
            ensure!(unsafe { libc::dup2(nothing.as_raw_fd(), descriptor) } == descriptor, "dup2 failed");
            closed += 1;
        }
    }
    ensure!(closed > 0, "this process has no connection to nftables");
    Ok(())
}

/// If the connection that owns the table breaks, the table stays, and another connection adopts it.
// rows of nftables: 92
#[test]
fn a_lost_connection_loses_no_rule_and_the_agent_owns_its_table_again() {
    in_namespace("owner", || {
        let (mut state, node) = (State::default(), NodeFacts::named("node-1"));
        let mut dataplane = NftablesDataplane::new(&NftablesOptions { owns_tables: true, ..config() })?;
        let can_write = || {
            let element = ["element", "ip", "headgate", "cluster-ips", "{ 192.0.2.77 }"];
            let done = |verb| process::Command::new("nft").arg(verb).args(element).output();
            let added = done("add")?.status.success();
            ensure!(!added || done("delete")?.status.success(), "the element stays");
            Ok(added)
        };
        apply(&mut state, service("one", 1, &[80]));
        dataplane.sync_full(&FixedState(&state, &node))?;
        ensure!(!can_write()?, "the agent does not own its table");
        let listed = || [services(), nft(&["list", "chain", "ip", "headgate", "services"])];
        let before = listed();

        lose_connections()?;
        assert_eq!(listed(), before);
        ensure!(can_write()?, "the table still has an owner");
        let dirty = apply(&mut state, service("two", 2, &[80]));
        dataplane.plan(&state, &node, &dirty);
        let error = dataplane.apply().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Retry, "{error}");
        ensure!(!can_write()?, "the agent does not own its table again");
        dataplane.sync_full(&FixedState(&state, &node))?;
        assert!(services().contains("10.96.0.2 . tcp . 80"), "{}", services());
        assert!(is_intact(&mut dataplane, &FixedState(&state, &node))?);
        Ok(())
    });
}

/// The first sync writes many endpoints in several transactions. An agent that restarts finds what
/// it would write, and the table has spare chains.
// rows of nftables: 92
#[test]
fn a_large_first_sync_is_complete() {
    in_namespace("large", || {
        let (mut first, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        let ports = std::sync::Arc::from([EndpointPort::new("80", Protocol::Tcp, 8080)]);
        for number in 1..=100 {
            let name = number.to_string();
            apply(&mut state, service(&name, number, &[80]));
            let endpoint = |last| Endpoint::new([10, 245, number, last].into(), std::sync::Arc::clone(&ports));
            apply(&mut state, (0..200).map(|last| Change::Endpoint(ServiceKey::new("ns", &name), endpoint(last))));
        }
        let written = first.sync_full(&FixedState(&state, &node))?.objects_written;
        assert!(written > 20_100, "{written} objects were written");
        assert!(is_intact(&mut first, &FixedState(&state, &node))?);
        let chains = nft(&["list", "chains", "ip"]);
        assert!(chains.contains("services-of-7 ") && chains.contains("services-of-201 "), "{chains}");

        let dirty = apply(&mut state, service("7", 77, &[80]));
        first.plan(&state, &node, &dirty);
        first.apply()?;
        let mut next = dataplane()?;
        let written = patiently(|| next.sync_full(&FixedState(&state, &node)))?.objects_written;
        assert_eq!(written, 0, "an agent that restarts wrote {written} objects");
        Ok(())
    });
}

// rows of nftables: 96
#[test]
fn a_comparison_finds_every_kind_of_foreign_change() {
    in_namespace("compare", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        apply(&mut state, service("one", 1, &[80]).into_iter().chain(service("two", 2, &[80])));
        dataplane.sync_full(&FixedState(&state, &node))?;
        // Nothing listens to notifications: only a verification of the rules can find the changes.
        let changes: [&[&str]; 7] = [
            &["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 80 }"],
            &["flush", "map", "ip", "headgate", "endpoints"],
            &["add", "element", "ip", "headgate", "cluster-ips", "{ 192.0.2.77 }"],
            &["add", "rule", "ip", "headgate", "nat-prerouting", "counter"],
            &["flush", "chain", "ip", "headgate", "services"],
            &["add", "set", "ip", "headgate", "foreign", "{ type mark; }"],
            &["flush", "map", "ip", "headgate", "services-by-count"],
        ];
        for change in changes {
            nft(change);
            assert!(!is_intact(&mut dataplane, &FixedState(&state, &node))?, "nothing found {change:?}");
            dataplane.sync_full(&FixedState(&state, &node))?;
            assert!(is_intact(&mut dataplane, &FixedState(&state, &node))?, "a difference stays after {change:?}");
        }
        Ok(())
    });
}

/// A state that records, at each look, the Services in the kernel.
struct Recording<'a>(FixedState<'a>, &'a Mutex<Vec<String>>);

impl StateSource for Recording<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        let maps = nft(&["list", "maps", "ip"]);
        self.1.lock().unwrap().push(if maps.contains("headgate") { services() } else { String::new() });
        self.0.look(read);
    }
}

#[test]
fn a_cold_start_programs_the_api_server_and_dns_before_other_services() {
    in_namespace("first", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        let mut changes = Vec::from(service("other", 7, &[80]));
        let (api, dns) = (ServiceKey::new("default", "kubernetes"), ServiceKey::new("ns", "dns"));
        for (key, last, protocol, port) in [(api, 1, Protocol::Tcp, 443), (dns, 8, Protocol::Udp, 53)] {
            let ports = vec![ServicePort { name: "".into(), protocol, port, node_port: 0 }];
            changes.push(Service::new(key.clone(), vec![[10, 96, 0, last].into()], ports).into());
            let target = EndpointPort::new("", protocol, 8080);
            changes.push(Change::Endpoint(key, Endpoint::new([10, 244, 0, last].into(), vec![target].into())));
        }
        apply(&mut state, changes);
        let looks = Mutex::new(Vec::new());
        let source = Recording(FixedState(&state, &node), &looks);
        dataplane.sync_full(&source)?;
        let recorded = looks.lock().unwrap().clone();
        assert_eq!(recorded[0], "");
        let first = &recorded[recorded.len() / 2];
        let holds = |listed: &str| {
            ["10.96.0.1 . tcp . 443", "10.96.0.8 . udp . 53", "10.96.0.7 . tcp . 80"].map(|one| listed.contains(one))
        };
        assert_eq!(holds(first), [true, true, false], "{first}");
        assert_eq!(holds(&services()), [true; 3]);
        // A later full sync, and the start of an agent beside rules, program everything at once.
        dataplane.sync_full(&source)?;
        self::dataplane()?.sync_full(&source)?;
        assert_eq!(looks.lock().unwrap().len(), 2 * recorded.len());
        Ok(())
    });
}

/// Repeats `read` while the kernel returns no complete list. This may last as long as the hash
/// table of a large set grows.
pub(crate) fn patiently<T>(mut read: impl FnMut() -> Result<T, DataplaneError>) -> Result<T, DataplaneError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match read() {
            Err(error) if error.kind == ErrorKind::Retry && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Whether neither a check nor a verification of the rules finds a difference.
fn is_intact(dataplane: &mut NftablesDataplane, source: &dyn StateSource) -> Result<bool> {
    let verification = patiently(|| dataplane.verification(Family::V4))?.context("IPv4 is not programmed")?;
    Ok(patiently(|| dataplane.check())? == Finding::Intact && verification(source).count == 0)
}

/// The Service "counted" with port 53/UDP at 10.96.0.1 and NodePort 30053, and one endpoint.
fn counted(endpoint: [u8; 4]) -> [Change; 2] {
    let key = ServiceKey::new("ns", "counted");
    let port = ServicePort { name: "dns".into(), protocol: Protocol::Udp, port: 53, node_port: 30053 };
    let target = [EndpointPort::new("dns", Protocol::Udp, 8053)];
    let service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], vec![port]);
    [Change::from(service), Change::Endpoint(key, Endpoint::new(endpoint.into(), Vec::from(target).into()))]
}

/// Returns the counts of the ClusterIP and of the NodePort.
fn counts() -> Result<[Counts; 2]> {
    let counters = read_counters()?;
    let frontends = [
        Frontend::Address([10, 96, 0, 1].into(), Protocol::Udp, 53),
        Frontend::NodePort(Family::V4, Protocol::Udp, 30053),
    ];
    Ok(frontends.map(|frontend| counters.get(&frontend).copied().unwrap_or_default()))
}

/// Answers UDP packets with the same bytes.
fn echo(address: &str) -> Result<()> {
    let socket = UdpSocket::bind(address)?;
    thread::spawn(move || {
        let mut packet = [0; 2_048];
        while let Ok((length, from)) = socket.recv_from(&mut packet) {
            let _ = socket.send_to(&packet[..length], from);
        }
    });
    Ok(())
}

/// Sends `packets` packets of 100 bytes from a new socket, and waits for each answer. The socket
/// has a port of its own: packets from the port of an earlier socket would belong to the same
/// connection.
fn exchange(to: &str, packets: usize) -> Result<()> {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(20_000);
    let socket = UdpSocket::bind(("0.0.0.0", NEXT_PORT.fetch_add(1, Ordering::Relaxed)))?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    socket.connect(to)?;
    for _ in 0..packets {
        socket.send(&[0; 100])?;
        socket.recv(&mut [0; 2_048]).with_context(|| format!("no answer from {to}"))?;
    }
    Ok(())
}

/// The counts of `connections` connections with `exchanges` exchanges in total. A packet has 100
/// bytes after 28 bytes of headers.
fn expected(connections: u64, exchanges: u64) -> Counts {
    Counts { connections, packets: 2 * exchanges, bytes: 2 * exchanges * 128 }
}

#[test]
fn counters_of_services_are_exact_and_survive_changes_of_endpoints() {
    let create = |name: &str| Namespace::for_test(&format!("nftc-{name}")).unwrap();
    let [client, node, server] = ["client", "node", "server"].map(create);
    let link = |peer: &Namespace, name: &str, network: u8| {
        let commands = format!(
            "link add {name} type veth peer name eth0 netns {}\naddr add 10.0.{network}.1/24 dev {name}\nlink set {name} up\n",
            peer.name()
        );
        node.ip_batch(&commands)?;
        peer.ip_batch(&format!(
            "link set lo up\naddr add 10.0.{network}.2/24 dev eth0\nlink set eth0 up\nroute add default via 10.0.{network}.1\n"
        ))
    };
    node.ip_batch("link set lo up\nroute add 10.96.0.0/16 dev lo\n").unwrap();
    link(&client, "to-client", 1).unwrap();
    link(&server, "to-server", 2).unwrap();
    node.set_sysctls(&[("ipv4/ip_forward", "1")]).unwrap();
    server.run(|| echo("10.0.2.2:8053")).unwrap();

    let (mut state, facts) = (State::default(), NodeFacts::named("node-1"));
    node.run(|| {
        let mut programmed = with_counters(true)?;
        apply(&mut state, counted([10, 0, 2, 2]));
        programmed.sync_full(&FixedState(&state, &facts))?;
        assert_eq!(counts()?, [Counts::default(); 2]);
        // Clients of the node, through both frontends.
        exchange("10.96.0.1:53", 3)?;
        exchange("10.0.1.1:30053", 2)?;
        assert_eq!(counts()?, [expected(1, 3), expected(1, 2)]);
        Ok(())
    })
    .unwrap();
    // A client elsewhere, whose packets the node forwards. Packets that bypass the Service do not
    // count.
    client
        .run(|| {
            exchange("10.96.0.1:53", 4)?;
            exchange("10.96.0.1:53", 1)?;
            exchange("10.0.1.1:30053", 5)?;
            exchange("10.0.2.2:8053", 7)
        })
        .unwrap();
    node.run(|| {
        let now = [expected(3, 8), expected(2, 7)];
        assert_eq!(counts()?, now);
        // Another instance adopts the table. The endpoint moves to the node itself.
        let mut programmed = with_counters(true)?;
        programmed.sync_full(&FixedState(&state, &facts))?;
        assert!(is_intact(&mut programmed, &FixedState(&state, &facts))?);
        let [_, here] = counted([10, 0, 2, 1]);
        let key = ServiceKey::new("ns", "counted");
        let dirty = apply(&mut state, [Change::RemoveEndpoint(key.clone(), [10, 0, 2, 2].into()), here]);
        programmed.plan(&state, &facts, &dirty);
        programmed.apply()?;
        assert_eq!(counts()?, now, "counts survive a restart and a change of endpoints");
        echo("10.0.2.1:8053")?;
        // Both programs are on the node, so each packet passes `output` and `input`.
        exchange("10.96.0.1:53", 10)?;
        assert_eq!(counts()?, [expected(4, 18), expected(2, 7)]);

        // Connections over TCP count once each. nft counts the same packets by the same condition.
        let tcp = service("tcp", 2, &[80]);
        let moved = Change::Endpoint(
            ServiceKey::new("ns", "tcp"),
            Endpoint::new([10, 0, 2, 1].into(), vec![EndpointPort::new("80", Protocol::Tcp, 8080)].into()),
        );
        let [tcp, _] = tcp;
        let dirty = apply(&mut state, [tcp, moved]);
        programmed.plan(&state, &facts, &dirty);
        programmed.apply()?;
        let listener = TcpListener::bind("10.0.2.1:8080")?;
        thread::spawn(move || listener.incoming().for_each(drop));
        for _ in 0..50 {
            std::io::Read::read(&mut TcpStream::connect("10.96.0.2:80")?, &mut [0])?;
        }
        let tcp = read_counters()?[&Frontend::Address([10, 96, 0, 2].into(), Protocol::Tcp, 80)];
        // Each connection has at least three packets of the handshake.
        assert!(tcp.connections == 50 && tcp.packets >= 150 && tcp.bytes >= 150 * 40, "{tcp:?}");

        // A removed Service begins at 0 again. An instance without counters removes the sets.
        let dirty = apply(&mut state, [Change::RemoveService(key)]);
        programmed.plan(&state, &facts, &dirty);
        programmed.apply()?;
        let [again, _] = counted([10, 0, 2, 1]);
        let dirty = apply(&mut state, [again]);
        programmed.plan(&state, &facts, &dirty);
        programmed.apply()?;
        assert_eq!(counts()?, [Counts::default(); 2]);
        assert!(nft(&["list", "set", "ip", "headgate", "counted-traffic"]).contains("counter packets"));
        let mut without = dataplane()?;
        without.sync_full(&FixedState(&state, &facts))?;
        assert!(is_intact(&mut without, &FixedState(&state, &facts))?);
        assert_eq!(counts()?, [Counts::default(); 2]);
        assert!(!nft(&["list", "table", "ip", "headgate"]).contains("counted"));
        exchange("10.96.0.1:53", 1)
    })
    .unwrap();
}
