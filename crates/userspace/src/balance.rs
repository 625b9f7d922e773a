//! The endpoints of a Service, and the choice of one for a connection. No I/O and no clock: the
//! caller passes the time and a random number. Changes and choices take O(log n), except that
//! [`Algorithm::ConsistentHash`] computes a hash of about 5 ns for each endpoint (weighted
//! rendezvous hashing): it needs no table, its shares are exact, and a removal moves no other
//! client.

mod affinity;
mod fenwick;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use affinity::Affinity;
pub use affinity::MAX_CLIENTS;
use fenwick::Weights;
use slab::Slab;

/// How a Service chooses an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// At random, in proportion to the weights.
    #[default]
    Random,
    /// In turn. In each round an endpoint gets as many connections as its weight.
    RoundRobin,
    /// The endpoint with the fewest open connections in proportion to its weight. Among equal
    /// endpoints, the one that was not chosen for the longest time.
    LeastConnections,
    /// By a hash of the client's address. Every node chooses the same endpoint for a client.
    ConsistentHash,
}

/// After this many failures in a row an endpoint rests.
const FAILURES_BEFORE_REST: u32 = 2;
/// The first rest of an endpoint. Each further failure doubles the rest.
const FIRST_REST_MS: u64 = 500;
const LONGEST_REST_MS: u64 = 30_000;
/// An endpoint gets at least this weight while it has any.
const MIN_WEIGHT: u32 = 1;

/// An endpoint within its pool. After its removal, it stands for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointKey {
    slot: u32,
    serial: u32,
}

/// A chosen endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picked {
    /// The endpoint in its pool.
    pub key: EndpointKey,
    /// Where the endpoint listens.
    pub address: SocketAddr,
}

#[derive(Debug)]
struct Endpoint {
    address: SocketAddr,
    serial: u32,
    weight: u32,
    /// The seed of this endpoint for consistent hashing.
    seed: u64,
    open_connections: u32,
    failures: u32,
    /// Non-zero while the endpoint rests.
    rests_until_ms: u64,
    /// The order of the last choice.
    chosen: u64,
}

impl Endpoint {
    /// The place in the order by load: the load after one more connection, and the last choice.
    fn load(&self) -> (u64, u64) {
        (((u64::from(self.open_connections) + 1) << 16) / u64::from(self.weight), self.chosen)
    }
}

/// The endpoints of one Service.
#[derive(Debug, Default)]
pub struct Pool {
    algorithm: Algorithm,
    endpoints: Slab<Endpoint>,
    by_address: HashMap<SocketAddr, usize>,
    /// The weights of endpoints that do not rest.
    weights: Weights,
    /// Endpoints that do not rest, by load. It is empty unless the algorithm needs it.
    by_load: BTreeSet<(u64, u64, usize)>,
    /// Endpoints that rest, by the end of their rest.
    resting: BTreeSet<(u64, usize)>,
    affinity: Affinity,
    next_serial: u32,
    /// The position of [`Algorithm::RoundRobin`], and the order of choices.
    turn: u64,
}

impl Pool {
    /// Sets the algorithm. Endpoints keep their connections and their rest.
    pub fn set_algorithm(&mut self, algorithm: Algorithm) {
        if self.algorithm != algorithm {
            self.algorithm = algorithm;
            self.by_load.clear();
            let slots: Vec<usize> = self.endpoints.iter().map(|(slot, _)| slot).collect();
            for slot in slots {
                self.enter(slot);
            }
        }
    }

    /// Adds an endpoint, or changes its weight. A weight of 0 counts as 1.
    pub fn set(&mut self, address: SocketAddr, weight: u32) {
        let weight = weight.max(MIN_WEIGHT);
        if let Some(&slot) = self.by_address.get(&address) {
            self.leave(slot);
            self.endpoints[slot].weight = weight;
            self.enter(slot);
            return;
        }
        self.next_serial = self.next_serial.wrapping_add(1);
        let slot = self.endpoints.insert(Endpoint {
            address,
            serial: self.next_serial,
            weight,
            seed: seed(address),
            open_connections: 0,
            failures: 0,
            rests_until_ms: 0,
            chosen: 0,
        });
        self.by_address.insert(address, slot);
        self.enter(slot);
    }

    /// Removes an endpoint. Returns whether the pool had it.
    pub fn remove(&mut self, address: SocketAddr) -> bool {
        let Some(slot) = self.by_address.remove(&address) else { return false };
        self.leave(slot);
        self.resting.remove(&(self.endpoints[slot].rests_until_ms, slot));
        self.endpoints.remove(slot);
        true
    }

