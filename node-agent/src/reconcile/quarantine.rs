//! Quarantine: services whose rules the kernel rejects. The dataplane leaves these services out and
//! programs all other services. The loop tries quarantined services again when they change, and
//! after pauses.
//!
//! This module also lists services of which the kernel rejects only a part, and services that are
//! [too large](headgate_core::size) for a node. Such services are not in quarantine: the dataplane
//! programs the rest of the former and tries the rejected part again by itself, and it leaves out
//! the latter.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use headgate_core::{Family, ServiceKey, State, size::ServiceSize};
use headgate_proto::v1;
use tracing::warn;

use crate::{backoff::Backoff, dataplane::Fault};

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

    /// Number of services that are rejected as a whole or in part.
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

    /// All services that the kernel rejects, as a whole or in part, for the control plane. Each
    /// service has one item.
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
    fn a_service_is_named_once_with_its_families() {
        let mut services = quarantine();
        let both = vec![fault("web", Family::V4, "no match"), fault("web", Family::V6, "no match")];
        assert_eq!(services.add(both.clone(), Instant::now()), 1);
        assert_eq!(services.add(both.clone(), Instant::now()), 0);
        let rejection = &services.rejections()[0];
        assert_eq!(rejection.resource, "Service prod/web");
        assert_eq!((rejection.field.as_str(), rejection.reason.as_str()), ("rules (IPv4, IPv6)", "no match"));
        assert_eq!(services.all(), both);
        services.release(&[Arc::new(ServiceKey::new("prod", "web"))].into());
        assert!(services.len() == 0 && services.rejections().is_empty());
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
