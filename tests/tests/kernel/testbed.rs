//! Tests of the testbed without Headgate's programs. The testbed's clients must report correctly
//! what the network does.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use headgate_tests::cases::case::ask;
use headgate_tests::cases::{self, SourceAddress, table};
use headgate_tests::testbed::client::{ask_from_low_port, exchange_large_bodies};
use headgate_tests::testbed::iptables::{self, Variant};
use headgate_tests::testbed::machines::Machines;
use headgate_tests::testbed::manifests::Via;
use headgate_tests::testbed::process::Process;
use headgate_tests::testbed::{Backend, Family, Outcome, Request, Testbed, Transport, plan};

const TRANSPORTS: [(Transport, u16); 4] = [
    (Transport::Tcp, plan::LINE_PORT),
    (Transport::Udp, plan::LINE_PORT),
    (Transport::Sctp, plan::LINE_PORT),
    (Transport::Http, plan::HTTP_PORT),
];

fn address(name: &str, family: Family) -> IpAddr {
    plan::address(name).unwrap().of(family)
}

/// Sends a request. Returns the server that answered, and the source address that the server saw.
fn answered(machines: &Machines, from: &str, request: &Request) -> (String, IpAddr) {
    match machines.ask(from, request).unwrap() {
        Outcome::Answered(answer) => (answer.server, answer.source.ip()),
        other => panic!("{from} asked {request:?}: {other}"),
    }
}

#[test]
fn machines_reach_each_other_and_keep_their_source_address() {
    let machines = Machines::start().unwrap();
    // Each pair is a client and a server. The pairs cover pods, nodes and an outside client.
    let pairs = [
        ("a1", "a2"),
        ("a1", "b1"),
        ("c1", "a1"),
        ("node-a", "a1"),
        ("node-a", "c1"),
        ("a1", "node-b"),
        ("outside-1", "node-c"),
    ];
    for family in Family::BOTH {
        for (from, to) in pairs {
            for (transport, port) in TRANSPORTS {
                let request = Request::new(transport, SocketAddr::new(address(to, family), port));
                let got = answered(&machines, from, &request);
                assert_eq!(got, (to.to_owned(), address(from, family)), "{from} to {to} by {transport:?}");
            }
        }
    }
}

#[test]
fn large_bodies_and_fragmented_datagrams_pass() {
    let machines = Machines::start().unwrap();
    for family in Family::BOTH {
        let http = SocketAddr::new(address("b1", family), plan::HTTP_PORT);
        exchange_large_bodies(machines.machine("a1").unwrap(), http, 3_000_000).unwrap();
        let datagram = SocketAddr::new(address("b1", family), plan::LINE_PORT);
        let request = Request { datagram_bytes: 20_000, ..Request::new(Transport::Udp, datagram) };
        assert_eq!(answered(&machines, "a1", &request).0, "b1");
    }
}

#[test]
fn unserved_ports_are_refused_and_unknown_addresses_are_silent() {
    let machines = Machines::start().unwrap();
    in_parallel(|family, transport| {
        let closed = Request::new(transport, SocketAddr::new(address("b1", family), 4444));
        assert_eq!(machines.ask("a1", &closed).unwrap(), Outcome::Refused, "{transport:?} over {family}");
        let nobody: IpAddr = if family == Family::V4 { "10.96.0.1" } else { "fd00:10:96::1" }.parse().unwrap();
        let nowhere = Request::new(transport, SocketAddr::new(nobody, 80)).expecting_silence();
        assert_eq!(machines.ask("a1", &nowhere).unwrap(), Outcome::TimedOut, "{transport:?} over {family}");
    });
}

#[test]
fn a_source_port_in_use_is_reported_and_another_port_is_drawn() {
    let machines = Machines::start().unwrap();
    for family in Family::BOTH {
        // The line server of a1 itself holds this port.
        let b1 = SocketAddr::new(address("b1", family), plan::LINE_PORT);
        let from = |port| Request { from_port: Some(port), ..Request::new(Transport::Tcp, b1) };
        assert_eq!(machines.ask("a1", &from(plan::LINE_PORT)).unwrap(), Outcome::PortTaken);

        let mut draws = Vec::new();
        let (port, outcome) = ask_from_low_port(|drawn| {
            draws.push(drawn);
            machines.ask("a1", &from(if draws.len() == 1 { plan::LINE_PORT } else { drawn }))
        })
        .unwrap();
        assert_eq!(Some(&port), draws.last());
        assert!(draws.len() > 1, "{draws:?}");
        assert!(matches!(&outcome, Outcome::Answered(answer) if answer.source.port() == port), "{outcome}");

        let error = ask_from_low_port(|_| machines.ask("a1", &from(plan::LINE_PORT))).unwrap_err().to_string();
        assert!(error.contains("holds the source port"), "{error}");
    }
}

