//! The slots of groups in which the client's address selects the slot.
//!
//! Weighted rendezvous hashing fills the slots: each slot holds the endpoint with the highest score
//! for this slot. The scores depend only on slot and endpoint, so all nodes compute the same slots.
//! A removed endpoint changes only its own slots, and clients of other endpoints do not move.

use std::net::IpAddr;

use sha2::{Digest as _, Sha256};

use crate::model::Weight;

/// The most scores for a slot that weights ask for. With this and the [limits of a
/// Service](crate::size), the slots of a Service take less than 100 ms of a processor.
const MAX_WEIGHTED_DRAWS: u32 = 1024;

/// Returns the endpoint of each of `count` slots. An endpoint has slots in proportion to its
/// weight, on average. Without endpoints, there are no slots. The endpoints are sorted.
pub(super) fn slots(endpoints: &[((IpAddr, u16), Weight)], count: u32) -> Vec<(IpAddr, u16)> {
    let draws = draws_of(endpoints);
    let candidates: Vec<_> = endpoints.iter().zip(draws).map(|((at, _), draws)| (*at, draws, seed(at))).collect();
    let best = |slot| candidates.iter().max_by_key(|(_, draws, seed)| score(*seed, slot, *draws));
    (0..count).filter_map(|slot| best(slot).map(|(endpoint, ..)| *endpoint)).collect()
}

/// Returns how many scores each endpoint draws for a slot: its weight. If the sum is above
/// [`MAX_WEIGHTED_DRAWS`], all weights are halved, and rounded up, until it is not or all are 1.
fn draws_of(endpoints: &[((IpAddr, u16), Weight)]) -> Vec<u32> {
    let mut draws: Vec<u32> = endpoints.iter().map(|(_, weight)| weight.get()).collect();
    while draws.iter().sum::<u32>() > MAX_WEIGHTED_DRAWS && draws.iter().any(|draws| *draws > 1) {
        draws.iter_mut().for_each(|draws| *draws = draws.div_ceil(2));
    }
    draws
}

/// Returns a number that differs between endpoints.
fn seed((address, port): &(IpAddr, u16)) -> u64 {
    let mut hash = Sha256::new();
    match address {
        IpAddr::V4(address) => hash.update(address.octets()),
        IpAddr::V6(address) => hash.update(address.octets()),
    }
    hash.update(port.to_be_bytes());
    let first = hash.finalize().first_chunk().copied().unwrap_or_default();
    u64::from_be_bytes(first)
}

/// Returns the score of an endpoint for a slot: the maximum of so many pseudo-random numbers. So
/// the endpoint has the highest score with a probability in proportion to its weight, and the score
/// needs no floating-point numbers, whose results differ between machines.
fn score(seed: u64, slot: u32, draws: u32) -> u64 {
    (0..draws).map(|draw| scramble(seed ^ (u64::from(slot) << 32 | u64::from(draw)))).max().unwrap_or_default()
}