    /// Whether the endpoint of a connection is still in the pool.
    pub fn contains(&self, key: EndpointKey) -> bool {
        self.endpoints.get(key.slot as usize).is_some_and(|endpoint| endpoint.serial == key.serial)
    }

    /// The number of endpoints that rest after failures.
    pub fn resting(&self) -> usize {
        self.resting.len()
    }

    /// The number of clients with affinity, and of those forgotten because the table was full.
    pub fn affinity_clients(&self) -> (usize, u64) {
        (self.affinity.len(), self.affinity.evicted)
    }

    /// Chooses an endpoint that is not in `tried`, and counts a connection for it until
    /// [`Self::release`]. `None` if none is left. `affinity_ms` is the timeout of ClientIP
    /// affinity, if any. If all endpoints rest, chooses the one whose rest ends first.
    pub fn pick(
        &mut self,
        client: IpAddr,
        tried: &[EndpointKey],
        affinity_ms: Option<u64>,
        now_ms: u64,
        random: u64,
    ) -> Option<Picked> {
        self.wake(now_ms);
        let remembered = affinity_ms.and_then(|_| self.remembered(client, tried, now_ms));
        let slot = remembered.or_else(|| self.choose(client, tried, random))?;
        let address = self.endpoints[slot].address;
        if let Some(timeout_ms) = affinity_ms {
            self.affinity.put(client, address, now_ms, timeout_ms, MAX_CLIENTS);
        }
        self.turn += 1;
        let turn = self.turn;
        self.reload(slot, |endpoint| {
            endpoint.open_connections += 1;
            endpoint.chosen = turn;
        });
        let serial = self.endpoints[slot].serial;
        Some(Picked { key: EndpointKey { slot: u32::try_from(slot).ok()?, serial }, address })
    }

    /// Renews the affinity of a client whose connection is still in use.
    pub fn renew(&mut self, client: IpAddr, endpoint: SocketAddr, timeout_ms: u64, now_ms: u64) {
        self.affinity.put(client, endpoint, now_ms, timeout_ms, MAX_CLIENTS);
    }

    /// Ends a connection of an endpoint.
    pub fn release(&mut self, key: EndpointKey) {
        if self.contains(key) {
            self.reload(key.slot as usize, |endpoint| endpoint.open_connections -= 1);
        }
    }

    /// An endpoint accepted a connection: its failures are forgotten.
    pub fn succeeded(&mut self, key: EndpointKey) {
        if self.contains(key) {
            let slot = key.slot as usize;
            self.endpoints[slot].failures = 0;
            self.rest_until(slot, 0);
        }
    }

    /// An endpoint refused a connection, or did not answer. After two failures in a row the
    /// endpoint rests: 0.5 s, and twice as long after each further failure, up to 30 s.
    pub fn failed(&mut self, key: EndpointKey, now_ms: u64) {
        if self.contains(key) {
            let slot = key.slot as usize;
            let endpoint = &mut self.endpoints[slot];
            endpoint.failures += 1;
            if let Some(doublings) = endpoint.failures.checked_sub(FAILURES_BEFORE_REST) {
                let rest_ms = (FIRST_REST_MS << doublings.min(16)).min(LONGEST_REST_MS);
                self.rest_until(slot, now_ms + rest_ms);
            }
        }
    }

    fn wake(&mut self, now_ms: u64) {
        while let Some(&(until_ms, slot)) = self.resting.first() {
            if now_ms < until_ms {
                break;
            }
            self.rest_until(slot, 0);
        }
    }

    fn rest_until(&mut self, slot: usize, until_ms: u64) {
        let old_ms = self.endpoints[slot].rests_until_ms;
        if old_ms == until_ms {
            return;
        }
        self.leave(slot);
        self.resting.remove(&(old_ms, slot));
        self.endpoints[slot].rests_until_ms = until_ms;
        if until_ms > 0 {
            self.resting.insert((until_ms, slot));
        }
        self.enter(slot);
    }

    /// Takes a slot out of the structures for choices.
    fn leave(&mut self, slot: usize) {
        let (load, chosen) = self.endpoints[slot].load();
        self.by_load.remove(&(load, chosen, slot));
        self.weights.set(slot, 0);
    }

    /// Puts a slot into the structures for choices, unless its endpoint rests.
    fn enter(&mut self, slot: usize) {
        let endpoint = &self.endpoints[slot];
        if endpoint.rests_until_ms == 0 {
            self.weights.set(slot, endpoint.weight);
            if self.algorithm == Algorithm::LeastConnections {
                let (load, chosen) = endpoint.load();
                self.by_load.insert((load, chosen, slot));
            }
        }
    }