/// Checks every family and transport at the same time, since waiting for silence takes most of the
/// time.
fn in_parallel(check: impl Fn(Family, Transport) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for family in Family::BOTH {
            for (transport, _) in TRANSPORTS {
                scope.spawn(move || check(family, transport));
            }
        }
    });
}

/// Checks the clients against hand-written rules of the kinds that a service proxy uses, on every
/// protocol. After DNAT, clients must see whether the source address is kept or masqueraded. They
/// must see a REJECT rule as a refusal, and a DROP rule as silence.
fn check_hand_written_rules(variant: Variant) {
    let machines = Machines::start().unwrap();
    let node = machines.machine("node-a").unwrap();
    let lock = machines.xtables_lock("node-a");
    let addresses = |family| match family {
        Family::V4 => ("10.96.0.10", "10.96.0.11", "10.96.0.12"),
        Family::V6 => ("fd00:10:96::10", "fd00:10:96::11", "fd00:10:96::12"),
    };
    for family in Family::BOTH {
        let (service, refused, dropped) = addresses(family);
        let rule = |rule: &str| {
            iptables::run(node, variant, family, &lock, &rule.split_whitespace().collect::<Vec<_>>()).unwrap();
        };
        for protocol in ["tcp", "udp", "sctp"] {
            let to = SocketAddr::new(address("b1", family), plan::LINE_PORT);
            for chain in ["PREROUTING", "OUTPUT"] {
                rule(&format!("-t nat -A {chain} -d {service} -p {protocol} --dport 80 -j DNAT --to-destination {to}"));
            }
            for chain in ["FORWARD", "OUTPUT"] {
                rule(&format!("-A {chain} -d {refused} -p {protocol} -j REJECT"));
                rule(&format!("-A {chain} -d {dropped} -p {protocol} -j DROP"));
            }
        }
        // Pods keep their address. The node and external clients are masqueraded.
        let pods = if family == Family::V4 { "10.244.0.0/16" } else { "fd00:10:244::/48" };
        rule(&format!("-t nat -A POSTROUTING ! -s {pods} -m conntrack --ctstate DNAT -j MASQUERADE --random-fully"));
    }
    in_parallel(|family, transport| {
        let (service, refused, dropped) = addresses(family);
        let node_address = address("node-a", family);
        let sources = [("a1", address("a1", family)), ("node-a", node_address), ("outside-1", node_address)];
        // The rules lead only to line servers, so use TCP in place of HTTP.
        let transport = if transport == Transport::Http { Transport::Tcp } else { transport };
        for (from, source) in sources {
            let request = |to: &str| Request::new(transport, SocketAddr::new(to.parse().unwrap(), 80));
            let dropped = request(dropped).expecting_silence();
            let context = format!("{transport:?} over {family} from {from}");
            assert_eq!(answered(&machines, from, &request(service)), ("b1".to_owned(), source), "{context}");
            assert_eq!(machines.ask(from, &request(refused)).unwrap(), Outcome::Refused, "{context}");
            assert_eq!(machines.ask(from, &dropped).unwrap(), Outcome::TimedOut, "{context}");
        }
    });
    let saved = iptables::save_all(node, &lock).unwrap();
    assert!(saved.contains("-d 10.96.0.11/32 -p udp -j REJECT"), "{saved}");
}

#[test]
fn clients_report_the_effect_of_hand_written_rules_iptables_legacy() {
    check_hand_written_rules(Variant::Legacy);
}

#[test]
fn clients_report_the_effect_of_hand_written_rules_iptables_nft() {
    check_hand_written_rules(Variant::Nft);
}