/// Returns a number all of whose bits depend on all bits of `number`.
fn scramble(number: u64) -> u64 {
    /// An odd number with irregular bits: the golden ratio, scaled to 64 bits.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |number: u64| {
        let product = u128::from(number) * u128::from(FACTOR);
        let low = product & u128::from(u64::MAX);
        u64::try_from((product >> 64) ^ low).unwrap_or_default()
    };
    fold(fold(fold(number ^ FACTOR)) ^ number)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::behaviours::size::HASHED_SLOTS;

    type WeightedEndpoints = BTreeMap<(IpAddr, u16), Weight>;

    fn slots(endpoints: &WeightedEndpoints) -> Vec<(IpAddr, u16)> {
        let sorted: Vec<_> = endpoints.iter().map(|(at, weight)| (*at, *weight)).collect();
        super::slots(&sorted, HASHED_SLOTS)
    }

    fn endpoints(weights: &[(u16, u32)]) -> WeightedEndpoints {
        let one = |(number, weight): &(u16, u32)| {
            let [high, low] = number.to_be_bytes();
            ((IpAddr::from([10, 244, high, low]), 8080), Weight::new(*weight).unwrap())
        };
        weights.iter().map(one).collect()
    }

    fn share(slots: &[(IpAddr, u16)], endpoint: &(IpAddr, u16)) -> f64 {
        f64::from(u32::try_from(slots.iter().filter(|held| *held == endpoint).count()).unwrap())
            / f64::from(HASHED_SLOTS)
    }

    /// The slots are part of the contract between nodes: agents of different versions must compute
    /// the same slots.
    #[test]
    fn slots_never_change_between_versions() {
        let digest = |endpoints: &WeightedEndpoints| {
            let text: String = slots(endpoints).iter().map(|(address, port)| format!("{address} {port}\n")).collect();
            u64::from_be_bytes(*Sha256::digest(text).first_chunk().unwrap())
        };
        let mut both = endpoints(&[(1, 1), (2, 3), (700, 100)]);
        assert_eq!(digest(&both), 0xc48c_031d_68ea_2f51);
        both.insert(("fd00::1".parse().unwrap(), 443), Weight::default());
        assert_eq!(digest(&both), 0x305e_5b13_ba54_54c2);
        assert_eq!(slots(&WeightedEndpoints::new()), []);
    }

    #[test]
    fn shares_follow_the_weights() {
        for weights in [&[(1, 1), (2, 1)][..], &[(1, 1), (2, 2), (3, 5)], &[(1, 100), (2, 100), (3, 50)]] {
            let total: u32 = weights.iter().map(|(_, weight)| weight).sum();
            let endpoints = endpoints(weights);
            let slots = slots(&endpoints);
            for (endpoint, weight) in &endpoints {
                let wanted = f64::from(weight.get()) / f64::from(total);
                let deviation = (wanted * (1.0 - wanted) / f64::from(HASHED_SLOTS)).sqrt();
                let found = share(&slots, endpoint);
                assert!((found - wanted).abs() < 4.0 * deviation, "{endpoint:?} of {weights:?} has {found}");
            }
        }
    }

    /// However many endpoints a group has and whatever they weigh, its slots take a limited time.
    #[test]
    fn heavy_weights_of_many_endpoints_lose_their_last_bits() {
        let of = |count: u16, weight: u32| {
            let all: Vec<(u16, u32)> =
                (0..count).map(|number| (number, if number == 0 { 1 } else { weight })).collect();
            let sorted: Vec<_> = endpoints(&all).into_iter().collect();
            draws_of(&sorted)[..2].to_vec()
        };
        assert_eq!(of(11, 100), [1, 100]);
        assert_eq!(of(12, 100), [1, 50]);
        assert_eq!(of(5000, 100), [1, 1]);
    }

    /// No endpoint of a large group is without clients.
    #[test]
    fn each_of_100_endpoints_has_slots() {
        let endpoints = endpoints(&(0..100).map(|number| (number, 1)).collect::<Vec<_>>());
        let slots = slots(&endpoints);
        let shares: Vec<f64> = endpoints.keys().map(|endpoint| share(&slots, endpoint) * 100.0).collect();
        assert!(shares.iter().all(|share| (0.3..2.0).contains(share)), "{shares:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn an_endpoint_that_leaves_or_loses_weight_changes_only_its_own_slots(
            weights in prop::collection::btree_map(0u16..500, 1u32..=20, 2..30),
            which in any::<prop::sample::Index>(),
            smaller in any::<bool>(),
        ) {
            let weights: Vec<(u16, u32)> = weights.into_iter().collect();
            let all = endpoints(&weights);
            let leaving = *which.get(&all.keys().copied().collect::<Vec<_>>());
            let mut fewer = all.clone();
            let weight = fewer.remove(&leaving).unwrap().get();
            if smaller && weight > 1 {
                fewer.insert(leaving, Weight::new(weight - 1).unwrap());
            }
            let (before, after) = (slots(&all), slots(&fewer));
            let moved: BTreeSet<_> =
                before.iter().zip(&after).filter(|(old, new)| old != new).map(|(old, _)| *old).collect();
            prop_assert!(moved.iter().all(|endpoint| *endpoint == leaving), "{:?} moved", moved);
        }
    }
}
