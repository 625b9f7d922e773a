//! Changes of the pools of mode userspace that are replayed in another order, split into other
//! steps, or squashed lead each address to equal endpoints. The table accepts every plan.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
};

use headgate_core::{
    Dirty, Family, FixedState, NodeFacts, Protocol, State,
    addresses::DialPolicy,
    nftables::Lookup,
    userspace::{Listening, Operation, PoolSettings, UserspaceLedger, UserspacePlan},
};
use proptest::prelude::*;

mod changes;
use changes::{Event, any_event, node, replays};

/// The table of a proxy that accepts only operations about pools that it has.
#[derive(Debug, Default)]
struct Table {
    pools: HashMap<u64, (PoolSettings, BTreeMap<SocketAddr, u32>)>,
    addresses: BTreeMap<(Lookup, Protocol, SocketAddr), u64>,
}

impl Table {
    fn execute(&mut self, operation: Operation) {
        match operation {
            Operation::SetPool(pool, settings) => {
                let (_, endpoints) = self.pools.remove(&pool).unwrap_or((settings.clone(), BTreeMap::new()));
                self.pools.insert(pool, (settings, endpoints));
            }
            Operation::SetEndpoint(pool, endpoint, weight) => {
                self.pools.get_mut(&pool).unwrap().1.insert(endpoint, weight);
            }
            Operation::RemoveEndpoint(pool, endpoint) => {
                self.pools.get_mut(&pool).unwrap().1.remove(&endpoint).unwrap();
            }
            Operation::SetAddress(pool, lookup, protocol, address) => {
                assert!(self.pools.contains_key(&pool));
                self.addresses.insert((lookup, protocol, address), pool);
            }
            Operation::RemoveAddress(pool, lookup, protocol, address) => {
                if self.addresses.get(&(lookup, protocol, address)) == Some(&pool) {
                    self.addresses.remove(&(lookup, protocol, address));
                }
            }
            Operation::RemovePool(pool) => {
                assert!(!self.addresses.values().any(|other| *other == pool), "the pool {pool} has an address");
                self.pools.remove(&pool).unwrap();
            }
            Operation::RemoveService(service) => {
                let mut pools = self.pools.values();
                assert!(pools.all(|(settings, _)| settings.service != service), "{service} has a pool");
            }
        }
    }

    fn commit(&mut self, plan: UserspacePlan) {
        plan.before.into_iter().chain(plan.after).for_each(|operation| self.execute(operation));
    }

    /// What each address leads to.
    fn flat(&self) -> BTreeMap<(Lookup, Protocol, SocketAddr), String> {
        self.addresses.iter().map(|(address, pool)| (*address, format!("{:?}", self.pools[pool]))).collect()
    }
}

struct Rig {
    table: Table,
    ledger: UserspaceLedger,
    state: State,
    node: NodeFacts,
}

impl Rig {
    fn new(family: Family, listening: Listening) -> Self {
        let ledger = UserspaceLedger::new(family, listening);
        // The proxy connects to some of the endpoints.
        let ranges = ["10.244.0.0/30", "fd00:244::/126"].map(|range| range.parse().unwrap());
        let dialled = DialPolicy { has_proxy: true, ..DialPolicy::new(ranges.to_vec(), []) };
        let node = NodeFacts { dialled: dialled.into(), ..node() };
        Self { table: Table::default(), ledger, state: State::default(), node }
    }

    fn full(&mut self) {
        let plan = self.ledger.full(&FixedState(&self.state, &self.node));
        self.table.commit(plan);
    }

    fn step(&mut self, events: &[Event]) {
        let mut dirty = Dirty::default();
        events.iter().for_each(|event| event.apply(&mut self.state, &mut self.node, &mut dirty));
        let plan = self.ledger.changed(&self.state, &self.node, &dirty);
        self.table.commit(plan);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn replayed_split_and_squashed_changes_lead_to_the_same_endpoints(
        changes in prop::collection::vec(any_event(8), 1..60),
        chunk in 1usize..10,
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
        listening in prop_oneof![Just(Listening::PerMap), Just(Listening::PerPolicy)],
    ) {
        let mut wanted = Rig::new(family, listening);
        changes.iter().for_each(|event| event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default()));
        wanted.full();

        for sequence in replays(&changes) {
            let mut rig = Rig::new(family, listening);
            rig.full();
            for part in sequence.chunks(chunk) {
                rig.step(part);
            }
            prop_assert_eq!(rig.table.flat(), wanted.table.flat());
            prop_assert_eq!(rig.table.pools.len(), wanted.table.pools.len());
            prop_assert_eq!(rig.ledger.full(&FixedState(&rig.state, &rig.node)), UserspacePlan::default());
        }
    }
}
