//! Before Linux 6.17, a lookup may miss a key while a transaction replaces it. The packet then
//! reaches a right endpoint or none, and is not refused.

use headgate_core::{
    Change, Family,
    forwarding::{Fate, Origin},
};

use super::rig::{PODS, Rig, address, endpoint, key, shapes};
use crate::decoders::nftables::decode;

/// The fates of packets.
#[derive(Debug, Default)]
struct Seen {
    /// Those that misses cannot change: packets for Services with endpoints.
    all: usize,
    /// Those that misses did not change.
    same: usize,
}

/// Checks a fate while lookups miss.
fn check(right: &Fate, found: &Fate, only_first: bool, context: &str) {
    let is_right = match (right, found) {
        (Fate::Rejected, Fate::Rejected) | (Fate::Dropped | Fate::Forwarded(_), Fate::Dropped) => true,
        (Fate::Forwarded(right), Fate::Forwarded(found) | Fate::Partly(found)) => {
            found.iter().all(|endpoint| right.contains(endpoint))
        }
        (Fate::NotServed, Fate::NotServed) => true,
        // The packet passes as if the frontend did not exist.
        (Fate::Dropped | Fate::Forwarded(_), Fate::NotServed) => !only_first,
        _ => false,
    };
    assert!(is_right, "{context}: {right}, but {found} while lookups miss");
}

/// Changes the endpoints of all Services step by step. After each step, follows packets to all
/// frontends while lookups miss the keys that the step replaced.
fn walk_with(family: Family, only_first: bool) -> Seen {
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
    let mut seen = Seen::default();
    for (step, changes) in steps.into_iter().enumerate() {
        let before = rig.dump();
        rig.apply(numbers.clone().flat_map(|number| {
            changes.iter().map(move |(is_added, place, is_here)| {
                let last = number * 8 + place;
                match is_added {
                    true => {
                        Change::Endpoint(key(number), endpoint(family, last, if *is_here { "here" } else { "there" }))
                    }
                    false => Change::RemoveEndpoint(key(number), address(family, PODS, last)),
                }
            })
        }));
        let mut dump = rig.dump();
        let detector = rig.config.detector.as_ref();
        let right = decode(&dump, detector, None);
        dump.miss(&dump.replaced_since(&before), only_first);
        let found = decode(&dump, detector, None);
        for (frontend, entry) in &right.entries {
            for origin in Origin::ALL {
                let (right, found) = (entry.fate(origin), found.entries.get(frontend).map(|entry| entry.fate(origin)));
                let found = found.unwrap_or(&Fate::NotServed);
                check(right, found, only_first, &format!("step {step}, {frontend} {origin}"));
                seen.all += usize::from(matches!(right, Fate::Forwarded(_)));
                seen.same += usize::from(matches!(right, Fate::Forwarded(_)) && right == found);
            }
        }
    }
    seen
}

#[test]
fn a_lookup_that_misses_refuses_nobody_and_leads_to_no_wrong_endpoint() {
    for family in Family::BOTH {
        let once = walk_with(family, true);
        assert!(once.same > once.all * 9 / 10, "the rules look twice: {once:?}");
        let always = walk_with(family, false);
        assert!(always.same < once.same && always.all == once.all, "{always:?}, {once:?}");
    }
}