#[test]
fn namespaces_are_removed_with_the_testbed_even_when_a_test_panics() {
    let left = std::thread::spawn(|| {
        let machines = Machines::start().unwrap();
        let name = machines.machine("node-a").unwrap().name().to_owned();
        std::panic::panic_any((name, machines.folder().to_owned()));
    })
    .join()
    .unwrap_err()
    .downcast::<(String, std::path::PathBuf)>()
    .unwrap();
    let (name, folder) = *left;
    assert!(!std::path::Path::new("/run/netns").join(name).exists());
    // A failed test keeps its logs. This test fails on purpose, so it removes the logs.
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn output_of_programs_is_logged_and_programs_end_with_the_testbed() {
    let machines = Machines::start().unwrap();
    let log = machines.folder().join("program.log");
    let start = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::start("a program", machines.machine("a1").unwrap(), command, &log).unwrap()
    };
    let is_alive = |id: u32| Path::new(&format!("/proc/{id}")).exists();

    // The program runs in the namespace of its machine. After it has ended, the error contains its
    // last output.
    let mut brief = start("cat /proc/net/fib_trie; echo out of luck >&2; exit 3");
    let error = loop {
        match brief.check_running() {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("exit status: 3") && error.contains("out of luck"), "{error}");
    assert!(std::fs::read_to_string(&log).unwrap().contains("10.244.1.10"));

    let lasting = start("exec sleep 1000");
    let id = lasting.id();
    assert!(is_alive(id));
    assert_eq!(lasting.terminate().unwrap().signal(), Some(15));
    assert!(!is_alive(id));

    let dropped = start("exec sleep 1000");
    let id = dropped.id();
    drop(dropped);
    assert!(!is_alive(id));
}

/// Runs cases against hand-written rules that are correct for one Service on one node. Correct
/// cases pass, and each kind of wrong case fails.
#[test]
fn wrong_cases_fail() {
    let bed = Testbed::machines_only(Backend::IptablesLegacy, table::services().unwrap()).unwrap();
    let node = bed.machines().machine("node-a").unwrap();
    let lock = bed.machines().xtables_lock("node-a");
    let web = bed.address("web", Via::ClusterIp, Family::V4, "tcp").unwrap();
    for (servers_left, server) in (1..=4).rev().zip(table::WEB) {
        let rule = format!(
            "-t nat -A PREROUTING -d {} -p tcp --dport 80 -m statistic --mode random --probability {} -j DNAT --to-destination {}:8080",
            web.ip(),
            1.0 / f64::from(servers_left),
            address(server, Family::V4),
        );
        iptables::run(node, Variant::Legacy, Family::V4, &lock, &rule.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let question = ask("a3", "web", Via::ClusterIp).over(&[Family::V4]);
    cases::run(&bed, &[question.answered_evenly(table::WEB, SourceAddress::Kept)]).unwrap();

    let mistakes = [
        (
            question.answered(table::WEB, SourceAddress::Masqueraded("node-a")),
            "saw the source 10.244.1.12, expected 192.0.2.11",
        ),
        (question.answered(&["a1", "a2", "b1"], SourceAddress::Kept), "answered by"),
        (question.answered(&["a1", "a2", "b1", "c1", "c2"], SourceAddress::Kept), "answered by"),
        (question.refused(), "answered by"),
        (question.dropped(), "answered by"),
        (ask("a3", "empty", Via::ClusterIp).over(&[Family::V4]).refused(), "timed out"),
        (ask("a3", "self", Via::ClusterIp).over(&[Family::V4]).answered(&["a1"], SourceAddress::Kept), "timed out"),
    ];
    for (case, complaint) in mistakes {
        let error = format!("{:#}", cases::run(&bed, &[case]).unwrap_err());
        assert!(error.contains(complaint), "{error}");
    }
    let excluded = question.refused().except(Backend::IptablesLegacy, "an example");
    cases::run(&bed, &[excluded]).unwrap();

    // Rules that prefer one server do not spread requests evenly.
    let favour = format!(
        "-t nat -I PREROUTING -d {} -p tcp --dport 80 -m statistic --mode random --probability 0.4 -j DNAT --to-destination {}:8080",
        web.ip(),
        address("c1", Family::V4)
    );
    iptables::run(node, Variant::Legacy, Family::V4, &lock, &favour.split(' ').collect::<Vec<_>>()).unwrap();
    let error = cases::run(&bed, &[question.answered_evenly(table::WEB, SourceAddress::Kept)]).unwrap_err();
    assert!(format!("{error:#}").contains(" of 300 requests, expected "), "{error:#}");
}
