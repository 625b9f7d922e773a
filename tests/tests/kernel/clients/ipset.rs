//! Compares Headgate's client of IP sets with the `ipset` program. The client must list what
//! `ipset` creates, and `ipset` must print what the client creates.

use std::{collections::BTreeSet, io::Write as _, process::Stdio};

use anyhow::Result;
use headgate_tests::testbed::{
    Namespace,
    process::{output, sorted_lines},
};
use ipset_netlink::{Change, Element, Entry, Family, IpSets, Protocol, SetType, Specification};

/// Runs `work` in a new network namespace.
fn in_namespace(name: &str, work: impl FnOnce() -> Result<()> + Send) {
    Namespace::for_test(&format!("set-{name}")).unwrap().run(work).unwrap();
}

fn execute_all(sets: &mut IpSets, changes: &[Change]) {
    let refused = sets.execute(changes).unwrap();
    let explained: Vec<_> = refused.iter().map(|refused| changes[refused.index].explain(&refused.refusal)).collect();
    assert!(explained.is_empty(), "{explained:?}");
}

/// Sets of every type with their elements, and the input of `ipset restore` that creates these
/// sets.
fn table() -> (Vec<(Specification, Vec<Element>)>, &'static str) {
    let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
    let (other, net6) = ("10.1.0.0".parse().unwrap(), "fd00:1::".parse().unwrap());
    let of = |name: &str, set_type, family| Specification::new(name, set_type, family).with_sizes(1024, 65_536);
    let (tcp, udp, sctp) = (Protocol::Tcp, Protocol::Udp, Protocol::Sctp);
    let sets = vec![
        (of("ips", SetType::HashIp, Family::V4), vec![Element::Ip(v4)]),
        (of("ips6", SetType::HashIp, Family::V6), vec![Element::Ip(v6)]),
        (
            of("cluster", SetType::HashIpPort, Family::V4),
            vec![Element::IpPort(v4, tcp, 80), Element::IpPort(v4, udp, 53), Element::IpPort(v4, sctp, 9)],
        ),
        (of("loop6", SetType::HashIpPortIp, Family::V6), vec![Element::IpPortIp(v6, tcp, 80, v6)]),
        (
            of("sources", SetType::HashIpPortNet, Family::V4),
            vec![Element::IpPortNet(v4, tcp, 80, other, 16), Element::IpPortNet(v4, tcp, 80, v4, 32)],
        ),
        (of("sources6", SetType::HashIpPortNet, Family::V6), vec![Element::IpPortNet(v6, tcp, 80, net6, 64)]),
        (of("nets", SetType::HashNet, Family::V4), vec![Element::Net([0, 0, 0, 0].into(), 1), Element::Net(v4, 32)]),
        (of("nets6", SetType::HashNet, Family::V6), vec![Element::Net("8000::".parse().unwrap(), 1)]),
        (Specification::new("ports", SetType::BitmapPort, Family::V4), vec![Element::Port(30_080), Element::Port(0)]),
    ];
    let text = "\
        create ips hash:ip family inet hashsize 1024 maxelem 65536\n\
        add ips 10.0.0.1\n\
        create ips6 hash:ip family inet6 hashsize 1024 maxelem 65536\n\
        add ips6 fd00::1\n\
        create cluster hash:ip,port family inet hashsize 1024 maxelem 65536\n\
        add cluster 10.0.0.1,tcp:80\n\
        add cluster 10.0.0.1,udp:53\n\
        add cluster 10.0.0.1,sctp:9\n\
        create loop6 hash:ip,port,ip family inet6 hashsize 1024 maxelem 65536\n\
        add loop6 fd00::1,tcp:80,fd00::1\n\
        create sources hash:ip,port,net family inet hashsize 1024 maxelem 65536\n\
        add sources 10.0.0.1,tcp:80,10.1.0.0/16\n\
        add sources 10.0.0.1,tcp:80,10.0.0.1\n\
        create sources6 hash:ip,port,net family inet6 hashsize 1024 maxelem 65536\n\
        add sources6 fd00::1,tcp:80,fd00:1::/64\n\
        create nets hash:net family inet hashsize 1024 maxelem 65536\n\
        add nets 0.0.0.0/1\n\
        add nets 10.0.0.1\n\
        create nets6 hash:net family inet6 hashsize 1024 maxelem 65536\n\
        add nets6 8000::/1\n\
        create ports bitmap:port range 0-65535\n\
        add ports 30080\n\
        add ports 0\n";
    (sets, text)
}

