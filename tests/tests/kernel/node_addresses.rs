//! The addresses of the node in mode nftables, with and without the expression `fib`.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, NodeFacts, Protocol, Service, ServiceKey, ServicePort, State,
    view::MasqueradeConfig,
};
use headgate_node_agent::{
    dataplane::{
        Finding, FixedState, NodeDataplane,
        nftables::{Feature, NftablesDataplane, NftablesOptions},
    },
    interfaces,
    node_inputs::NodeInputs,
};
use headgate_tests::testbed::{
    Backend, Family, Manifests, Namespace, Outcome, Request, Testbed, Transport, plan, process::output,
};

const NODE_PORT: u16 = 30_100;

/// An address of a testbed's machine.
fn of(machine: &str, family: Family) -> Result<IpAddr> {
    Ok(plan::address(machine).with_context(|| format!("{machine} has no address"))?.of(family))
}

/// The dataplane of node-a, with a NodePort whose endpoint is the pod a1.
struct World {
    bed: Testbed,
    dataplane: NftablesDataplane,
}

impl World {
    fn new(unused_features: Vec<Feature>) -> Result<Self> {
        let bed = Testbed::machines_only(Backend::Nftables, Manifests::default())?;
        let config = NftablesOptions {
            families: headgate_core::Family::BOTH.into(),
            masquerade: MasqueradeConfig::default(),
            localhost_node_ports: true,
            conntrack_tcp_be_liberal: false,
            owns_tables: false,
            replies_to_ping: false,
            unused_features,
            counts_services: false,
            has_proxy: false,
        };
        let mut state = State::default();
        for (family, cluster_ip) in [(Family::V4, "10.96.0.1"), (Family::V6, "fd00:10:96::1")] {
            let key = ServiceKey::new("ns", cluster_ip);
            let port = ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port: NODE_PORT };
            let ports = [EndpointPort::new("web", Protocol::Tcp, plan::LINE_PORT)];
            let service = Service::new(key.clone(), vec![cluster_ip.parse()?], vec![port]);
            for change in [Change::from(service), Change::Endpoint(key, Endpoint::new(of("a1", family)?, ports.into()))]
            {
                state.apply(change, &mut Dirty::default());
            }
        }
        let dataplane = bed.machines().machine("node-a")?.run(|| {
            let mut dataplane = NftablesDataplane::new(&config)?;
            dataplane.configure(&inputs()?);
            dataplane.sync_full(&FixedState(&state, &NodeFacts::named("node-a")))?;
            Ok(dataplane)
        })?;
        Ok(Self { bed, dataplane })
    }

    fn node(&self) -> Result<&Namespace> {
        self.bed.machines().machine("node-a")
    }

    /// Tells the dataplane the addresses of the interfaces, as the agent does after a change.
    fn follow_interfaces(&mut self) -> Result<()> {
        let Self { bed, dataplane } = self;
        bed.machines().machine("node-a")?.run(|| {
            ensure!(!dataplane.configure(&inputs()?), "another address causes a full sync");
            let due = dataplane.maintain_at().context("the addresses are not written")?;
            ensure!(due <= Instant::now(), "the addresses are written late");
            dataplane.maintain(due)?;
            ensure!(dataplane.maintain_at().is_none(), "the addresses are not written");
            ensure!(dataplane.check()? == Finding::Intact, "the table is not intact");
            Ok(())
        })
    }

    /// The client's address that a1 saw, or `None` if the port was refused.
    fn seen(&self, from: &str, to: IpAddr) -> Result<Option<IpAddr>> {
        let to = SocketAddr::new(to, NODE_PORT);
        match self.bed.machines().ask(from, &Request::new(Transport::Tcp, to))? {
            Outcome::Answered(answer) if answer.server == "a1" => Ok(Some(answer.source.ip())),
            Outcome::Refused => Ok(None),
            other => bail!("{from} asks {to}: {other}"),
        }
    }
}

fn inputs() -> Result<NodeInputs> {
    Ok(NodeInputs { interfaces: interfaces::list()?, ..NodeInputs::default() })
}

fn node_ports_answer_on_addresses_of_the_node(unused_features: Vec<Feature>) -> Result<()> {
    let has_fib = unused_features.is_empty();
    let mut world = World::new(unused_features)?;
    let rules = world.node()?.run(|| Ok(output("nft", &["list", "ruleset"])))?;
    ensure!(rules.contains("fib daddr type local") == has_fib, "{rules}");
    let further: [(Family, IpAddr, &str); 2] = [
        (Family::V4, "192.0.2.21".parse()?, "24"),
        (Family::V6, "2001:db8:0:1::21".parse()?, "64 nodad preferred_lft 0"),
    ];
    for (family, address, length) in further {
        let own = of("node-a", family)?;
        ensure!(world.seen("outside-1", own)? == Some(own), "a client outside is not masqueraded");
        ensure!(world.seen("node-a", own)? == Some(own), "the node does not reach its own NodePort");
        if family == Family::V4 {
            for loopback in [[127, 0, 0, 1], [127, 0, 0, 5]] {
                ensure!(world.seen("node-a", loopback.into())? == Some(own), "NodePorts do not answer on {loopback:?}");
            }
        }
        world.node()?.ip_batch(&format!("addr add {address}/{length} dev eth0\n"))?;
        world.follow_interfaces()?;
        ensure!(world.seen("outside-1", address)? == Some(own), "{address} does not answer, or does not masquerade");
        world.node()?.ip_batch(&format!("addr del {address}/{} dev eth0\n", &length[..2]))?;
        world.follow_interfaces()?;
    }
    let sets = world.node()?.run(|| Ok(output("nft", &["list", "set", "ip", "headgate", "node-port-addresses"])))?;
    ensure!(sets.contains("192.0.2.11") && !sets.contains("192.0.2.21"), "{sets}");
    Ok(())
}

// rows of nftables: 45, 46
#[test]
fn node_ports_answer_on_addresses_of_the_node_with_fib() {
    node_ports_answer_on_addresses_of_the_node(Vec::new()).unwrap();
}

// rows of nftables: 45, 46
#[test]
fn node_ports_answer_on_addresses_of_the_node_without_fib() {
    node_ports_answer_on_addresses_of_the_node(vec![Feature::Fib]).unwrap();
}

/// Another program translates connections to its own address, whose port equals a NodePort.
// rows of nftables: 97
#[test]
fn a_connection_of_another_program_keeps_its_source() {
    let world = World::new(Vec::new()).unwrap();
    for (family, name, address) in [(Family::V4, "ip", "198.51.100.77"), (Family::V6, "ip6", "2001:db8:100::77")] {
        let target = SocketAddr::new(of("a1", family).unwrap(), plan::LINE_PORT);
        let commands = format!(
            "add table {name} other\n\
             add chain {name} other prerouting {{ type nat hook prerouting priority -90; }}\n\
             add rule {name} other prerouting {name} daddr {address} tcp dport {NODE_PORT} dnat to {target}\n"
        );
        let script = world.bed.machines().folder().join("other.nft");
        std::fs::write(&script, commands).unwrap();
        world.node().unwrap().run(|| Ok(output("nft", &["-f", script.to_str().unwrap()]))).unwrap();
        let seen = world.seen("outside-1", address.parse().unwrap()).unwrap();
        assert_eq!(seen, Some(of("outside-1", family).unwrap()));
    }
}
