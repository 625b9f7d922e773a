//! Facts about one node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use crate::{
    conventions::addresses::DialPolicy,
    model::{Node, Protocol, Service, ServiceKey},
};

/// Facts about one node. The view of a service depends on the shared state and on these facts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// The node's name in lower case. Endpoints on a node of this name are local.
    pub name: Arc<str>,
    /// The node's zone.
    pub zone: Option<Arc<str>>,
    /// The node's own addresses. [`crate::source_ranges`] tests whether source ranges admit them.
    pub addresses: Vec<IpAddr>,
    /// This node does not program externalIPs (feature gate `AllowServiceExternalIPs` is off).
    pub ignores_external_ips: bool,
    /// Endpoints that fail this node's health checks.
    pub failing: FailingEndpoints,
    /// The addresses that the node's programs connect to.
    pub dialled: Arc<DialPolicy>,
}

impl NodeFacts {
    /// Returns the facts about a node whose Node resource has not arrived.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Returns the facts from a Node resource, or [`Self::named`] if there is none.
    #[must_use]
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        let Some(Node { zone, addresses, .. }) = node.cloned() else { return Self::named(name) };
        Self { zone, addresses, ..Self::named(name) }
    }
}

// The endpoints that fail this node's health checks.

static NONE: BTreeSet<SocketAddr> = BTreeSet::new();

/// The TCP ports of endpoints that fail this node's health checks, by service.
///
/// The entry of a service exists until an empty set replaces it, even if the service is deleted.
/// The checker reports only changes. If a service is deleted and created again before the checker
/// notices, the checker reports nothing and the entry is still needed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailingEndpoints {
    services: BTreeMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
}

impl FailingEndpoints {
    /// Replaces a service's failing endpoints. If true, the caller plans the service again.
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

    /// True if no endpoint fails.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// Returns the services with failing endpoints, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &BTreeSet<SocketAddr>)> {
        self.services.iter()
    }

    /// Returns all failing endpoints of a service.
    #[must_use]
    pub fn of(&self, key: &ServiceKey) -> &BTreeSet<SocketAddr> {
        self.services.get(key).unwrap_or(&NONE)
    }

    /// Returns the endpoints that must not get new connections when a port of `service` chooses
    /// among `choice`. The set may also contain failing endpoints outside `choice`. The set is
    /// empty if the Service requests no checks for this protocol. It is also empty if all endpoints
    /// of `choice` fail, because using all of them is better than using none.
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
