//! Bounds of the size of one resource. A resource is never divided between messages. A resource
//! that exceeds the size limit of messages would end the stream of every agent each time the
//! resource is sent.

use headgate_core::{Endpoint, EndpointPort, Service, ServiceKey};
use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES};

use super::problems::Findings;

/// Upper bound of one resource on the wire, in bytes. When a message has reached a quarter of the
/// message limit, no further resource is added to the message. So a resource of half the limit
/// always fits.
pub(super) const MAX_RESOURCE_BYTES: usize = MAX_SERVER_MESSAGE_BYTES / 2;

/// Upper bound of the number of zone hints of one endpoint, and of the number of its node hints.
/// The API allows 8 hints of each kind.
pub(super) const MAX_HINTS: usize = 64;

/// Upper bound of the number of ranges of a ServiceCIDR or a Node, and of the number of addresses
/// of a Node. The API allows 2 ranges.
pub(super) const MAX_LISTED: usize = 256;

/// Bytes of a port on the wire, without its name.
const PORT_BYTES: usize = 12;

/// Gives a Service at most `most` frontends. The ClusterIPs and NodePorts come first, then as
/// many addresses of load balancers and externalIPs as there is room for, in their order.
///
/// # Errors
/// A sentence that ends in the remedy, if there is no room for the ClusterIPs and NodePorts.
pub(super) fn fit_frontends(service: &mut Service, most: usize, findings: &mut Findings) -> Result<(), String> {
    let total = service.frontend_count();
    let ports = service.ports.len();
    let load_balancer = std::mem::take(&mut service.load_balancer_ips);
    let external = std::mem::take(&mut service.external_ips);
    let Some(mut room) = most.checked_sub(service.frontend_count()) else {
        return Err(format!(
            "{ports} ports make {} frontends of the ClusterIPs and NodePorts, and a Service may have {most}: give fewer ports, divide the \
             Service, or raise --service-budget of the control plane",
            service.frontend_count()
        ));
    };
    let of_load_balancer = ports * service.load_balancer_source_ranges.len().max(1);
    for (field, mut addresses, cost, served) in [
        ("status.loadBalancer.ingress", load_balancer, of_load_balancer, &mut service.load_balancer_ips),
        ("spec.externalIPs", external, ports, &mut service.external_ips),
    ] {
        let fitting = addresses.len().min(room / cost);
        if fitting < addresses.len() {
            let message = format!(
                "the Service has {total} frontends (each address with each port, and for load balancers with each source range), and may \
                 have {most}: give fewer addresses, ports or ranges, or raise --service-budget of the control plane; the first {fitting} of \
                 {} addresses here are used",
                addresses.len()
            );
            findings.part(field, message, "the others are left out");
        }
        addresses.truncate(fitting);
        room -= fitting * cost;
        *served = addresses;
    }
    Ok(())
}

/// Checks that a Service is small enough.
///
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
        "the Service takes {bytes} bytes on the wire, and at most {MAX_RESOURCE_BYTES} are allowed: give fewer ports, externalIPs, \
         load balancer addresses or source ranges"
    ))
}

/// Whether an endpoint that several slices define is small enough to be sent with all its ports.
pub(super) fn may_be_sent(endpoint: &Endpoint) -> bool {
    let mut builder = ChangesBuilder::default();
    builder.endpoint(&ServiceKey::new("", ""), endpoint, 0);
    builder.estimated_bytes() <= MAX_RESOURCE_BYTES
}

/// Whether a port list is small enough for an endpoint.
pub(super) fn may_have(ports: &[EndpointPort]) -> bool {
    ports.iter().map(|port| port.name.len() + PORT_BYTES).sum::<usize>() <= MAX_RESOURCE_BYTES
}