    fn reload(&mut self, slot: usize, change: impl FnOnce(&mut Endpoint)) {
        let (load, chosen) = self.endpoints[slot].load();
        let is_ordered = self.by_load.remove(&(load, chosen, slot));
        change(&mut self.endpoints[slot]);
        if is_ordered {
            let (load, chosen) = self.endpoints[slot].load();
            self.by_load.insert((load, chosen, slot));
        }
    }

    fn is_tried(&self, slot: usize, tried: &[EndpointKey]) -> bool {
        tried.iter().any(|key| key.slot as usize == slot && self.contains(*key))
    }

    /// The slot that a client with affinity used before, if its endpoint is alive.
    fn remembered(&self, client: IpAddr, tried: &[EndpointKey], now_ms: u64) -> Option<usize> {
        let address = self.affinity.get(client, now_ms)?;
        let slot = *self.by_address.get(&address)?;
        (self.endpoints[slot].rests_until_ms == 0 && !self.is_tried(slot, tried)).then_some(slot)
    }

    fn choose(&mut self, client: IpAddr, tried: &[EndpointKey], random: u64) -> Option<usize> {
        let found = match self.algorithm {
            Algorithm::Random => self.by_point(tried, |total, _| random % total),
            Algorithm::RoundRobin => {
                let turn = self.turn;
                self.by_point(tried, |total, is_whole| if is_whole { spread(turn, total) } else { random % total })
            }
            Algorithm::LeastConnections => {
                self.by_load.iter().map(|(_, _, slot)| *slot).find(|slot| !self.is_tried(*slot, tried))
            }
            Algorithm::ConsistentHash => self.by_hash(client, tried),
        };
        found.or_else(|| self.resting.iter().map(|(_, slot)| *slot).find(|slot| !self.is_tried(*slot, tried)))
    }

    /// The slot that covers a point of the row of all weights. Endpoints in `tried` have no weight
    /// during the search. `point` gets the total, and whether all endpoints take part.
    fn by_point(&mut self, tried: &[EndpointKey], point: impl FnOnce(u64, bool) -> u64) -> Option<usize> {
        let left_out: Vec<(usize, u32)> = tried
            .iter()
            .filter(|key| self.contains(**key))
            .map(|key| (key.slot as usize, self.weights.get(key.slot as usize)))
            .collect();
        for (slot, _) in &left_out {
            self.weights.set(*slot, 0);
        }
        let total = self.weights.total();
        let found = (total > 0).then(|| self.weights.find(point(total, left_out.is_empty())));
        for (slot, weight) in left_out {
            self.weights.set(slot, weight);
        }
        found
    }

    /// Weighted rendezvous hashing: the endpoint with the highest score. The score of an endpoint
    /// depends only on the client and this endpoint.
    fn by_hash(&self, client: IpAddr, tried: &[EndpointKey]) -> Option<usize> {
        let client = seed(SocketAddr::new(client, 0));
        let candidates = self
            .endpoints
            .iter()
            .filter(|(slot, endpoint)| endpoint.rests_until_ms == 0 && !self.is_tried(*slot, tried));
        let scored = candidates.map(|(slot, endpoint)| {
            // 53 bits make a number in (0, 1). Its negative logarithm, divided by the weight, is
            // smallest for an endpoint with a probability in proportion to the weight.
            let hash = (mix(client ^ endpoint.seed) >> 11) | 1;
            #[allow(clippy::cast_precision_loss, reason = "the number has 53 bits")]
            let unit = hash as f64 / (1_u64 << 53) as f64;
            (-unit.ln() / f64::from(endpoint.weight), slot)
        });
        scored.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, slot)| slot)
    }
}

/// The point of a turn in a row of `total` points. A round visits each once. Neighbouring turns are
/// far apart, so that a large weight makes no burst.
fn spread(turn: u64, total: u64) -> u64 {
    let mut step = (total * 618 / 1000).max(1);
    while greatest_common_divisor(step, total) != 1 {
        step += 1;
    }
    u64::try_from(u128::from(turn) * u128::from(step) % u128::from(total)).unwrap_or(0)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// A number that depends only on the address, the same on every node and in every run.
fn seed(address: SocketAddr) -> u64 {
    let bits = match address.ip() {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    };
    #[allow(clippy::cast_possible_truncation, reason = "both halves are used")]
    let (high, low) = ((bits >> 64) as u64, bits as u64);
    mix(mix(mix(high) ^ low) ^ u64::from(address.port()))
}

/// The finalizer of SplitMix64. It distributes every bit of the input over all bits of the output.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
