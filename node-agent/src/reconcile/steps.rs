//! Cuts the changes that wait into steps, so that no service makes the others wait for long.
//!
//! A step has about as many objects as the dataplane writes at once, those of the smallest services
//! first. Every other step prefers the services of the present *round*, so that large services do
//! not wait without end while small ones change. When all services of a round are in the kernel,
//! the state at the beginning of the round is: a change that arrived later may be in the kernel as
//! well.

use std::{collections::BTreeSet, mem, sync::Arc, time::Instant};

use headgate_core::{Dirty, Family, ServiceKey, State, frontends::frontends_of, size::ServiceSize};

use crate::{dataplane::Report, progress::Target};

/// A moment of the state that the kernel has when a round ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reached {
    pub(super) target: Target,
    pub(super) generation: u64,
    /// When the changes up to this moment were taken.
    pub(super) at: Instant,
}

/// The steps of the changes that are not in the kernel.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// What the present step programs.
    pub(super) part: Dirty,
    /// The services of the round that are not in the kernel.
    round: BTreeSet<Arc<ServiceKey>>,
    /// What the kernel has when the round ends. `None` before the first step of a round.
    reached: Option<Reached>,
    /// Services of which the dataplane has not written everything that was planned.
    partial: BTreeSet<Arc<ServiceKey>>,
    has_rest: bool,
    is_turn_of_round: bool,
}

impl Steps {
    /// True if the dataplane has planned changes that are not in the kernel.
    pub(super) fn has_rest(&self) -> bool {
        self.has_rest
    }

    /// Chooses the services of the next step among `dirty`, with about `at_once` objects. Begins a
    /// round, which ends at `now`, unless one is under way. The step has no services if it is the
    /// turn of what the dataplane has planned already.
    pub(super) fn choose(&mut self, dirty: &Dirty, state: &State, at_once: usize, now: Reached) {
        if self.reached.is_none() {
            self.round.clone_from(&dirty.services);
            self.reached = Some(now);
        }
        self.part = Dirty { service_cidrs: dirty.service_cidrs, ..Dirty::default() };
        let is_turn_of_round = self.is_turn_of_round;
        self.is_turn_of_round = !is_turn_of_round;
        if self.has_rest && is_turn_of_round {
            return;
        }
        let weighed = dirty.services.iter().map(|key| {
            let is_later = is_turn_of_round && !self.round.contains(key);
            (is_later, objects(state, key), key)
        });
        let is_due = |(_, objects, key): &(_, usize, _)| *objects <= at_once && !self.partial.contains(*key);
        let mut weighed: Vec<(bool, usize, &Arc<ServiceKey>)> =
            weighed.filter(|one| !self.has_rest || is_due(one)).collect();
        weighed.sort_unstable();
        let mut sum = 0;
        for (_, objects, key) in weighed {
            sum += objects;
            if sum > at_once && !self.part.services.is_empty() {
                break;
            }
            self.part.services.insert(Arc::clone(key));
        }
        self.add_losers(dirty, state);
    }

    /// Adds the services that may have lost a frontend of a service of the step.
    fn add_losers(&mut self, dirty: &Dirty, state: &State) {
        let mut added = if dirty.lost.is_empty() { BTreeSet::new() } else { self.part.services.clone() };
        while !added.is_empty() {
            let specified = added.iter().filter_map(|key| state.entry(key)?.service()).flat_map(frontends_of);
            let losers: BTreeSet<_> = specified.filter_map(|frontend| dirty.lost.get(&frontend)).cloned().collect();
            added = losers.difference(&self.part.services).cloned().collect();
            self.part.services.extend(added.iter().cloned());
        }
    }

    /// Records a step that succeeded, and removes from `dirty` what is in the kernel. Returns
    /// whether that is the whole step, and what the kernel has if the round has ended.
    pub(super) fn succeeded(&mut self, dirty: &mut Dirty, report: &Report) -> (bool, Option<Reached>) {
        let part = mem::take(&mut self.part);
        self.has_rest = report.has_rest;
        dirty.service_cidrs &= !part.service_cidrs;
        let is_partial = report.is_partial || (self.has_rest && !part.services.is_disjoint(&self.partial));
        if is_partial {
            self.partial.extend(part.services);
        } else {
            dirty.services.retain(|key| !part.services.contains(key));
            self.round.retain(|key| !part.services.contains(key));
            dirty.lost.retain(|_, key| !part.services.contains(key));
        }
        if !self.has_rest {
            // They are planned once more, with what has changed meanwhile.
            let partial = mem::take(&mut self.partial);
            self.round.retain(|key| !partial.contains(key));
        }
        (!is_partial, if self.round.is_empty() { self.reached.take() } else { None })
    }
}

