//! Cuts the changes that wait into steps, so that no service makes the others wait for long, and
//! keeps services apart whose rules the kernel rejects ([`Quarantine`]). A step has about as many
//! objects as the dataplane writes at once, of the smallest services first. Every other step
//! prefers the present *round*, so that large services do not wait without end. When all services
//! of a round are in the kernel, the state at its beginning is.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Instant,
};

use headgate_core::{Dirty, Family, ServiceKey, State, frontends::frontends_of, view::ServiceSize};
use headgate_proto::v1;
use tracing::warn;

use crate::{
    backoff::Backoff,
    dataplane::{Fault, Report},
    state::progress::Target,
};

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

    /// Chooses the services of the next step among `dirty`, with about `at_once` objects; none if
    /// it is the turn of what is planned already. Begins a round, which ends at `now`, unless one
    /// is under way.
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

// Quarantine: services whose rules the kernel rejects. The dataplane leaves these services out and
// programs all other services. The loop tries quarantined services again when they change, and
// after pauses.
//
// The list also has services of which the kernel rejects only a part, and services that are
// [too large](headgate_core::view) for a node. Such services are not in quarantine: the dataplane
// programs the rest of the former and tries the rejected part again by itself, and it leaves out
// the latter.

/// The services whose rules the kernel rejects, as a whole or in part.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// The initial pauses of each service.
    pauses: Backoff,
    services: BTreeMap<Arc<ServiceKey>, QuarantinedService>,
    partial: BTreeMap<Arc<ServiceKey>, Reasons>,
    too_large: BTreeMap<Arc<ServiceKey>, Reasons>,
}

/// Why the kernel rejects the rules of a service.
type Reasons = BTreeMap<Family, String>;

#[derive(Debug)]
struct QuarantinedService {
    reasons: Reasons,
    pauses: Backoff,
    retry_at: Instant,
}

impl Quarantine {
    /// Creates an empty quarantine. Each service is tried again after these pauses.
    pub(crate) fn new(pauses: Backoff) -> Self {
        Self { pauses, services: BTreeMap::new(), partial: BTreeMap::new(), too_large: BTreeMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.rejected().len()
    }

    fn rejected(&self) -> BTreeSet<&Arc<ServiceKey>> {
        self.services.keys().chain(self.partial.keys()).chain(self.too_large.keys()).collect()
    }

    /// Finds out which of these services are too large for a node. Logs those that were not before.
    pub(crate) fn weigh<'a>(&mut self, state: &State, services: impl IntoIterator<Item = &'a Arc<ServiceKey>>) {
        for service in services {
            let entry = state.entry(service);
            let excess = |family| Some((family, ServiceSize::of(entry?, family).excess()?));
            let reasons: Reasons = Family::BOTH.into_iter().filter_map(excess).collect();
            match reasons.first_key_value() {
                None => drop(self.too_large.remove(service)),
                Some((family, reason)) if !self.too_large.contains_key(service) => {
                    warn!(%service, %family, reason, "a service is rejected");
                    self.too_large.insert(Arc::clone(service), reasons);
                }
                Some(_) => {}
            }
        }
    }

    /// Replaces the list of services that the kernel rejects in part. Returns one item for each
    /// service that was not in the list before.
    pub(crate) fn set_partial(&mut self, parts: Vec<Fault>) -> Vec<Fault> {
        let before = std::mem::take(&mut self.partial);
        for Fault { service, family, reason } in &parts {
            self.partial.entry(Arc::clone(service)).or_default().insert(*family, reason.clone());
        }
        let mut seen = BTreeSet::new();
        let is_new = |fault: &Fault| !before.contains_key(&fault.service);
        parts.into_iter().filter(is_new).filter(|fault| seen.insert(Arc::clone(&fault.service))).collect()
    }

    /// Quarantines services that the kernel rejected at `now`, and starts their next pause. Returns
    /// the number of services that were not in quarantine before.
    pub(crate) fn add(&mut self, faults: Vec<Fault>, now: Instant) -> usize {
        let mut by_service: BTreeMap<Arc<ServiceKey>, Reasons> = BTreeMap::new();
        for Fault { service, family, reason } in faults {
            by_service.entry(service).or_default().insert(family, reason);
        }
        let before = self.services.len();
        for (service, reasons) in by_service {
            let new = || QuarantinedService { reasons: Reasons::new(), pauses: self.pauses.clone(), retry_at: now };
            let entry = self.services.entry(service).or_insert_with(new);
            entry.reasons.extend(reasons);
            entry.retry_at = now + entry.pauses.next_pause();
        }
        self.services.len() - before
    }

    /// Like [`Self::add`], for services that were tried again in all families. Drops the earlier
    /// reasons of these services.
    pub(crate) fn renew(&mut self, faults: Vec<Fault>, now: Instant) {
        for Fault { service, .. } in &faults {
            self.services.get_mut(service).into_iter().for_each(|entry| entry.reasons.clear());
        }
        self.add(faults, now);
    }

    /// Delays the next attempt of services that could not be tried, by the shortest pause.
    pub(crate) fn postpone(&mut self, services: &BTreeSet<Arc<ServiceKey>>, now: Instant) {
        let retry_at = now + self.pauses.first();
        let entries = self.services.iter_mut().filter(|(service, _)| services.contains(*service));
        entries.for_each(|(_, entry)| entry.retry_at = retry_at);
    }

