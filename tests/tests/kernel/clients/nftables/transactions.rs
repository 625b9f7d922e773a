//! Transactions, errors, lists and notifications of the real kernel.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use nftables_netlink::{
    Chain, Changed, DataType, Dumped, Element, Event, Expression, Family, Fault, Feature, Monitor, Nftables,
    NftablesError, Observed, Presence, Rule, Set, Table, TableName, Transaction, Value, Verdict, probe, refusals,
};

use super::{elements_of_grown, in_namespace, table_name};
use headgate_tests::testbed::process::output;

fn number(number: u32) -> Element {
    Element::new(Value::host_u32(number))
}

fn entry(key: u32, data: u32) -> Element {
    number(key).with_value(Value::host_u32(data))
}

fn map(table: &TableName) -> Set {
    // The user data marks keys for `nft` as numbers in the machine's byte order.
    let user_data = [&[0, 4], &1_u32.to_ne_bytes()[..]].concat();
    Set { user_data, ..Set::map(table, "pairs", &[DataType::Mark], &[DataType::Mark]) }
}

/// A transaction that adds elements to the map.
fn adding(table: &TableName, elements: impl IntoIterator<Item = Element>) -> Transaction {
    let mut transaction = Transaction::new();
    transaction.add_elements(table, "pairs", elements);
    transaction
}

/// A table with a map.
fn with_map(kernel: &mut Nftables) -> TableName {
    let table = table_name();
    let mut all = Transaction::new();
    all.add_table(&Table::new(table.clone()));
    all.add_set(&map(&table));
    kernel.commit(&all).unwrap();
    table
}

fn faults(result: Result<(), NftablesError>) -> Vec<Fault> {
    match result {
        Err(NftablesError::Refused(faults)) => faults,
        other => panic!("{other:?}"),
    }
}

#[test]
fn errors_name_the_message_the_element_and_the_reason() {
    in_namespace("faults", || {
        let mut kernel = Nftables::open()?;
        let table = with_map(&mut kernel);
        kernel.commit(&adding(&table, (0..10).map(|key| entry(key, key))))?;
        let mut all = Transaction::new();
        all.add_elements(&table, "pairs", (10..20).map(|key| entry(key, key)));
        all.add_elements(&table, "pairs", (20..30).chain([3]).map(|key| entry(key, key + 1)));
        all.delete_elements(&table, "pairs", [number(5), number(99)]);
        all.add_rule(&Rule::new(&table, "nobody", vec![Expression::counter()]));
        let faults = faults(kernel.commit(&all));
        let said: Vec<_> =
            faults.iter().map(|fault| (fault.message, fault.element, fault.refusal.code, fault.to_string())).collect();
        assert_eq!(
            said,
            [
                (
                    Some(1),
                    Some(10),
                    libc::EEXIST,
                    "adding element 0x03000000 of set pairs of table inet shop: it already exists".to_owned()
                ),
                (
                    Some(2),
                    Some(1),
                    libc::ENOENT,
                    "deleting element 0x63000000 of set pairs of table inet shop: it, or an object that it refers to, does not exist"
                        .to_owned()
                ),
                (
                    Some(3),
                    None,
                    libc::ENOENT,
                    "adding a rule of chain nobody of table inet shop: it, or an object that it refers to, does not exist"
                        .to_owned()
                ),
            ]
        );
        assert_eq!(kernel.elements(&table, "pairs")?.len(), 10, "a refused transaction changed the map");
        kernel.commit(&Transaction::new())?;
        Ok(())
    });
}

#[test]
fn a_key_is_replaced_in_one_transaction() {
    in_namespace("replace", || {
        let mut kernel = Nftables::open()?;
        let table = with_map(&mut kernel);
        kernel.commit(&adding(&table, [entry(1, 1), entry(2, 2)]))?;
        let mut all = Transaction::new();
        all.delete_elements(&table, "pairs", [number(1)]);
        all.add_elements(&table, "pairs", [entry(1, 7)]);
        kernel.commit(&all)?;
        assert_eq!(kernel.elements(&table, "pairs")?, [entry(1, 7), entry(2, 2)]);
        Ok(())
    });
}

#[test]
fn a_transaction_begins_a_generation() {
    in_namespace("generation", || {
        let mut kernel = Nftables::open()?;
        let table = with_map(&mut kernel);
        let before = kernel.generation()?.id;
        kernel.commit(&adding(&table, [entry(1, 1)]))?;
        assert_eq!(kernel.generation()?.id, before + 1);
        Ok(())
    });
}