fn is_listed(sets: &mut IpSets, expected: &[(Specification, Vec<Element>)]) {
    for (wanted, elements) in expected {
        let set = sets.set(&wanted.name).unwrap().unwrap();
        assert!(set.header.fits(wanted), "{:?} is not {wanted:?}", set.header);
        let listed: BTreeSet<Entry> = set.entries.into_iter().collect();
        let entries = elements.iter().map(|element| Entry { element: *element, nomatch: false });
        assert_eq!(listed, entries.collect(), "{}", wanted.name);
        let header = sets.header(&wanted.name).unwrap().unwrap();
        assert_eq!(header.elements.map(|count| count as usize), Some(elements.len()), "{}", wanted.name);
    }
    assert_eq!(sets.header("nobodys").unwrap(), None);
}

#[test]
fn the_program_prints_what_the_client_creates() {
    in_namespace("make", || {
        let (table, text) = table();
        let mut sets = IpSets::open()?;
        for (wanted, elements) in &table {
            sets.create(wanted)?;
            let changes: Vec<_> = elements.iter().map(|element| Change::add(wanted.name.as_str(), *element)).collect();
            execute_all(&mut sets, &changes);
            // An entry that exists may be added again.
            execute_all(&mut sets, &changes);
        }
        assert_eq!(sorted_lines(&output("ipset", &["save"])), sorted_lines(text));
        is_listed(&mut sets, &table);
        Ok(())
    });
}

#[test]
fn the_client_lists_what_the_program_creates() {
    in_namespace("list", || {
        let (table, text) = table();
        let mut program = std::process::Command::new("ipset").arg("restore").stdin(Stdio::piped()).spawn()?;
        program.stdin.take().unwrap().write_all(text.as_bytes())?;
        assert!(program.wait()?.success());
        let mut sets = IpSets::open()?;
        is_listed(&mut sets, &table);
        output("ipset", &["create", "foreign", "hash:net,port"]);
        output("ipset", &["add", "foreign", "10.0.0.0/8,tcp:80"]);
        let foreign = sets.set("foreign")?.unwrap();
        assert_eq!((foreign.header.type_name.as_str(), foreign.entries.len()), ("hash:net,port", 0));
        output("ipset", &["create", "excepting", "hash:ip,port,net", "comment"]);
        output("ipset", &["add", "excepting", "10.0.0.1,tcp:80,10.1.0.0/16", "nomatch", "comment", "why"]);
        let excepting = sets.set("excepting")?.unwrap();
        let element = Element::IpPortNet([10, 0, 0, 1].into(), Protocol::Tcp, 80, [10, 1, 0, 0].into(), 16);
        assert_eq!(excepting.entries, [Entry { element, nomatch: true }]);
        assert!(excepting.header.comments);
        Ok(())
    });
}

#[test]
fn headers_show_options_that_change_or_remove_entries() {
    in_namespace("options", || {
        let mut sets = IpSets::open()?;
        let wanted = |name: &str| Specification::new(name, SetType::HashIp, Family::V4);
        for (name, options, fits) in [
            ("plain", &[][..], true),
            ("counters", &["counters", "skbinfo"], true),
            ("comment", &["comment"], false),
            ("expiring", &["timeout", "600"], false),
            ("masked", &["netmask", "24"], false),
            ("evicting", &["forceadd"], false),
        ] {
            output("ipset", &[&["create", name, "hash:ip"], options].concat());
            output("ipset", &["add", name, "10.0.0.1"]);
            let found = sets.set(name)?.unwrap();
            assert_eq!((found.header.fits(&wanted(name)), found.entries.len()), (fits, 1), "{:?}", found.header);
            let is_changing = ["masked", "evicting"].contains(&name);
            assert_eq!(found.header.changes_entries, is_changing, "{:?}", found.header);
            let expires = found.header.fits(&wanted(name).expiring_after(600));
            assert_eq!(expires, name == "expiring", "{:?}", found.header);
            assert!(found.header.is_of_type(&wanted(name)));
            let of_v6 = Specification::new(name, SetType::HashIp, Family::V6);
            assert!(!found.header.is_of_type(&of_v6) && !found.header.fits(&of_v6));
        }
        sets.create(&wanted("ours").expiring_after(600))?;
        execute_all(&mut sets, &[Change::add("ours", Element::Ip([10, 0, 0, 1].into()))]);
        let saved = output("ipset", &["save", "ours"]);
        assert_eq!(saved.lines().filter(|line| line.contains(" timeout ")).count(), 2, "{saved}");
        Ok(())
    });
}