    /// Removes services that the kernel accepts.
    pub(crate) fn release(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.services.retain(|service, _| !services.contains(service));
    }

    /// Returns those of the given services that are in quarantine.
    pub(crate) fn among(&self, services: &BTreeSet<Arc<ServiceKey>>) -> BTreeSet<Arc<ServiceKey>> {
        if self.services.is_empty() {
            return BTreeSet::new();
        }
        services.iter().filter(|service| self.services.contains_key(*service)).cloned().collect()
    }

    /// True if the kernel rejects a service as a whole or in part.
    pub(crate) fn concerns(&self, service: &ServiceKey) -> bool {
        self.services.contains_key(service) || self.partial.contains_key(service)
    }

    /// The services whose pause is over.
    pub(crate) fn due(&self, now: Instant) -> BTreeSet<Arc<ServiceKey>> {
        self.services.iter().filter(|(_, entry)| entry.retry_at <= now).map(|(key, _)| Arc::clone(key)).collect()
    }

    /// When the next pause is over. `None` if no service is in quarantine.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.services.values().map(|entry| entry.retry_at).min()
    }

    /// All services in quarantine, for the dataplane. A service has one item per family.
    pub(crate) fn all(&self) -> Vec<Fault> {
        let faults_of = |(service, entry): (&Arc<ServiceKey>, &QuarantinedService)| {
            let fault = |(family, reason): (&Family, &String)| Fault {
                service: Arc::clone(service),
                family: *family,
                reason: reason.clone(),
            };
            entry.reasons.iter().map(fault).collect::<Vec<_>>()
        };
        self.services.iter().flat_map(faults_of).collect()
    }

    /// All services that the kernel rejects, as a whole or in part, each once.
    pub(crate) fn rejections(&self) -> Vec<v1::Rejection> {
        self.rejected().into_iter().map(|service| self.rejection(service)).collect()
    }

    fn rejection(&self, service: &Arc<ServiceKey>) -> v1::Rejection {
        let (mut fields, mut all_reasons) = (Vec::new(), Vec::new());
        let mut add = |what: &str, reasons: &Reasons, prefix: &str| {
            let families: Vec<String> = reasons.keys().map(ToString::to_string).collect();
            fields.push(format!("{what} ({})", families.join(", ")));
            let reasons: BTreeSet<&str> = reasons.values().map(String::as_str).collect();
            let reasons: Vec<&str> = reasons.into_iter().collect();
            all_reasons.push(format!("{prefix}{}", reasons.join("; ")));
        };
        if let Some(entry) = self.services.get(service) {
            add("rules", &entry.reasons, "");
        }
        if let Some(reasons) = self.partial.get(service) {
            add("virtual servers", reasons, "all of the service is programmed but this: ");
        }
        if let Some(reasons) = self.too_large.get(service) {
            add("size", reasons, "");
        }
        v1::Rejection {
            resource: format!("Service {service}"),
            field: fields.join(", "),
            reason: all_reasons.join("; "),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Change, Protocol, Service, ServicePort};

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
}

#[cfg(test)]
mod quarantine_tests {
    use std::time::Duration;

    use super::*;
    use crate::backoff::Jitter;

    const MINUTE: Duration = Duration::from_secs(60);

    fn fault(name: &str, family: Family, reason: &str) -> Fault {
        Fault { service: Arc::new(ServiceKey::new("prod", name)), family, reason: reason.into() }
    }

    fn quarantine() -> Quarantine {
        Quarantine::new(Backoff::new(MINUTE, 60 * MINUTE, Jitter::Half))
    }

    #[test]
    fn services_rejected_in_part_are_listed_with_the_quarantined_services_and_reported_as_new_once() {
        let mut services = quarantine();
        services.add(vec![fault("web", Family::V4, "no match")], Instant::now());
        let parts = |names: &[&str]| {
            let in_both_families = |name: &&str| Family::BOTH.map(|family| fault(name, family, "a broadcast address"));
            names.iter().flat_map(in_both_families).collect::<Vec<_>>()
        };
        let new = services.set_partial(parts(&["api", "web"]));
        assert_eq!(new.iter().map(|new| new.service.name.as_str()).collect::<Vec<_>>(), ["api", "web"]);
        assert_eq!(services.set_partial(parts(&["api", "db", "web"])).len(), 1);
        assert_eq!((services.len(), services.all().len()), (3, 1), "services rejected in part are not quarantined");
        let listed: Vec<(String, String)> =
            services.rejections().into_iter().map(|rejection| (rejection.field, rejection.reason)).collect();
        let part = "all of the service is programmed but this: a broadcast address";
        assert_eq!(listed[0], ("virtual servers (IPv4, IPv6)".to_owned(), part.to_owned()));
        assert_eq!(listed[2], ("rules (IPv4), virtual servers (IPv4, IPv6)".to_owned(), format!("no match; {part}")));
        assert!(services.set_partial(Vec::new()).is_empty());
        assert_eq!((services.len(), services.rejections().len()), (1, 1));
    }
}
