//! Dummy devices and their addresses.

use std::{
    collections::BTreeSet,
    net::{IpAddr, TcpListener},
};

use headgate_netlink::route::{Change, Link, Prefix, Routing};
use headgate_tests::{testbed::process::output, uml};

use crate::connect_soon;

const NAME: &str = "kube-ipvs0";

fn device(routing: &mut Routing) -> Link {
    routing.add_dummy(NAME).unwrap();
    routing.link(NAME).unwrap().unwrap()
}

fn host(address: &str) -> Prefix {
    Prefix::host(address.parse().unwrap())
}

fn execute_all(routing: &mut Routing, changes: &[Change]) {
    routing.change(changes, |index, refusal| panic!("{:?}: {refusal}", changes[index])).unwrap();
}

fn codes(routing: &mut Routing, changes: &[Change]) -> Vec<(usize, i32)> {
    let mut found = Vec::new();
    routing.change(changes, |index, refusal| found.push((index, refusal.code))).unwrap();
    found
}

#[test]
fn a_dummy_device_is_added_set_up_and_removed() {
    uml::inside(|| {
        let mut routing = Routing::open().unwrap();
        assert_eq!(routing.link(NAME).unwrap(), None);
        let link = device(&mut routing);
        assert_eq!((link.name.as_str(), link.kind.as_deref()), (NAME, Some("dummy")));
        assert!(!link.is_up());
        assert_eq!(routing.add_dummy(NAME).unwrap_err().refusal_code(), Some(libc::EEXIST));
        output("ip", &["link", "set", NAME, "up"]);
        assert!(output("ip", &["link", "show", NAME]).contains("NOARP,UP"));
        assert!(routing.link(NAME).unwrap().unwrap().is_up());
        output("ip", &["link", "set", NAME, "down"]);
        assert!(!routing.link(NAME).unwrap().unwrap().is_up());
        routing.remove_link(link.index).unwrap();
        assert_eq!(routing.link(NAME).unwrap(), None);
        assert_eq!(routing.remove_link(link.index).unwrap_err().refusal_code(), Some(libc::ENODEV));
        let loopback = routing.link("lo").unwrap().unwrap();
        assert_eq!((loopback.index, loopback.kind), (1, None));
    });
}

#[test]
fn addresses_of_one_link_are_changed_and_listed() {
    uml::inside(|| {
        let mut routing = Routing::open().unwrap();
        let link = device(&mut routing).index;
        let all = [host("10.96.0.1"), host("10.96.0.10"), host("fd00:96::1"), host("fd00:96::a")];
        execute_all(&mut routing, &all.map(|address| Change::AddAddress { link, address }));
        assert_eq!(BTreeSet::from_iter(routing.addresses(link).unwrap()), BTreeSet::from(all));
        let printed = output("ip", &["-o", "addr", "show", "dev", NAME]);
        assert!(printed.contains("inet 10.96.0.1/32 scope host"), "{printed}");
        assert!(printed.contains("inet6 fd00:96::a/128 scope global nodad deprecated noprefixroute"), "{printed}");
        assert!(!routing.addresses(1).unwrap().contains(&all[0]), "addresses of other links are listed");
        let removal = Change::RemoveAddress { link, address: all[1] };
        let refused = codes(&mut routing, &[Change::AddAddress { link, address: all[0] }, removal, removal]);
        assert_eq!(refused, [(0, libc::EEXIST), (2, libc::EADDRNOTAVAIL)]);
        execute_all(&mut routing, &[Change::RemoveAddress { link, address: all[3] }]);
        assert_eq!(BTreeSet::from_iter(routing.addresses(link).unwrap()), BTreeSet::from([all[0], all[2]]));
        output("ip", &["addr", "add", "10.97.0.1/32", "dev", NAME]);
        assert!(routing.addresses(link).unwrap().contains(&host("10.97.0.1")));
        // Another program added this address, and the kernel may choose it.
        let address = host("fd00:96::c");
        output("ip", &["addr", "add", "fd00:96::c/128", "dev", NAME]);
        assert_eq!(routing.preferred_addresses(link).unwrap(), [address]);
        execute_all(&mut routing, &[Change::DeprecateAddress { link, address }]);
        assert_eq!(routing.preferred_addresses(link).unwrap(), []);
    });
}

#[test]
fn connections_reach_addresses_of_the_device_though_it_is_down() {
    uml::inside(|| {
        let mut routing = Routing::open().unwrap();
        let link = device(&mut routing).index;
        for address in ["10.96.0.1", "fd00:96::1"] {
            execute_all(&mut routing, &[Change::AddAddress { link, address: host(address) }]);
            let address: IpAddr = address.parse().unwrap();
            let listener = TcpListener::bind((address, 0)).unwrap();
            connect_soon(listener.local_addr().unwrap());
        }
    });
}

#[test]
fn thousands_of_addresses_are_listed_completely() {
    uml::inside(|| {
        let mut routing = Routing::open().unwrap();
        let link = device(&mut routing).index;
        let all: Vec<_> =
            (1..=2000_u16).map(|i| Prefix::host([10, 96, i.to_be_bytes()[0], i.to_be_bytes()[1]].into())).collect();
        execute_all(
            &mut routing,
            &all.iter().map(|address| Change::AddAddress { link, address: *address }).collect::<Vec<_>>(),
        );
        assert_eq!(BTreeSet::from_iter(routing.addresses(link).unwrap()), BTreeSet::from_iter(all));
    });
}