#[test]
fn entries_are_added_and_deleted_and_sets_are_swapped_and_destroyed() {
    in_namespace("change", || {
        let mut sets = IpSets::open()?;
        let of = |name: &str| Specification::new(name, SetType::HashIp, Family::V4);
        let ip = |last: u8| Element::Ip([10, 0, 0, last].into());
        sets.create(&of("a"))?;
        sets.create(&of("b"))?;
        execute_all(
            &mut sets,
            &[
                Change::add("a", ip(1)),
                Change::add("a", ip(1)),
                Change::add("a", ip(2)),
                Change::delete("a", ip(2)),
                Change::delete("a", ip(2)),
                Change::add("b", ip(3)),
            ],
        );
        let entries = |sets: &mut IpSets, name: &str| sets.set(name).unwrap().unwrap().entries;
        let listed = |element| [Entry { element, nomatch: false }];
        assert_eq!(entries(&mut sets, "a"), listed(ip(1)));
        sets.swap("a", "b")?;
        assert_eq!(entries(&mut sets, "a"), listed(ip(3)));
        sets.destroy("a")?;
        assert_eq!(sets.set("a")?, None);
        assert_eq!(output("ipset", &["list", "-n"]).trim(), "b");
        Ok(())
    });
}

#[test]
fn errors_name_the_change_and_the_reason() {
    in_namespace("refuse", || {
        let mut sets = IpSets::open()?;
        let small = Specification::new("small", SetType::HashIp, Family::V4).with_sizes(64, 1);
        sets.create(&small)?;
        let error = sets.create(&small).unwrap_err();
        assert_eq!(error.to_string(), "creating the set small of type hash:ip: a set with this name exists");
        let of_v6 = Specification::new("of-v6", SetType::HashIp, Family::V6);
        sets.create(&of_v6)?;
        let text = |result: Result<(), ipset_netlink::IpSetError>| result.unwrap_err().to_string();
        assert!(text(sets.swap("small", "of-v6")).ends_with("the sets are of types that cannot be swapped"));
        assert!(text(sets.destroy("none")).ends_with("there is no such set"));
        // Programs of other tests may hold the lock of iptables.
        output("iptables-legacy", &["-w", "-A", "INPUT", "-m", "set", "--match-set", "small", "src", "-j", "ACCEPT"]);
        assert!(text(sets.destroy("small")).contains("in use"));
        assert_eq!(sets.set("small")?.unwrap().header.references, 1);
        let ip = |last: u8| Element::Ip([10, 0, 0, last].into());
        output("ipset", &["create", "ports", "bitmap:port", "range", "1-10"]);
        let changes = [
            Change::add("small", ip(1)),
            Change::add("small", ip(2)),
            Change::add("none", ip(1)),
            Change::add("of-v6", ip(1)),
            Change::add("ports", Element::Port(11)),
            Change::add("ports", Element::Port(10)),
        ];
        let refused = sets.execute(&changes)?;
        let said: Vec<_> = refused.iter().map(|refused| changes[refused.index].explain(&refused.refusal)).collect();
        assert_eq!(
            said,
            [
                "adding 10.0.0.2 to the set small: the set is full: it has the maximum number of entries (maxelem)",
                "adding 10.0.0.1 to the set none: there is no such set",
                "adding 10.0.0.1 to the set of-v6: the family or type of the entry differs from the \
                 family or type of the set, or the kernel uses another protocol version",
                "adding 11 to the set ports: the entry is out of the set's range",
            ]
        );
        assert_eq!(sets.set("ports")?.unwrap().entries, [Entry { element: Element::Port(10), nomatch: false }]);
        Ok(())
    });
}

#[test]
fn large_sets_are_filled_and_listed_completely() {
    in_namespace("large", || {
        let mut sets = IpSets::open()?;
        let count = 20_000_u32;
        sets.create(&Specification::new("large", SetType::HashIpPort, Family::V4).with_sizes(1024, count))?;
        let element = |i: u32| {
            let [a, b, c, d] = (0x0a60_0000 + i).to_be_bytes();
            Element::IpPort([a, b, c, d].into(), Protocol::Tcp, 80)
        };
        let changes: Vec<_> = (0..count).map(|i| Change::add("large", element(i))).collect();
        execute_all(&mut sets, &changes);
        let found = sets.set("large")?.unwrap();
        assert_eq!(found.entries.len(), 20_000);
        let found: BTreeSet<_> = found.entries.into_iter().map(|entry| entry.element).collect();
        assert_eq!(found, (0..count).map(element).collect());
        Ok(())
    });
}