/// About how many objects a service needs on a node. 0 for a service without rules.
fn objects(state: &State, key: &ServiceKey) -> usize {
    let Some(entry) = state.entry(key) else { return 0 };
    let sizes = Family::BOTH.into_iter().map(|family| ServiceSize::of(entry, family));
    sizes.filter(|size| size.excess().is_none()).map(ServiceSize::objects).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Change, Endpoint, EndpointPort, Protocol, Service, ServicePort};

    use super::*;

    /// A Service with one address, and one port for each of `objects`.
    fn service(name: &str, objects: u16, external_ips: &[[u8; 4]]) -> Service {
        let port = |number| ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: number, node_port: 0 };
        let last = name.bytes().last().unwrap();
        let ports = (1..=objects).map(port).collect();
        let mut service = Service::new(ServiceKey::new("ns", name), vec![[10, 96, 0, last].into()], ports);
        service.external_ips = external_ips.iter().map(|address| (*address).into()).collect();
        service
    }

    struct Rig {
        state: State,
        waiting: Dirty,
        dirty: Dirty,
        steps: Steps,
        generation: u64,
    }

    impl Rig {
        fn new(changes: impl IntoIterator<Item = Service>) -> Self {
            let (state, waiting, dirty) = (State::default(), Dirty::default(), Dirty::default());
            let mut rig = Self { state, waiting, dirty, steps: Steps::default(), generation: 0 };
            rig.change(changes);
            rig
        }

        fn change(&mut self, services: impl IntoIterator<Item = Service>) {
            self.generation += 1;
            for service in services {
                self.state.apply(Change::from(service), &mut self.waiting);
            }
        }

        /// Takes what waits, and makes a step with at most 10 objects. Returns the services of the
        /// step, and the generation that the kernel has.
        fn step(&mut self, is_partial: bool, has_rest: bool) -> (String, Option<u64>) {
            self.dirty.merge(mem::take(&mut self.waiting));
            let target = Target { epoch: 1, version: self.generation, stream: 1, node_revision: 0 };
            let now = Reached { target, generation: self.generation, at: Instant::now() };
            self.steps.choose(&self.dirty, &self.state, 10, now);
            let names: Vec<&str> = self.steps.part.services.iter().map(|key| key.name.as_str()).collect();
            let names = names.join(" ");
            let report = Report { is_partial, has_rest, ..Report::default() };
            let (is_complete, reached) = self.steps.succeeded(&mut self.dirty, &report);
            assert_eq!(is_complete, !is_partial);
            (names, reached.map(|reached| reached.generation))
        }
    }

    #[test]
    fn small_services_come_first_and_large_ones_have_every_other_step() {
        let mut rig =
            Rig::new([service("a", 30, &[]), service("b", 40, &[]), service("c", 1, &[]), service("d", 2, &[])]);
        assert_eq!(rig.step(false, false), ("c d".into(), None));
        rig.change([service("e", 50, &[]), service("f", 3, &[])]);
        assert_eq!(rig.step(false, false), ("a".into(), None), "it is the turn of the round");
        rig.change([service("c", 2, &[])]);
        assert_eq!(rig.step(false, false), ("c f".into(), None));
        rig.change([service("f", 2, &[])]);
        // All changes of the first generation are in the kernel, and not all later ones.
        assert_eq!(rig.step(false, false), ("b".into(), Some(1)));
        assert_eq!(rig.step(false, false), ("f".into(), None));
        assert_eq!(rig.step(false, false), ("e".into(), Some(4)));
        assert!(rig.dirty.is_empty());
    }

    #[test]
    fn small_changes_come_between_the_parts_of_a_large_service() {
        let mut rig = Rig::new([service("a", 30, &[])]);
        assert_eq!(rig.step(true, true), ("a".into(), None));
        for generation in 2..10 {
            // The large service changes all the time, and is not planned before nothing is left.
            rig.change([service("a", 30 + u16::try_from(generation).unwrap(), &[]), service("b", 1, &[])]);
            rig.change([service("b", 2, &[])]);
            let names = if generation % 2 == 0 { "" } else { "b" };
            assert_eq!(rig.step(false, true), (names.into(), None));
        }
        // The kernel has the first generation. The service is planned again with what has changed.
        assert_eq!(rig.step(false, false), (String::new(), Some(1)));
        assert!(!rig.dirty.is_empty());
        assert_eq!((rig.step(false, false), rig.dirty.is_empty()), (("a".into(), Some(rig.generation)), true));
    }

    #[test]
    fn a_frontend_moves_between_two_services_in_one_step() {
        let shared = [192, 0, 2, 1];
        let mut rig = Rig::new([service("a", 20, &[shared]), service("b", 1, &[])]);
        while rig.step(false, false).1.is_none() {}
        // Service a frees an address, and gets it later.
        rig.change([service("a", 21, &[])]);
        rig.change([service("c", 22, &[]), service("d", 1, &[])]);
        rig.dirty.merge(mem::take(&mut rig.waiting));
        rig.change([service("b", 2, &[shared])]);
        assert_eq!(rig.step(false, false).0, "a b d");
        assert_eq!(rig.step(false, false).0, "c");
        assert!(rig.dirty == Dirty::default(), "{:?}", rig.dirty);
        // A stronger claim takes the address. The service that loses it may come first.
        rig.change([Service { load_balancer_ips: vec![shared.into()], ..service("a", 20, &[]) }]);
        rig.change([service("b", 3, &[shared]), service("d", 2, &[])]);
        assert_eq!(rig.step(false, false), ("b d".into(), None));
        assert_eq!(rig.step(false, false), ("a".into(), Some(rig.generation)));
        rig.change([Service { load_balancer_ips: vec![shared.into()], ..service("d", 1, &[]) }, service("a", 20, &[])]);
        assert_eq!(rig.step(false, false), ("a b d".into(), Some(rig.generation)));
    }

    #[test]
    fn endpoints_count_as_objects_and_services_that_are_too_large_do_not() {
        let mut state = State::default();
        let mut with = |name: &str, ports: u16, endpoints: u32| {
            let service = service(name, ports, &[]);
            let key = service.key.clone();
            state.apply(Change::from(service), &mut Dirty::default());
            for number in 0..endpoints {
                let ports = [EndpointPort::new("p", Protocol::Tcp, 8080)].into();
                let endpoint = Endpoint::new((0x0af4_0000 + number).to_be_bytes().into(), ports);
                state.apply(Change::Endpoint(key.clone(), endpoint), &mut Dirty::default());
            }
            objects(&state, &key)
        };
        assert_eq!((with("a", 2, 30), with("b", 1, 0), with("c", 700, 100)), (62, 1, 0));
    }
}
