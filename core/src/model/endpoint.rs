//! Endpoints.

use std::{net::IpAddr, sync::Arc};

use compact_str::CompactString;

use super::Protocol;

/// `conditions` of an endpoint, with the API's defaults applied (nil ready and serving mean true, nil terminating false).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions {
    /// May receive new connections.
    pub ready: bool,
    /// Its pod is ready, terminating or not.
    pub serving: bool,
    /// Its pod is being deleted.
    pub terminating: bool,
}

impl Conditions {
    /// The usual state: ready, serving, not terminating.
    pub const READY: Self = Self { ready: true, serving: true, terminating: false };

    /// Used only when no endpoint is ready (KEP-1669).
    #[must_use]
    pub fn is_serving_terminating(self) -> bool {
        self.serving && self.terminating
    }
}

/// One named port of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPort {
    /// Joins it to the [`super::ServicePort`] of that name.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port on the endpoint's address, never 0.
    pub port: u16,
}

/// `hints` of an endpoint. Empty lists mean that there is no such hint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// `forZones`, sorted.
    pub zones: Vec<Arc<str>>,
    /// `forNodes`, sorted.
    pub nodes: Vec<Arc<str>>,
}

/// Where an endpoint runs, and whom it should serve. Endpoints on one node mostly have the same, whatever their service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Placement {
    /// The node it runs on, lower case.
    pub node: Option<Arc<str>>,
    /// The zone it is in.
    pub zone: Option<Arc<str>>,
    /// Hints, if it has any.
    pub hints: Option<Arc<Hints>>,
}

impl Placement {
    /// On a node, without zone and hints.
    #[must_use]
    pub fn on(node: &str) -> Self {
        Self { node: Some(node.into()), ..Self::default() }
    }
}

/// An address behind a service. Its identity is the service and the address. Port lists and placements are shared, since a cluster has few
/// different ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub address: IpAddr,
    /// The union over all EndpointSlices that carry the address: sorted, without duplicates.
    pub ports: Arc<[EndpointPort]>,
    /// Conditions.
    pub conditions: Conditions,
    /// Where it runs, and whom it should serve.
    pub placement: Arc<Placement>,
}

impl Endpoint {
    /// A ready endpoint without node, zone and hints, for callers that fill in the rest.
    #[must_use]
    pub fn new(address: IpAddr, ports: Arc<[EndpointPort]>) -> Self {
        Self { address, ports, conditions: Conditions::READY, placement: Arc::default() }
    }
}
