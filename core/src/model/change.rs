//! Changes.

use std::net::IpAddr;

use compact_str::CompactString;

use super::{Endpoint, Service, ServiceCidr, ServiceKey};

/// One step of the shared state: a resource at its new value, or a key that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A Service was added or changed.
    Service(Service),
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
