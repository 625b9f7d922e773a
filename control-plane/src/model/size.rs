//! Bounds of the size of one resource. A resource is never divided between messages. A resource
//! that exceeds the size limit of messages would end the stream of every agent each time the
//! resource is sent.

use std::net::IpAddr;

use headgate_core::{Endpoint, EndpointPort, Family, Service, ServiceKey};
use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES};

use super::problems::Findings;

/// How much one Service may ask of every node: the most endpoint ports of its EndpointSlices, as a
/// fifth of this number, the most [frontends](Service::frontend_count), and, as its fourfold, the
/// most destinations in one family: endpoints of [virtual servers](Service::virtual_servers). A
/// node needs about five rules or elements of maps for a frontend, one or two for an endpoint port,
/// and in mode IPVS one for a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceBudget {
    pub(super) endpoint_ports: usize,
    pub(super) frontends: usize,
}

impl ServiceBudget {
    /// The default: 50,000 endpoint ports and 10,000 frontends.
    pub const DEFAULT: u32 = 50_000;

    /// The largest budget. Agents accept what the control plane sends: this is their limit of
    /// [endpoint ports](headgate_core::size::MAX_PORT_ENDPOINTS), four times this is that of
    /// [destinations](headgate_core::size::MAX_DESTINATIONS), and a fifth is below
    /// [`Service::MAX_FRONTENDS`].
    pub const MAX: u32 = 65_536;

    /// Creates a budget from the number of endpoint ports.
    #[must_use]
    pub fn new(endpoint_ports: u32) -> Self {
        Self { endpoint_ports: endpoint_ports as usize, frontends: endpoint_ports as usize / 5 }
    }

    /// The most destinations. The ClusterIP and the NodePort of each port take at most half of them.
    pub(super) fn destinations(self) -> usize {
        self.endpoint_ports * 4
    }
}

impl Default for ServiceBudget {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

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

/// Brings a Service into its budget of frontends. The ClusterIPs and NodePorts come first, then as
/// many addresses of load balancers and externalIPs as there is room for, in their order.
///
/// # Errors
/// A sentence that ends in the remedy, if there is no room for the ClusterIPs and NodePorts.
pub(super) fn fit_frontends(
    service: &mut Service,
    budget: ServiceBudget,
    findings: &mut Findings,
) -> Result<(), String> {
    let total = service.frontend_count();
    let ports = service.ports.len();
    let load_balancer = std::mem::take(&mut service.load_balancer_ips);
    let external = std::mem::take(&mut service.external_ips);
    let Some(mut room) = budget.frontends.checked_sub(service.frontend_count()) else {
        return Err(format!(
            "{ports} ports make {} frontends of the ClusterIPs and NodePorts, and a Service may have {}: give fewer ports, divide the \
             Service, or raise --service-budget of the control plane",
            service.frontend_count(),
            budget.frontends
        ));
    };
    let ranges = Family::BOTH.map(|family| service.source_range_count(family));
    for (field, mut addresses, ranges, served) in [
        ("status.loadBalancer.ingress", load_balancer, ranges, &mut service.load_balancer_ips),
        ("spec.externalIPs", external, [1; 2], &mut service.external_ips),
    ] {
        let fits = |address: &&IpAddr| {
            let rest = room.checked_sub(ports * ranges[Family::of(**address) as usize]);
            room = rest.unwrap_or(room);
            rest.is_some()
        };
        let fitting = addresses.iter().take_while(fits).count();
        if fitting < addresses.len() {
            let message = format!(
                "the Service has {total} frontends (each address with each port, and for load balancers with each source range of its family), and may \
                 have {}: give fewer addresses, ports or ranges, or raise --service-budget of the control plane; the first {fitting} of \
                 {} addresses here are used",
                budget.frontends,
                addresses.len()
            );
            findings.part(field, message, "the others are left out");
        }
        addresses.truncate(fitting);
        *served = addresses;
    }
    Ok(())
}

/// A Service in use, with the external addresses for which its endpoints leave room.
#[derive(Debug, Clone)]
pub(super) struct Fitted {
    pub(super) service: Service,
    /// The addresses of load balancers and the externalIPs, if some are left out.
    all: Option<Box<[Vec<IpAddr>; 2]>>,
}

impl From<Service> for Fitted {
    fn from(service: Service) -> Self {
        Self { service, all: None }
    }
}

/// Only what is served counts.
impl PartialEq for Fitted {
    fn eq(&self, other: &Self) -> bool {
        self.service == other.service
    }
}

impl Fitted {
    /// Brings the Service into its budget of destinations with so many endpoints of each family.
    /// Says what is left out, in a sentence.
    pub(super) fn fit(&mut self, endpoints: [usize; 2], budget: ServiceBudget) -> Option<String> {
        let Service { load_balancer_ips, external_ips, .. } = &mut self.service;
        let served = [load_balancer_ips, external_ips].map(std::mem::take);
        let written = self.all.take().map_or(served, |all| *all);
        let most = endpoints.map(|count| budget.destinations() / count.max(1));
        let ports = self.service.ports.len();
        let mut room = Family::BOTH
            .map(|family| most[family as usize].saturating_sub(self.service.virtual_servers(family)) / ports);
        let mut fits = |address: &&IpAddr| {
            let room = &mut room[Family::of(**address) as usize];
            let rest = room.checked_sub(1);
            *room = rest.unwrap_or_default();
            rest.is_some()
        };
        let [load_balancers, external] = written.each_ref().map(|all| all.iter().filter(&mut fits).copied().collect());
        let left_out = written.iter().map(Vec::len).sum::<usize>() - Vec::len(&load_balancers) - Vec::len(&external);
        (self.service.load_balancer_ips, self.service.external_ips) = (load_balancers, external);
        self.all = (left_out > 0).then(|| Box::new(written));
        (left_out > 0).then(|| format!(
            "the last {left_out} of the externalIPs and addresses of load balancers are left out: with {} IPv4 and {} IPv6 endpoints the \
             Service may have {} and {} addresses with ports and NodePorts, {} endpoints of them in a family: give fewer addresses, ports or \
             endpoints, or raise --service-budget of the control plane",
            endpoints[0], endpoints[1], most[0], most[1], budget.destinations()
        ))
    }
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
