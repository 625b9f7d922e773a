//! Services whose rules the kernel refuses. They are set aside, so that they hold up nothing else, and tried again when they change and now and then.
//! Beside them, services of which it refuses a part: these are not set aside, and tried again by the backend.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Family, ServiceKey};
use headgate_proto::v1;

use crate::{dataplane::Refused, session::backoff::jitter};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RefusedServices {
    aside: BTreeMap<Arc<ServiceKey>, Entry>,
    parts: BTreeMap<Arc<ServiceKey>, BTreeMap<Family, String>>,
}

#[derive(Debug)]
struct Entry {
    reasons: BTreeMap<Family, String>,
    attempts: u32,
    retry_at: Instant,
}

impl RefusedServices {
    /// Number of services that are refused, as a whole or in part.
    pub(crate) fn len(&self) -> usize {
        self.aside.len() + self.parts.keys().filter(|service| !self.aside.contains_key(*service)).count()
    }

    /// Takes what the kernel refuses of services while it takes the rest of them. Returns what is about services of which it refused no part before.
    pub(crate) fn set_parts(&mut self, parts: Vec<Refused>) -> Vec<Refused> {
        let before = std::mem::take(&mut self.parts);
        for Refused { service, family, reason } in &parts {
            self.parts.entry(Arc::clone(service)).or_default().insert(*family, reason.clone());
        }
        let mut seen = BTreeSet::new();
        let is_new = |refused: &Refused| !before.contains_key(&refused.service);
        parts.into_iter().filter(is_new).filter(|refused| seen.insert(Arc::clone(&refused.service))).collect()
    }

    /// The kernel has refused these just now. Each is tried again after a pause that doubles from `base` to `cap`, and is drawn from its upper half so that
    /// the services do not come all at once. Returns those that were not refused before.
    pub(crate) fn add(&mut self, refused: Vec<Refused>, base: Duration, cap: Duration) -> BTreeSet<Arc<ServiceKey>> {
        let mut by_service: BTreeMap<Arc<ServiceKey>, BTreeMap<Family, String>> = BTreeMap::new();
        for Refused { service, family, reason } in refused {
            by_service.entry(service).or_default().insert(family, reason);
        }
        let mut new = BTreeSet::new();
        for (service, reasons) in by_service {
            let old = self.aside.remove(&service);
            let attempts = old.as_ref().map_or(0, |entry| entry.attempts);
            let half = base.saturating_mul(1u32.checked_shl(attempts).unwrap_or(u32::MAX)).min(cap) / 2;
            if old.is_none() {
                new.insert(Arc::clone(&service));
            }
            let mut all = old.map_or_else(BTreeMap::new, |entry| entry.reasons);
            all.extend(reasons);
            let retry_at = Instant::now() + half + jitter(half);
            self.aside.insert(service, Entry { reasons: all, attempts: attempts.saturating_add(1), retry_at });
        }
        new
    }

    /// The same, for services that were tried in all families: what else they were refused for counts no longer.
    pub(crate) fn renew(&mut self, refused: Vec<Refused>, base: Duration, cap: Duration) {
        for Refused { service, .. } in &refused {
            self.aside.get_mut(service).into_iter().for_each(|entry| entry.reasons.clear());
        }
        self.add(refused, base, cap);
    }

    /// These could not be tried.
    pub(crate) fn put_off(&mut self, services: &BTreeSet<Arc<ServiceKey>>, pause: Duration) {
        let retry_at = Instant::now() + pause;
        let entries = self.aside.iter_mut().filter(|(service, _)| services.contains(*service));
        entries.for_each(|(_, entry)| entry.retry_at = retry_at);
    }

    /// Those are refused no longer.
    pub(crate) fn remove(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.aside.retain(|service, _| !services.contains(service));
    }

    /// Those among these services that are refused.
    pub(crate) fn among(&self, services: &BTreeSet<Arc<ServiceKey>>) -> BTreeSet<Arc<ServiceKey>> {
        if self.aside.is_empty() {
            return BTreeSet::new();
        }
        services.iter().filter(|service| self.aside.contains_key(*service)).cloned().collect()
    }

    /// Those whose pause is over.
    pub(crate) fn due(&self) -> BTreeSet<Arc<ServiceKey>> {
        let now = Instant::now();
        self.aside.iter().filter(|(_, entry)| entry.retry_at <= now).map(|(service, _)| Arc::clone(service)).collect()
    }

