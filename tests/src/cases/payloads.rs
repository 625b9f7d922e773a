//! Payloads that are larger than a packet.

use anyhow::{Context, Result, ensure};

use super::run::answers;
use crate::testbed::manifests::Via;
use crate::testbed::{Backend, Family, Outcome, Request, Testbed, Transport, client};

const BODY_BYTES: usize = 4_000_000;
/// The size of a datagram that needs 14 fragments on links with an MTU of 1,500 bytes.
const DATAGRAM_BYTES: usize = 20_000;

/// Large HTTP bodies and fragmented datagrams arrive complete, over several kinds of addresses.
pub fn large_payloads(bed: &Testbed) -> Result<()> {
    let ways = [
        ("a3", Via::ClusterIp),
        ("node-a", Via::ClusterIp),
        ("outside-1", Via::NodePort("node-b")),
        ("outside-1", Via::LoadBalancerIp),
    ];
    for family in Family::BOTH {
        for (from, via) in ways {
            let context = || format!("from {from} by {via:?} over {family}");
            let client = bed.machines().machine(from)?;
            client::exchange_large_bodies(client, bed.address("web", via, family, "http")?, BODY_BYTES)
                .with_context(context)?;
            let request = Request::new(Transport::Udp, bed.address("web", via, family, "udp")?);
            let request = Request { datagram_bytes: DATAGRAM_BYTES, ..request };
            if bed.backend() == Backend::Ipvs && from == "node-a" {
                // IPVS translates the node's own packets after the kernel has chosen the route. The
                // sender therefore does not fragment for the MTU of the final path, and sending a
                // large datagram fails. After this failure, IPv4 knows the path MTU, so a later
                // request may succeed. IPv6 stores no path MTU for local addresses.
                let outcome = client::ask(client, &request)?;
                ensure!(matches!(outcome, Outcome::Broken(_) | Outcome::Answered(_)), "{outcome}");
                continue;
            }
            answers(client::ask_many(client, &request, 8)?).with_context(context)?;
        }
    }
    Ok(())
}
