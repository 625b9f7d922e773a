//! Which endpoints fail this node's checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use crate::model::{Protocol, Service, ServiceKey};

static NONE: BTreeSet<SocketAddr> = BTreeSet::new();

/// The TCP ports of endpoints that fail this node's checks, by service.
///
/// The entry of a service stays until an empty set replaces it, even if the service is removed. A
/// service that comes back before the checker has seen it go has the same failing endpoints, and
/// the checker reports only what changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailingEndpoints {
    services: BTreeMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
}

impl FailingEndpoints {
    /// Replaces the failing endpoints of a service. Returns false if nothing changed; otherwise the
    /// service has to be planned again.
    pub fn set(&mut self, key: &Arc<ServiceKey>, failing: BTreeSet<SocketAddr>) -> bool {
        if failing.is_empty() {
            return self.services.remove(key).is_some();
        }
        let is_new = self.services.get(key) != Some(&failing);
        if is_new {
            self.services.insert(Arc::clone(key), failing);
        }
        is_new
    }

    /// True when no endpoint fails.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// All failing endpoints of a service.
    #[must_use]
    pub fn of(&self, key: &ServiceKey) -> &BTreeSet<SocketAddr> {
        self.services.get(key).unwrap_or(&NONE)
    }

    /// The endpoints that get no new connections when a port of `service` chooses among `choice`.
    /// Empty if the Service does not ask for checks of this protocol, and if all of `choice` fail:
    /// then all are used.
    pub fn among(
        &self,
        service: &Service,
        protocol: Protocol,
        mut choice: impl Iterator<Item = SocketAddr>,
    ) -> &BTreeSet<SocketAddr> {
        let failing = self.of(&service.key);
        let is_checked = protocol == Protocol::Tcp && service.is_checked_by_tcp();
        if is_checked && choice.any(|endpoint| !failing.contains(&endpoint)) { failing } else { &NONE }
    }
}
