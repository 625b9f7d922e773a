//! Lists and deletes conntrack entries in the real kernel. The entries are inserted over netlink.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::Result;
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, Protocol, Service, ServiceKey, ServicePort, State,
    conntrack::{Cleanup, Tracker},
};
use headgate_netlink::Connection;
use headgate_node_agent::{
    interfaces,
    node_inputs::NodeInputs,
    observers::conntrack::{NodeAddresses, Swept, sweep, wire},
};
use headgate_tests::testbed::Namespace;

use super::table::{Flow, entries, insert};

const UDP: u8 = 17;

/// Runs `work` in a new network namespace.
fn in_namespace<T: Send>(name: &str, work: impl FnOnce(&Namespace) -> Result<T> + Send) -> T {
    let namespace = Namespace::for_test(&format!("ct-{name}")).unwrap();
    namespace.ip_batch("link set lo up\n").unwrap();
    namespace.run(|| work(&namespace)).unwrap()
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn flow(protocol: u8, client: &str, to: &str, answered_by: &str) -> Flow {
    Flow { protocol, client: at(client), to: at(to), answered_by: at(answered_by) }
}

fn flows(family: Family) -> Vec<Flow> {
    match family {
        Family::V4 => vec![
            flow(UDP, "172.16.0.1:1000", "10.96.0.10:53", "10.244.0.1:5353"),
            flow(UDP, "172.16.0.2:1000", "10.96.0.10:53", "10.244.0.2:5353"),
            flow(UDP, "172.16.0.3:1000", "10.96.0.10:54", "10.244.0.1:5353"),
            flow(UDP, "172.16.0.4:1000", "10.96.0.11:53", "10.244.0.1:5354"),
            flow(6, "172.16.0.5:1000", "10.96.0.10:53", "10.244.0.1:5353"),
            flow(132, "172.16.0.6:1000", "10.96.0.10:53", "10.244.0.1:5353"),
        ],
        Family::V6 => vec![
            flow(UDP, "[2001:db8::1]:1000", "[fd00:96::10]:53", "[fd00:244::1]:5353"),
            flow(UDP, "[2001:db8::2]:1000", "[fd00:96::10]:53", "[fd00:244::2]:5353"),
            flow(UDP, "[2001:db8::3]:1000", "[fd00:96::10]:54", "[fd00:244::1]:5353"),
            flow(UDP, "[2001:db8::4]:1000", "[fd00:96::11]:53", "[fd00:244::1]:5354"),
            flow(6, "[2001:db8::5]:1000", "[fd00:96::10]:53", "[fd00:244::1]:5353"),
        ],
    }
}

// rows: 84, 86
#[test]
fn the_kernel_lists_only_udp_flows_of_one_family() {
    in_namespace("list", |_| {
        for family in Family::BOTH {
            insert(flows(family))?;
        }
        for family in Family::BOTH {
            let mut listed = Vec::new();
            Connection::open(libc::NETLINK_NETFILTER)?.dump(wire::list(family), |_, payload| {
                listed
                    .push(wire::UdpEntry::parse(payload).map(|entry| (entry.original_destination, entry.reply_source)));
            })?;
            listed.sort_unstable();
            let udp = flows(family).into_iter().filter(|flow| flow.protocol == UDP);
            let mut expected: Vec<_> = udp.map(|flow| Some((flow.to, flow.answered_by))).collect();
            expected.sort_unstable();
            assert_eq!(listed, expected);
        }
        Ok(())
    });
}

fn key() -> ServiceKey {
    ServiceKey::new("ns", "dns")
}

fn dns(node_port: u16) -> Change {
    let port = ServicePort { name: "dns".into(), protocol: Protocol::Udp, port: 53, node_port };
    let cluster_ips = vec!["10.96.0.10".parse().unwrap(), "fd00:96::10".parse().unwrap()];
    Change::from(Service::new(key(), cluster_ips, vec![port]))
}

fn endpoint(address: &str) -> Change {
    let port = EndpointPort::new("dns", Protocol::Udp, 5353);
    Change::Endpoint(key(), Endpoint::new(address.parse::<IpAddr>().unwrap(), [port].into()))
}

/// The cleanup that a new tracker plans for a state.
fn cleanup_of(changes: impl IntoIterator<Item = Change>) -> Cleanup {
    let (mut state, mut dirty) = (State::default(), Dirty::default());
    for change in changes {
        state.apply(change, &mut dirty);
    }
    Tracker::default().plan(&state, &dirty.services).cleanup
}

fn swept(cleanup: &Cleanup) -> Result<Swept> {
    let addresses = NodeAddresses::of(cleanup, &NodeInputs::default(), Some(&interfaces::list()?))?;
    let mut swept = Swept::default();
    for family in Family::BOTH {
        sweep(cleanup, family, &addresses, &mut swept)?;
    }
    Ok(swept)
}

// rows: 82, 83, 84
#[test]
fn only_stale_udp_flows_of_the_service_are_deleted() {
    in_namespace("stale", |_| {
        for family in Family::BOTH {
            insert(flows(family))?;
        }
        let before: BTreeSet<Flow> = entries(Family::V4)?.union(&entries(Family::V6)?).copied().collect();
        let cleanup = cleanup_of([dns(0), endpoint("10.244.0.2"), endpoint("fd00:244::2")]);
        assert_eq!(swept(&cleanup)?.deleted, 2);
        let after: BTreeSet<Flow> = entries(Family::V4)?.union(&entries(Family::V6)?).copied().collect();
        let deleted: Vec<Flow> = before.difference(&after).copied().collect();
        assert_eq!(deleted, [flows(Family::V4)[0], flows(Family::V6)[0]]);
        assert_eq!(swept(&cleanup)?.deleted, 0, "the second sweep deleted flows");
        Ok(())
    });
}

// rows: 79, 84
#[test]
fn stale_node_port_flows_are_deleted_at_the_nodes_own_addresses() {
    in_namespace("nodeport", |namespace| {
        namespace.ip_batch(
            "link add veth0 type veth peer name veth1\nlink set veth0 up\naddr add 192.0.2.11/24 dev veth0\n\
             addr add 2001:db8:0:1::b/64 dev veth0 nodad\n",
        )?;
        let here = [
            flow(UDP, "172.16.0.1:1000", "192.0.2.11:30053", "10.244.0.1:5353"),
            flow(UDP, "127.0.0.1:1000", "127.0.0.1:30053", "10.244.0.1:5353"),
            flow(UDP, "[2001:db8::1]:1000", "[2001:db8:0:1::b]:30053", "[fd00:244::1]:5353"),
        ];
        let elsewhere = [
            flow(UDP, "172.16.0.1:1000", "192.0.2.99:30053", "192.0.2.99:30053"),
            flow(UDP, "[2001:db8::1]:1000", "[2001:db8:0:1::63]:30053", "[2001:db8:0:1::63]:30053"),
        ];
        insert(here.into_iter().chain(elsewhere))?;
        let cleanup = cleanup_of([dns(30053), endpoint("10.244.0.2"), endpoint("fd00:244::2")]);
        assert_eq!(swept(&cleanup)?.deleted, 3);
        let left: BTreeSet<Flow> = entries(Family::V4)?.union(&entries(Family::V6)?).copied().collect();
        assert_eq!(left, elsewhere.into_iter().collect());
        Ok(())
    });
}

// rows: 86
#[test]
fn many_stale_flows_are_deleted_in_batches() {
    in_namespace("batches", |_| {
        for (client, to) in [("172.16.0.1", "10.96.0.10:53"), ("172.16.0.2", "10.96.0.11:53")] {
            insert((1..=5000).map(|port| flow(UDP, &format!("{client}:{port}"), to, "10.244.0.1:5353")))?;
        }
        let swept = swept(&cleanup_of([dns(0), endpoint("10.244.0.2")]))?;
        assert_eq!((swept.deleted, swept.lists), (5000, 2), "expected one list for each family: {swept:?}");
        assert_eq!(swept.listed, 10_000);
        assert_eq!(entries(Family::V4)?.len(), 5000);
        Ok(())
    });
}
