//! Changes.

use std::net::IpAddr;

use compact_str::CompactString;

use super::{Endpoint, Service, ServiceCidr, ServiceKey};

/// One step of the shared state: a resource at its new value, or a key that is gone. Services are
/// boxed, since they are few and large, and a snapshot is a long list of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A Service was added or changed.
    Service(Box<Service>),
    /// A Service is gone. Its endpoints are removed by changes of their own.
    RemoveService(ServiceKey),
    /// An endpoint of a service was added or changed. The service itself may come later.
    Endpoint(ServiceKey, Endpoint),
    /// An endpoint of a service is gone.
    RemoveEndpoint(ServiceKey, IpAddr),
    /// A ServiceCIDR was added or changed.
    ServiceCidr(ServiceCidr),
    /// A ServiceCIDR is gone.
    RemoveServiceCidr(CompactString),
}

/// A Service at its new value.
impl From<Service> for Change {
    fn from(service: Service) -> Self {
        Self::Service(Box::new(service))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent holds each endpoint, and each change of a snapshot for a moment.
    #[test]
    fn endpoints_and_changes_are_small() {
        assert_eq!((size_of::<Endpoint>(), size_of::<Change>()), (48, 96));
    }
}