#[test]
fn large_transactions_are_atomic() {
    in_namespace("large", || {
        let mut kernel = Nftables::open()?;
        let table = with_map(&mut kernel);
        let count = 100_000;
        let all = adding(&table, (0..count).map(|key| entry(key, !key)));
        assert!(all.length_bytes() > 2_000_000 && all.message_count() > 50, "{}", all.length_bytes());
        let generation = kernel.generation()?.id;
        kernel.commit(&all)?;
        assert_eq!(kernel.generation()?.id, generation + 1);
        // Until the kernel has grown the hash table of this set to fit the elements, a list may
        // lack elements or contain an element twice. The client must detect these lists and return
        // all elements.
        let found: BTreeSet<_> =
            elements_of_grown(&mut kernel, &table, "pairs")?.into_iter().map(|found| (found.key, found.data)).collect();
        assert_eq!(found, (0..count).map(|key| entry(key, !key)).map(|entry| (entry.key, entry.data)).collect());
        // One fault at the end of a transaction undoes all its changes.
        let mut all = Transaction::new();
        all.delete_elements(&table, "pairs", (0..=count).map(number));
        let faults = faults(kernel.commit(&all));
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].message, Some(all.message_count() - 1));
        assert!(faults[0].what.contains(&format!("0x{}", Value::host_u32(count))), "{}", faults[0]);
        assert_eq!(elements_of_grown(&mut kernel, &table, "pairs")?.len(), count as usize);
        let error = kernel.elements(&table, "nobody").unwrap_err();
        assert_eq!(error.refusal_code(), Some(libc::ENOENT));
        Ok(())
    });
}

#[test]
fn elements_of_a_set_with_a_size_are_passed_on_one_by_one() {
    in_namespace("stream", || {
        let mut kernel = Nftables::open()?;
        let (table, count) = (table_name(), 20_000);
        let mut all = Transaction::new();
        all.add_table(&Table::new(table.clone()));
        all.add_set(&map(&table).with_size(count));
        all.add_elements(&table, "pairs", (0..count).map(|key| entry(key, !key)));
        kernel.commit(&all)?;
        let mut found = BTreeSet::new();
        let dumped =
            kernel.each_element(&table, "pairs", |element| assert!(found.insert((element.key, element.data))))?;
        assert_eq!((dumped, found.len()), (Dumped::Whole, count as usize));
        Ok(())
    });
}

#[test]
fn a_connection_works_after_thousands_of_errors() {
    in_namespace("many-faults", || {
        let mut kernel = Nftables::open()?;
        let table = with_map(&mut kernel);
        let mut all = Transaction::new();
        for chain in 0..20_000 {
            all.delete_chain(&table, &format!("nobody-{chain}"));
        }
        let faults = faults(kernel.commit(&all));
        assert_eq!((faults[0].message, faults[0].refusal.code), (Some(0), libc::ENOENT));
        assert_eq!(kernel.elements(&table, "pairs")?, []);
        kernel.commit(&adding(&table, [entry(1, 1)]))?;
        Ok(())
    });
}

#[test]
fn only_the_owner_changes_a_table_until_another_client_adopts_it() {
    in_namespace("owner", || {
        let table = table_name();
        let owned = Table::new(table.clone()).owned_and_persistent();
        let mut first = Nftables::open()?;
        let mut all = Transaction::new();
        all.add_table(&owned);
        all.add_set(&map(&table));
        first.commit(&all)?;
        assert_eq!(first.table(&table)?.unwrap().object.owner_port, Some(first.port()));
        output("nft", &["flush", "ruleset"]);
        let mut other = Nftables::open()?;
        let add = adding(&table, [entry(1, 1)]);
        assert_eq!(faults(other.commit(&add))[0].refusal.code, libc::EPERM);
        first.commit(&add)?;
        drop(first);
        let orphan = other.table(&table)?.unwrap().object;
        assert!(orphan.persistent && !orphan.owned && orphan.owner_port.is_none(), "{orphan:?}");
        let mut adopt = Transaction::new();
        adopt.add_table(&owned);
        other.commit(&adopt)?;
        assert_eq!(other.table(&table)?.unwrap().object.owner_port, Some(other.port()));
        assert_eq!(other.elements(&table, "pairs")?, [entry(1, 1)]);
        Ok(())
    });
}

