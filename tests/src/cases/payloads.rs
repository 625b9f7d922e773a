//! More data than fits a packet.

use anyhow::{Context, Result, ensure};

use super::run::answers;
use crate::testbed::manifests::Via;
use crate::testbed::{Backend, Family, Outcome, Request, Testbed, Transport, client};

const BODY_BYTES: usize = 4_000_000;
/// Fourteen fragments on links of 1,500 bytes.
const DATAGRAM_BYTES: usize = 20_000;

/// Large bodies over HTTP and fragmented datagrams pass whole, by every kind of address.
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
                // IPVS translates what the node itself sends behind the kernel's choice of a path,
                // so that the sender fragments for none, and what does not fit fails. IPv4 learns
                // from that, IPv6 keeps no such knowledge of local addresses.
                let outcome = client::ask(client, &request)?;
                ensure!(matches!(outcome, Outcome::Broken(_) | Outcome::Answered(_)), "{outcome}");
                continue;
            }
            answers(client::ask_many(client, &request, 8)?).with_context(context)?;
        }
    }
    Ok(())
}
