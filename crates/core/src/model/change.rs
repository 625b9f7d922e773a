//! Changes of the shared state.

use std::net::IpAddr;

use compact_str::CompactString;

use super::{Endpoint, Service, ServiceCidr, ServiceKey};

/// One change of the shared state: a resource with its new value, or the key of a deleted resource.
/// Services are boxed because they are large and few: a snapshot is a long list of changes, and
/// most of them are endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A Service was added or changed.
    Service(Box<Service>),
    /// A Service was deleted. Separate changes remove its endpoints.
    RemoveService(ServiceKey),
    /// An endpoint of a service was added or changed. The service itself may arrive later.
    Endpoint(ServiceKey, Endpoint),
    /// An endpoint of a service was deleted.
    RemoveEndpoint(ServiceKey, IpAddr),
    /// A ServiceCIDR was added or changed.
    ServiceCidr(ServiceCidr),
    /// A ServiceCIDR was deleted.
    RemoveServiceCidr(CompactString),
}

/// The change that adds or replaces a Service.
impl From<Service> for Change {
    fn from(service: Service) -> Self {
        Self::Service(Box::new(service))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent keeps all endpoints in memory. It also keeps all changes of a snapshot until it has
    /// applied them.
    #[test]
    fn endpoints_and_changes_are_small() {
        assert_eq!((size_of::<Endpoint>(), size_of::<Change>()), (48, 96));
    }
}