    /// When the first pause is over.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.aside.values().map(|entry| entry.retry_at).min()
    }

    /// All of them, for the backend.
    pub(crate) fn all(&self) -> Vec<Refused> {
        let of = |(service, entry): (&Arc<ServiceKey>, &Entry)| {
            let service = Arc::clone(service);
            let reasons = entry.reasons.iter().map(|(family, reason)| (*family, reason.clone())).collect::<Vec<_>>();
            reasons.into_iter().map(move |(family, reason)| Refused { service: Arc::clone(&service), family, reason })
        };
        self.aside.iter().flat_map(of).collect()
    }

    /// All of them, for the replica: each service once.
    pub(crate) fn rejections(&self) -> Vec<v1::Rejection> {
        let services: BTreeSet<&Arc<ServiceKey>> = self.aside.keys().chain(self.parts.keys()).collect();
        services.into_iter().map(|service| self.rejection(service)).collect()
    }

    fn rejection(&self, service: &Arc<ServiceKey>) -> v1::Rejection {
        let (mut fields, mut all_reasons) = (Vec::new(), Vec::new());
        let mut add = |what: &str, reasons: &BTreeMap<Family, String>, begin: &str| {
            let families: Vec<String> = reasons.keys().map(ToString::to_string).collect();
            fields.push(format!("{what} ({})", families.join(", ")));
            let reasons: BTreeSet<&str> = reasons.values().map(String::as_str).collect();
            let reasons: Vec<&str> = reasons.into_iter().collect();
            all_reasons.push(format!("{begin}{}", reasons.join("; ")));
        };
        if let Some(entry) = self.aside.get(service) {
            add("rules", &entry.reasons, "");
        }
        if let Some(reasons) = self.parts.get(service) {
            add("virtual servers", reasons, "all of the service is programmed but this: ");
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
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn refused(name: &str, family: Family, reason: &str) -> Refused {
        Refused { service: Arc::new(ServiceKey::new("prod", name)), family, reason: reason.into() }
    }

    fn pause(services: &RefusedServices) -> Option<Duration> {
        Some(services.next_due()?.saturating_duration_since(Instant::now()))
    }

    #[test]
    fn pauses_grow_to_a_cap_and_stay_above_its_half() {
        let mut services = RefusedServices::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            services.add(vec![refused("web", Family::V4, "line 3 failed")], MINUTE, 60 * MINUTE);
            pauses.extend(pause(&services));
        }
        assert!(pauses[0] <= MINUTE && pauses[0] > MINUTE / 3, "{pauses:?}");
        assert!(pauses[1] <= 2 * MINUTE && pauses[1] > 2 * MINUTE / 3, "{pauses:?}");
        assert!(pauses[11] <= 60 * MINUTE && pauses[11] > 29 * MINUTE, "{pauses:?}");
        assert!(services.due().is_empty());
        services.add(vec![refused("api", Family::V4, "line 3 failed")], Duration::ZERO, MINUTE);
        assert_eq!(services.due().len(), 1);
    }

    #[test]
    fn a_service_is_named_once_with_its_families() {
        let mut services = RefusedServices::default();
        let both = vec![refused("web", Family::V4, "no match"), refused("web", Family::V6, "no match")];
        assert_eq!(services.add(both.clone(), MINUTE, MINUTE).len(), 1);
        assert!(services.add(both.clone(), MINUTE, MINUTE).is_empty());
        let rejection = &services.rejections()[0];
        assert_eq!(rejection.resource, "Service prod/web");
        assert_eq!((rejection.field.as_str(), rejection.reason.as_str()), ("rules (IPv4, IPv6)", "no match"));
        assert_eq!(services.all(), both);
        services.remove(&[Arc::new(ServiceKey::new("prod", "web"))].into());
        assert!(services.len() == 0 && services.rejections().is_empty());
    }

    #[test]
    fn parts_are_told_beside_whole_services_and_each_service_is_new_once() {
        let mut services = RefusedServices::default();
        services.add(vec![refused("web", Family::V4, "no match")], MINUTE, MINUTE);
        let parts = |names: &[&str]| {
            let of = |name: &&str| Family::BOTH.map(|family| refused(name, family, "a broadcast address"));
            names.iter().flat_map(of).collect::<Vec<_>>()
        };
        let new = services.set_parts(parts(&["api", "web"]));
        assert_eq!(new.iter().map(|new| new.service.name.as_str()).collect::<Vec<_>>(), ["api", "web"]);
        assert_eq!(services.set_parts(parts(&["api", "db", "web"])).len(), 1);
        assert_eq!((services.len(), services.all().len()), (3, 1), "parts are not set aside");
        let told: Vec<(String, String)> =
            services.rejections().into_iter().map(|rejection| (rejection.field, rejection.reason)).collect();
        let part = "all of the service is programmed but this: a broadcast address";
        assert_eq!(told[0], ("virtual servers (IPv4, IPv6)".to_owned(), part.to_owned()));
        assert_eq!(told[2], ("rules (IPv4), virtual servers (IPv4, IPv6)".to_owned(), format!("no match; {part}")));
        assert!(services.set_parts(Vec::new()).is_empty());
        assert_eq!((services.len(), services.rejections().len()), (1, 1));
    }
}
