//! Bounds on one resource. A message carries at least one resource whole, so one that is larger
//! than a message may be would end every agent's stream, again and again.

use headgate_core::{Endpoint, EndpointPort, Service, ServiceKey};
use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES};

/// Largest resource on the wire. A message is cut before a resource at a quarter of its limit, so
/// half of it is left with room for the rest.
pub(super) const MAX_RESOURCE_BYTES: usize = MAX_SERVER_MESSAGE_BYTES / 2;

/// Hints of one endpoint, of zones and of nodes each. The API allows 8.
pub(super) const MAX_HINTS: usize = 64;

/// Ranges of a ServiceCIDR, and ranges and addresses of a Node. The API allows 2 of each kind of
/// range.
pub(super) const MAX_LISTED: usize = 256;

/// Bytes of a port on the wire besides its name.
const PORT_BYTES: usize = 12;

/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn check_service(service: &Service) -> Result<(), String> {
    let mut builder = ChangesBuilder::default();
    builder.service(service);
    let bytes = builder.estimated_bytes();
    if bytes <= MAX_RESOURCE_BYTES {
        return Ok(());
    }
    Err(format!(
        "the Service takes {bytes} bytes on the wire, of which there may be {MAX_RESOURCE_BYTES}: give fewer ports, externalIPs, \
         load balancer addresses or source ranges"
    ))
}

/// Whether an endpoint of several slices, with all that its ports carry, is small enough.
pub(super) fn may_be_sent(endpoint: &Endpoint) -> bool {
    let mut builder = ChangesBuilder::default();
    builder.endpoint(&ServiceKey::new("", ""), endpoint, 0);
    builder.estimated_bytes() <= MAX_RESOURCE_BYTES
}

/// Whether a slice may give its endpoints these ports.
pub(super) fn may_have(ports: &[EndpointPort]) -> bool {
    ports.iter().map(|port| port.name.len() + PORT_BYTES).sum::<usize>() <= MAX_RESOURCE_BYTES
}
