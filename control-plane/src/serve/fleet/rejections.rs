//! The rejections of one agent (discovery.proto, section 7).

use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

use headgate_core::ServiceKey;
use headgate_proto::v1;

/// The maximum stored length of a text that an agent sent, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// The maximum number of rejections that people see.
const MAX_SHOWN: usize = 64;

/// The maximum number of remembered rejections, 16 bytes each. A Service with many endpoints is one
/// rejection for each endpoint.
const MAX_REMEMBERED: usize = 4_096;

/// The key of the hashes. It is random, so that nobody can choose names with equal hashes.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The rejections that are in force, as far as this replica remembers them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rejections {
    /// The last rejections, in full.
    shown: Vec<v1::Rejection>,
    /// The hashes of all rejections: of the Service, and of the resource.
    remembered: BTreeSet<(u64, u64)>,
    /// How many rejections the agent says are in force.
    in_force: u64,
}

impl Rejections {
    /// The last rejections, at most 64.
    pub(crate) fn shown(&self) -> &[v1::Rejection] {
        &self.shown
    }

    /// True if the agent rejects nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_force == 0 && self.remembered.is_empty()
    }

    /// True if the agent rejects the Service, one of its endpoints or all its endpoints, or if this
    /// replica has forgotten some of the rejections, which may be any.
    pub(crate) fn concern(&self, key: &ServiceKey) -> bool {
        let has = |hash: u64| self.remembered.range((hash, 0)..=(hash, u64::MAX)).next().is_some();
        let is_complete = self.remembered.len() as u64 >= self.in_force;
        !is_complete || has(hash(&key.to_string())) || has(hash(&key.name))
    }

    /// The rejection to show for a Service that rejections [concern](Self::concern).
    pub(crate) fn reason(&self, key: &ServiceKey) -> String {
        let service = hash(&key.to_string());
        let own = |rejection: &&v1::Rejection| service_of(&rejection.resource) == service;
        match self.shown.iter().find(own) {
            Some(v1::Rejection { resource, field, reason }) => format!("rejected {resource}, {field}: {reason}"),
            None => format!(
                "rejects {} resources, and this replica remembers the names of {}",
                self.in_force.max(self.remembered.len() as u64),
                self.remembered.len()
            ),
        }
    }

    /// Applies rejections and withdrawals. A resource that was rejected before is listed once, with
    /// the newer reason.
    pub(super) fn nack(&mut self, nack: &v1::Nack) {
        if !nack.withdrawn.is_empty() && !self.remembered.is_empty() {
            let withdrawn: BTreeSet<&str> = nack.withdrawn.iter().map(|resource| clip(resource)).collect();
            self.shown.retain(|old| !withdrawn.contains(old.resource.as_str()));
            for resource in &nack.withdrawn {
                self.remembered.remove(&(service_of(resource), hash(resource)));
            }
        }
        for v1::Rejection { resource, .. } in &nack.rejections {
            if self.remembered.len() < MAX_REMEMBERED {
                self.remembered.insert((service_of(resource), hash(resource)));
            }
        }
        // A peer can send any number of rejections. Only the last ones are shown, so earlier ones
        // are skipped to save time.
        for rejection in &nack.rejections[nack.rejections.len().saturating_sub(MAX_SHOWN)..] {
            let rejection = v1::Rejection {
                resource: clip(&rejection.resource).to_owned(),
                field: clip(&rejection.field).to_owned(),
                reason: clip(&rejection.reason).to_owned(),
            };
            self.shown.retain(|old| old.resource != rejection.resource);
            self.shown.push(rejection);
        }
        self.shown.drain(..self.shown.len().saturating_sub(MAX_SHOWN));
        self.in_force = nack.in_force;
    }
}

fn hash(text: &str) -> u64 {
    HASHER.hash_one(text)
}

/// The hash of the Service to which a rejected resource belongs: of NAMESPACE/NAME, or of the name
/// alone if the resource names only this.
fn service_of(resource: &str) -> u64 {
    match resource.split_once(' ') {
        Some(("Service", key)) => hash(key),
        Some(("Endpoint", endpoint)) => hash(endpoint.split(' ').next().unwrap_or_default()),
        _ => hash(resource.strip_prefix("endpoints of service ").unwrap_or(resource)),
    }
}

/// Cuts a text of a peer to a bounded length, at the boundary of a character.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nack(rejections: &[String], withdrawn: &[String], in_force: u64) -> v1::Nack {
        let rejection = |resource: &String| v1::Rejection { resource: resource.clone(), ..v1::Rejection::default() };
        let rejections = rejections.iter().map(rejection).collect();
        v1::Nack { rejections, withdrawn: withdrawn.to_vec(), in_force, ..v1::Nack::default() }
    }

    fn services(numbers: std::ops::Range<usize>) -> Vec<String> {
        numbers.map(|number| format!("Service prod/web-{number}")).collect()
    }

    #[test]
    fn rejections_concern_their_services_beyond_the_number_that_is_shown() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..80), &[], 80));
        let web = |number: usize| ServiceKey::new("prod", &format!("web-{number}"));
        assert_eq!(rejections.shown().len(), MAX_SHOWN);
        assert!(rejections.concern(&web(3)), "it is not shown, but known");
        rejections.nack(&nack(&[], &services(79..80), 79));
        assert!(rejections.concern(&web(3)) && !rejections.concern(&web(79)) && !rejections.concern(&web(80)));
        let others = ["Endpoint prod/api 10.0.0.1", "endpoints of service dns"].map(str::to_owned);
        rejections.nack(&nack(&others, &services(0..79), 2));
        assert!(
            rejections.concern(&ServiceKey::new("prod", "api")) && rejections.concern(&ServiceKey::new("x", "dns"))
        );
        assert!(!rejections.concern(&web(3)));
        assert!(rejections.reason(&ServiceKey::new("prod", "api")).starts_with("rejected Endpoint prod/api 10.0.0.1"));
    }

    #[test]
    fn forgotten_rejections_concern_every_service_until_they_are_withdrawn() {
        let mut rejections = Rejections::default();
        let (all, kept) = (services(0..MAX_REMEMBERED + 10), MAX_REMEMBERED as u64);
        rejections.nack(&nack(&all, &[], all.len() as u64));
        let other = ServiceKey::new("test", "other");
        assert!(rejections.concern(&other));
        rejections.nack(&nack(&[], &all[..10], kept));
        assert!(rejections.concern(&other), "ten rejections are unknown");
        rejections.nack(&nack(&[], &all[MAX_REMEMBERED..], kept - 10));
        assert!(!rejections.concern(&other) && !rejections.is_empty());
        rejections.nack(&nack(&[], &all, 0));
        assert!(rejections.is_empty() && rejections.shown().is_empty());
    }

    #[test]
    fn a_rejection_that_never_arrived_counts() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..1), &[], 2));
        assert!(rejections.concern(&ServiceKey::new("test", "other")));
    }

    #[test]
    fn texts_from_a_peer_are_cut_between_characters() {
        let text = "ä".repeat(MAX_TEXT_BYTES);
        assert_eq!(clip(&text).len(), MAX_TEXT_BYTES);
        assert_eq!(clip(&format!("a{text}")).len(), MAX_TEXT_BYTES - 1);
        assert_eq!(clip("short"), "short");
    }
}
