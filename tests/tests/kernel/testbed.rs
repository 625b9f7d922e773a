//! Wrong packet cases fail: the testbed's clients report what the network does.

use std::net::IpAddr;

use headgate_tests::cases::case::ask;
use headgate_tests::cases::{self, SourceAddress, table};
use headgate_tests::testbed::iptables::{self, Variant};
use headgate_tests::testbed::manifests::Via;
use headgate_tests::testbed::{Backend, Family, Testbed, plan};

fn address(name: &str, family: Family) -> IpAddr {
    plan::address(name).unwrap().of(family)
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
