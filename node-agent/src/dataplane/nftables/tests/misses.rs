//! Before Linux 6.17, a lookup may miss a key while a transaction replaces it. The packet then
//! reaches a right endpoint or none, and is not refused.

use std::collections::BTreeSet;

use headgate_core::{
    Change, Family,
    forwarding::{Fate, Origin},
    nftables::Lookup,
};
use headgate_oracle::nftables::{NftablesDump, Packed, decode};
use nftables_netlink::Expression;

use super::{
    super::elements::{lookup_map, names},
    rig::{PODS, Rig, address, endpoint, key, shapes},
};

/// Which lookups miss the keys that a step replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Misses {
    /// The first lookup of a packet in each map of frontends.
    FirstOfFrontend,
    /// All lookups in all maps.
    All,
}

/// Whether the fate of packets may change in this way while lookups miss.
fn may_become(misses: Misses, right: &Fate, found: &Fate) -> bool {
    match (right, found) {
        (Fate::Forwarded(right), Fate::Forwarded(found) | Fate::Partly(found)) => {
            found.iter().all(|endpoint| right.contains(endpoint))
        }
        (Fate::Forwarded(_), Fate::Dropped) => true,
        // The packet passes as if the frontend did not exist.
        (Fate::Forwarded(_) | Fate::Dropped, Fate::NotServed) => misses == Misses::All,
        (right, found) => right == found,
    }
}

/// The elements of each set whose data differs from that in an earlier dump, as sets and keys.
fn replaced_since(before: &NftablesDump, now: &NftablesDump) -> BTreeSet<(String, Vec<u8>)> {
    let mut replaced = BTreeSet::new();
    for (name, set) in &now.sets {
        let Some(old) = before.sets.get(name) else { continue };
        let changed = set.range(&[]).filter(|(key, data)| old.get(key).is_some_and(|old| old != *data));
        replaced.extend(changed.map(|(key, _)| (name.clone(), key.to_vec())));
    }
    replaced
}

/// Makes lookups miss these elements: in the rules of a set for which `misses` returns true, given
/// the set, the chain, and the number of the rule among those of the chain that look for an element
/// of the set.
fn miss(dump: &mut NftablesDump, elements: &BTreeSet<(String, Vec<u8>)>, misses: impl Fn(&str, &str, usize) -> bool) {
    for name in elements.iter().map(|(set, _)| set.clone()).collect::<BTreeSet<_>>() {
        let Some(set) = dump.sets.get(&name) else { continue };
        let is_kept = |element: &&Packed| !elements.contains(&(name.clone(), set.split(element).0.to_vec()));
        let mut other = set.clone();
        other.elements.retain(|element| is_kept(&element));
        let other_name = format!("{name}, incomplete");
        for (chain_name, chain) in &mut dump.chains {
            let finds = |expression: &Expression| matches!(expression, Expression::Lookup { set, .. } if *set == name);
            let rules = chain.rules.iter_mut().filter(|rule| rule.iter().any(finds)).enumerate();
            for (_, rule) in rules.filter(|(number, _)| misses(&name, chain_name, *number)) {
                for expression in rule {
                    if let Expression::Lookup { set, .. } = expression
                        && *set == name
                    {
                        set.clone_from(&other_name);
                    }
                }
            }
        }
        dump.sets.insert(other_name, other);
    }
}

/// The numbers of packets.
#[derive(Debug, Default)]
struct Seen {
    /// Those that should reach an endpoint.
    forwarded: usize,
    /// Those of them that misses do not concern.
    same: usize,
}

/// Changes the endpoints of all Services step by step. After each step, follows packets to all
/// frontends while lookups miss the keys that the step replaced.
fn walk_with(family: Family, misses: Misses) -> Seen {
    let mut rig = Rig::new(family);
    let numbers = 1..=u8::try_from(shapes(family).len()).unwrap();
    rig.apply(shapes(family).into_iter().map(Change::from));
    let steps: [&[(bool, u8, bool)]; 7] = [
        &[(true, 0, true)],
        &[(true, 1, false)],
        &[(true, 2, true)],
        // One endpoint replaces another.
        &[(false, 0, true), (true, 3, true)],
        // The last endpoint moves into a free slot.
        &[(false, 3, true)],
        &[(false, 1, false), (false, 2, true), (true, 4, true)],
        &[(false, 4, true)],
    ];
    // The chain of the first lookup in each map.
    let first = |set: &str, chain: &str, number| {
        let has_node_port = chain == lookup_map(Lookup::NodePort);
        let maps =
            if has_node_port { [Lookup::NodePort, Lookup::InsideNodePort] } else { [Lookup::Service, Lookup::Inside] };
        let is_first_chain = has_node_port || chain == lookup_map(Lookup::Service);
        is_first_chain && number == 0 && maps.map(lookup_map).contains(&set)
    };
    let mut seen = Seen::default();
    for (step, changes) in steps.into_iter().enumerate() {
        let before = rig.dump();
        let change = |number: u8, (is_added, place, is_here): (bool, u8, bool)| {
            let (last, node) = (number * 8 + place, if is_here { "here" } else { "there" });
            match is_added {
                true => Change::Endpoint(key(number), endpoint(family, last, node)),
                false => Change::RemoveEndpoint(key(number), address(family, PODS, last)),
            }
        };
        rig.apply(numbers.clone().flat_map(|number| changes.iter().map(move |one| change(number, *one))));
        let mut dump = rig.dump();
        let detector = rig.config.detector.as_ref();
        let right = decode(&dump, detector, None);
        let mut replaced = replaced_since(&before, &dump);
        if misses == Misses::FirstOfFrontend {
            replaced.retain(|(set, _)| ![names::ENDPOINTS, names::AFFINITY_ENDPOINTS].contains(&&**set));
        }
        miss(&mut dump, &replaced, |set, chain, number| misses == Misses::All || first(set, chain, number));
        let found = decode(&dump, detector, None);
        for (frontend, entry) in &right.entries {
            for origin in Origin::ALL {
                let right = entry.fate(origin);
                let found = found.entries.get(frontend).map_or(&Fate::NotServed, |entry| entry.fate(origin));
                let context = format!("step {step}, {frontend} {origin}: {right}, but {found} while lookups miss");
                assert!(may_become(misses, right, found), "{context}");
                // A pod whose first lookup misses may be treated as a client from outside.
                let looks_twice = misses == Misses::FirstOfFrontend && origin != Origin::Pod;
                assert!(!looks_twice || right == found, "{context}");
                seen.forwarded += usize::from(matches!(right, Fate::Forwarded(_)));
                seen.same += usize::from(matches!(right, Fate::Forwarded(_)) && right == found);
            }
        }
    }
    seen
}

#[test]
fn a_lookup_that_misses_refuses_nobody_and_leads_to_no_wrong_endpoint() {
    for family in Family::BOTH {
        let first = walk_with(family, Misses::FirstOfFrontend);
        let all = walk_with(family, Misses::All);
        assert!(all.forwarded == first.forwarded && all.same < first.same, "{all:?}, {first:?}");
    }
}
