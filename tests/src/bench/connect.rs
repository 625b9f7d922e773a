//! `iptables-connect` and `nft-connect`: the time to open a TCP connection through the first and
//! through the last of 10,000 Services. The benches compare this time with a direct connection, and
//! with a ruleset of kube-proxy's shape. In the shape of iptables, the last Service matches after
//! 9,999 comparisons.

use std::{
    io::Read as _,
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use headgate_core::NodeFacts;
use headgate_node_agent::dataplane::{
    FixedState, NodeDataplane as _,
    iptables::{Config, IptablesDataplane, Variant},
};

use super::{
    iptables::restore,
    kube_proxy_nft_shape, kube_proxy_shape,
    nftables::Programmed,
    report::{Figure, median},
    workload,
};
use crate::testbed::netns::Namespace;

const ENDPOINTS: u32 = 10;
const CONNECTIONS: usize = 2_000;
/// The number of Services in the ruleset of kube-proxy's shape in the nft variant. With 10,000
/// Services, the nft variant does not load this ruleset within ten minutes.
const NFT_ANCHOR_SERVICES: u32 = 1_000;

/// Runs `nft-connect`.
///
/// # Errors
/// A namespace cannot be created, or a connection fails.
pub fn nftables(services: Option<u32>) -> Result<Vec<Figure>> {
    let anchor_services = services.unwrap_or(NFT_ANCHOR_SERVICES);
    let services = services.unwrap_or(10_000);
    let name = |what: &str, services: u32| format!("nft-connect/{what}/{services}x{ENDPOINTS}");
    // The tables stay when the connection that owns them closes.
    let load = || Programmed::new(workload::state(services, ENDPOINTS)).map(drop);
    let ours = in_namespace(services, load)?;
    let mut figures = Vec::new();
    for (what, us) in [("first", ours.first_us), ("last", ours.last_us)] {
        figures.push(Figure::against(name(what, services), us, "µs", "a direct connection", ours.direct_us));
    }
    let first = "the first Service";
    figures.push(Figure::against(name("last-of-first", services), ours.last_us, "µs", first, ours.first_us));
    let load = || kube_proxy_nft_shape::load(&kube_proxy_nft_shape::full(anchor_services, ENDPOINTS));
    let anchor = in_namespace(anchor_services, load)?;
    for (what, us) in [("kube-proxy-shape-first", anchor.first_us), ("kube-proxy-shape-last", anchor.last_us)] {
        figures.push(Figure::against(name(what, anchor_services), us, "µs", "a direct connection", anchor.direct_us));
    }
    Ok(figures)
}

/// Runs `iptables-connect` in both variants.
///
/// # Errors
/// A namespace cannot be created, or a connection fails.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for variant in [Variant::Legacy, Variant::Nft] {
        let services = services.unwrap_or(10_000);
        let label = if variant == Variant::Legacy { "legacy" } else { "nft" };
        let ours = in_namespace(services, || load_ours(variant, services))?;
        let name = |what: &str| format!("iptables-connect/{label}/{what}/{services}x{ENDPOINTS}");
        figures.push(Figure::against(name("first"), ours.first_us, "µs", "a direct connection", ours.direct_us));
        figures.push(Figure::against(name("last"), ours.last_us, "µs", "the first Service", ours.first_us));
        let anchor_services = if variant == Variant::Nft { services.min(NFT_ANCHOR_SERVICES) } else { services };
        let anchor = in_namespace(anchor_services, || load_anchor(variant, anchor_services))?;
        let name = format!("iptables-connect/{label}/kube-proxy-shape-last/{anchor_services}x{ENDPOINTS}");
        figures.push(Figure::against(name, anchor.last_us, "µs", "the first Service of this shape", anchor.first_us));
    }
    Ok(figures)
}

struct Costs {
    direct_us: f64,
    first_us: f64,
    last_us: f64,
}

/// Measures connections in a new namespace. The namespace holds the addresses of the first and the
/// last Service's endpoints, and runs a server on them.
fn in_namespace(services: u32, load: impl FnOnce() -> Result<()> + Send) -> Result<Costs> {
    let namespace = Namespace::create(format!("hg{}-bench-connect", std::process::id()))?;
    let mut commands = String::from("link set lo up\nroute add 10.96.0.0/12 dev lo\n");
    for service in [0, services - 1] {
        for endpoint in 0..ENDPOINTS {
            commands.push_str(&format!("addr add {}/32 dev lo\n", workload::endpoint_ip(service, endpoint)));
        }
    }
    namespace.ip_batch(&commands)?;
    namespace.run(|| {
        load()?;
        let listener = TcpListener::bind("0.0.0.0:8080").context("listening")?;
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let direct = SocketAddr::new(workload::endpoint_ip(0, 0), 8080);
        let through = |service: u32| SocketAddr::new(workload::cluster_ip(service), 80);
        // The targets are measured alternately, so that other load affects all of them equally.
        let targets = [direct, through(0), through(services - 1)];
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..CONNECTIONS {
            for (target, times) in targets.iter().zip(&mut times) {
                times.push(connect_us(*target)?);
            }
        }
        let [direct_us, first_us, last_us] = times.map(median);
        Ok(Costs { direct_us, first_us, last_us })
    })
}

fn connect_us(target: SocketAddr) -> Result<f64> {
    let start = Instant::now();
    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))
        .with_context(|| format!("connecting to {target}"))?;
    let took = start.elapsed().as_secs_f64() * 1e6;
    // The server closes the connection at once. Waiting for this close keeps the server's backlog
    // empty.
    let _ = stream.read(&mut [0]);
    Ok(took)
}

fn load_ours(variant: Variant, services: u32) -> Result<()> {
    let mut backend = IptablesDataplane::new(Config { variant, ..Config::default() })?;
    backend.sync_full(&FixedState(&workload::state(services, ENDPOINTS), &NodeFacts::named("node-000")))?;
    Ok(())
}

fn load_anchor(variant: Variant, services: u32) -> Result<()> {
    restore(variant, &kube_proxy_shape::full(services, ENDPOINTS))?;
    restore(variant, kube_proxy_shape::JUMPS)
}