#[test]
fn notifications_say_who_changed_what() {
    in_namespace("monitor", || {
        let mut kernel = Nftables::open()?;
        let mut monitor = Monitor::open(1 << 20)?;
        assert_eq!(monitor.read()?, Observed::Nothing);
        let table = with_map(&mut kernel);
        let mut all = Transaction::new();
        all.add_chain(&Chain::regular(&table, "chain"));
        all.add_rule(&Rule::new(&table, "chain", vec![Expression::Verdict(Verdict::Drop)]));
        all.add_elements(&table, "pairs", [entry(1, 2)]);
        kernel.commit(&all)?;
        let ours = read(&mut monitor, 2);
        assert!(ours.iter().all(|event| event.port == kernel.port()), "{ours:?}");
        let rule = kernel.rules(&table, None)?[0].handle;
        let chain = "chain".to_owned();
        let generation = |event: &Event| matches!(event.what, Changed::Generation(_));
        let told: Vec<_> = ours.iter().filter(|event| !generation(event)).map(|event| event.what.clone()).collect();
        let elements = Changed::Elements {
            presence: Presence::Present,
            table: table.clone(),
            set: "pairs".into(),
            elements: vec![entry(1, 2)],
        };
        assert_eq!(
            told,
            [
                Changed::Table(Presence::Present, Table::new(table.clone())),
                Changed::Set(Presence::Present, map(&table)),
                Changed::Chain(Presence::Present, Chain::regular(&table, "chain")),
                Changed::Rule { presence: Presence::Present, table: table.clone(), chain, handle: rule },
                elements,
            ]
        );
        let Changed::Generation(last) = &ours.last().unwrap().what else { panic!("{ours:?}") };
        assert_eq!(last.id, kernel.generation()?.id);
        assert_eq!(last.thread_id, Some(nix::unistd::gettid().as_raw().cast_unsigned()));
        output("nft", &["delete", "element", "inet", "shop", "pairs", "{ 0x1 }"]);
        let theirs = read(&mut monitor, 1);
        assert!(theirs.iter().all(|event| event.port != kernel.port()), "{theirs:?}");
        let deleted = |what: &Changed| matches!(what, Changed::Elements { presence: Presence::Absent, elements, .. } if *elements == [entry(1, 2)]);
        assert!(theirs.iter().any(|event| deleted(&event.what)), "{theirs:?}");
        output("nft", &["flush", "ruleset"]);
        let gone = read(&mut monitor, 1);
        let is_table = |event: &Event| matches!(event.what, Changed::Table(Presence::Absent, _));
        assert!(gone.iter().any(is_table), "{gone:?}");
        Ok(())
    });
}

/// Reads events until the given number of transactions has ended.
fn read(monitor: &mut Monitor, mut transactions: usize) -> Vec<Event> {
    let (mut all, mut waited) = (Vec::new(), 0);
    while transactions > 0 {
        if let Observed::Events(events) = monitor.read().unwrap() {
            transactions -= events.iter().filter(|event| matches!(event.what, Changed::Generation(_))).count();
            all.extend(events);
        } else {
            waited += 1;
            assert!(waited < 2000, "no notification arrived after {all:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    all
}

#[test]
fn a_monitor_that_reads_too_late_reports_lost_events() {
    in_namespace("lost", || {
        let mut kernel = Nftables::open()?;
        let mut monitor = Monitor::open(4096)?;
        let table = with_map(&mut kernel);
        kernel.commit(&adding(&table, (0..1000).map(|key| entry(key, key))))?;
        let mut found = Vec::new();
        while !found.contains(&Observed::Lost) {
            found.push(monitor.read()?);
            assert_ne!(found.last(), Some(&Observed::Nothing), "{}", found.len());
        }
        Ok(())
    });
}

const FEATURES: [Feature; 11] = [
    Feature::Fib,
    Feature::NumberGenerator,
    Feature::Hash,
    Feature::Nat,
    Feature::Masquerade,
    Feature::Reject,
    Feature::ConntrackAddresses,
    Feature::DynamicSetDelete,
    Feature::Limit,
    Feature::SetExpressions,
    Feature::OwnerAndPersist,
];

#[test]
fn the_probe_finds_the_features_of_this_kernel_and_changes_nothing() {
    in_namespace("probe", || {
        let mut kernel = Nftables::open()?;
        // Tables whose names begin like those of the probe.
        let mut others = Transaction::new();
        for name in ["nftables-netlink-probe", "nftables-netlink-probe-refused-on-purpose"] {
            others.add_table(&Table::new(TableName::new(Family::Inet, name)));
        }
        kernel.commit(&others)?;
        let (generation, tables) = (kernel.generation()?, kernel.tables(None)?);
        for family in [Family::Inet, Family::Ip, Family::Ip6] {
            for support in probe(&mut kernel, family, &FEATURES)? {
                assert_eq!(support.fault, None, "{family} {:?}", support.feature);
            }
        }
        // An expression that no kernel supports is refused, and the error names the change.
        let table = table_name();
        let unknown = Expression::Unknown { name: "nonsense".into(), data: Vec::new() };
        let mut all = Transaction::new();
        all.add_table(&Table::new(table.clone()));
        all.add_chain(&Chain::regular(&table, "chain"));
        all.add_rule(&Rule::new(&table, "chain", vec![unknown]));
        let faults = refusals(&mut kernel, &all)?;
        assert_eq!((faults.len(), faults[0].message, faults[0].refusal.code), (1, Some(2), libc::ENOENT));
        assert_eq!((kernel.generation()?, kernel.tables(None)?), (generation, tables));
        Ok(())
    });
}
