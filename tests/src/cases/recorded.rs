//! Rules for the Service `steady` on node-a as kube-proxy writes them, for tests without a real
//! kube-proxy.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use headgate_core::iptables::names::{ChainKind, ChainName};
use headgate_core::iptables::{RulesTable, beside_ipvs};
use headgate_core::ipvs::{Set, SetKind};

use crate::bench::kube_proxy_nft_shape;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::NAMESPACE;
use crate::testbed::manifests::Via::{ClusterIp, NodePort};
use crate::testbed::{Family, Testbed, plan};

/// What the rules of one family contain.
struct Steady {
    to: SocketAddr,
    node_port: SocketAddr,
    endpoints: Vec<SocketAddr>,
    /// The range of pods.
    pods: &'static str,
}

impl Steady {
    fn of(bed: &Testbed, family: Family) -> Result<Self> {
        let mut endpoints = Vec::new();
        for server in ["a1", "b1"] {
            let address = plan::address(server).context("the plan has no address")?.of(family);
            endpoints.push(SocketAddr::new(address, plan::LINE_PORT));
        }
        let pods = plan::CLUSTER_CIDR.split(',').find(|range| range.contains("::") == (family == Family::V6));
        Ok(Self {
            to: bed.address("steady", ClusterIp, family, "tcp")?,
            node_port: bed.address("steady", NodePort("node-a"), family, "tcp")?,
            endpoints,
            pods: pods.context("the cluster has no range of pods")?,
        })
    }
}

/// Loads rules of kube-proxy's iptables shape for the Service `steady` on node-a. Like kube-proxy,
/// it replaces the rules of chains that exist, and deletes other chains of Services.
pub(super) fn load_iptables(bed: &Testbed, variant: Variant) -> Result<()> {
    // The name of the port, and its protocol.
    let text = format!("{NAMESPACE}/steady:tcptcp");
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    for family in Family::BOTH {
        let Steady { to, node_port, endpoints, pods } = Steady::of(bed, family)?;
        let of_port = |kind| ChainName::of(kind, &text);
        let [service, external] = [ChainKind::ClusterPolicy, ChainKind::External].map(of_port);
        let mut rules = String::from(SHARED_IPTABLES);
        let at = format!("-p tcp -m tcp --dport {}", to.port());
        // Writing to a String cannot fail.
        let _ = writeln!(rules, ":{service} - [0:0]\n:{external} - [0:0]");
        let _ = writeln!(rules, "-A KUBE-SERVICES -d {} {at} -j {service}", to.ip());
        let _ = writeln!(rules, "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS");
        let _ = writeln!(rules, "-A KUBE-NODEPORTS -p tcp -m tcp --dport {} -j {external}", node_port.port());
        let _ = writeln!(rules, "-A {external} -j KUBE-MARK-MASQ\n-A {external} -j {service}");
        let _ = writeln!(rules, "-A {service} ! -s {pods} -d {} {at} -j KUBE-MARK-MASQ", to.ip());
        for (endpoint, chance) in endpoints.iter().zip(["-m statistic --mode random --probability 0.5 ", ""]) {
            let chain = ChainName::of(ChainKind::Endpoint, &format!("{text}{endpoint}"));
            let _ = writeln!(rules, ":{chain} - [0:0]\n-A {service} {chance}-j {chain}");
            let _ = writeln!(rules, "-A {chain} -s {} -j KUBE-MARK-MASQ", endpoint.ip());
            let _ = writeln!(rules, "-A {chain} -p tcp -m tcp -j DNAT --to-destination {endpoint}");
        }
        let saved = iptables::save(node, variant, family, &lock)?;
        let mut deletions = String::new();
        for chain in saved.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next()) {
            if ChainName::parse(chain).is_some() && !rules.contains(&format!(":{chain} ")) {
                let _ = writeln!(rules, ":{chain} - [0:0]");
                let _ = writeln!(deletions, "-X {chain}");
            }
        }
        rules += &deletions;
        restore(bed, variant, family, &rules)?;
    }
    Ok(())
}

fn restore(bed: &Testbed, variant: Variant, family: Family, rules: &str) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let script = bed.machines().folder().join("recorded.rules");
    std::fs::write(&script, format!("{rules}COMMIT\n")).context("writing recorded rules")?;
    iptables::restore(node, variant, family, &lock, &script)
}

/// Creates the virtual servers, the sets and the device of kube-proxy's mode ipvs for the Service
/// `steady` on node-a, and its rules in the legacy variant. Like kube-proxy, it uses what exists,
/// and fails if a set with one of its names has other properties.
pub(super) fn load_ipvs(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let run = |program: &str, line: &str| node.tool(program, &line.split(' ').collect::<Vec<_>>());
    node.set_sysctls(&[("ipv4/vs/conntrack", "1")])?;
    if run("ip", "link show kube-ipvs0").is_err() {
        node.ip_batch("link add kube-ipvs0 type dummy\n")?;
    }
    let existing = run("ipvsadm", "-S -n")?;
    for family in Family::BOTH {
        let Steady { to, node_port, endpoints, pods } = Steady::of(bed, family)?;
        let of_model = headgate_core::Family::of(to.ip());
        let (of_sets, bits) = if family == Family::V4 { ("inet", 32) } else { ("inet6", 128) };
        node.ip_batch(&format!("addr replace {}/{bits} dev kube-ipvs0\n", to.ip()))?;
        let mut lines = String::new();
        for set in Set::ALL.into_iter().filter(|set| !Set::NOT_OF_KUBE_PROXY.contains(set)) {
            let properties = match set.kind() {
                SetKind::Port => "range 0-65535".to_owned(),
                _ => format!("family {of_sets} hashsize 1024 maxelem 65536"),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "create {} {} {properties}", set.name(of_model), set.kind().as_str());
        }
        let [services, node_ports] = [Set::ClusterIp, Set::NodePortTcp].map(|set| set.name(of_model));
        let _ = writeln!(lines, "add {services} {},tcp:{}\nadd {node_ports} {}", to.ip(), to.port(), node_port.port());
        let file = bed.machines().folder().join("recorded.sets");
        std::fs::write(&file, lines).context("writing recorded sets")?;
        run("ipset", &format!("-exist -file {} restore", file.display()))?;
        for server in [to, node_port] {
            let has_server = existing.contains(&format!("-A -t {server} "));
            run("ipvsadm", &format!("{} -t {server} -s rr", if has_server { "-E" } else { "-A" }))?;
            for endpoint in &endpoints {
                let has_endpoint = existing.contains(&format!("-a -t {server} -r {endpoint} "));
                let change = if has_endpoint { "-e" } else { "-a" };
                run("ipvsadm", &format!("{change} -t {server} -r {endpoint} -m -w 1"))?;
            }
        }
        let mut rules = String::from(SHARED_IPTABLES);
        let _ = writeln!(
            rules,
            ":KUBE-NODE-PORT - [0:0]\n:KUBE-LOAD-BALANCER - [0:0]\n\
             -A KUBE-SERVICES ! -s {pods} -m set --match-set {services} dst,dst -j KUBE-MARK-MASQ\n\
             -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\n\
             -A KUBE-SERVICES -m set --match-set {services} dst,dst -j ACCEPT\n\
             -A KUBE-NODE-PORT -p tcp -m set --match-set {node_ports} dst -j KUBE-MARK-MASQ\n\
             COMMIT\n*filter"
        );
        for chain in beside_ipvs::chains(RulesTable::Filter) {
            let _ = writeln!(rules, ":{chain} - [0:0]");
        }
        let _ = writeln!(rules, "-I INPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER");
        restore(bed, Variant::Legacy, family, &rules)?;
    }
    Ok(())
}

/// The chains that all Services share, and the jumps to them. Like kube-proxy, it empties chains
/// that exist.
const SHARED_IPTABLES: &str = "\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-I PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
";

/// Loads rules of kube-proxy's nftables shape for the Service `steady` on node-a.
pub(super) fn load_nftables(bed: &Testbed) -> Result<()> {
    let mut rules = String::new();
    for family in Family::BOTH {
        let shared = kube_proxy_nft_shape::SHARED.to_owned();
        let (name, shared) = match family {
            Family::V4 => ("ip", shared),
            Family::V6 => {
                let shared = shared.replace(" ip kube-proxy", " ip6 kube-proxy").replace("ipv4_addr", "ipv6_addr");
                ("ip6", shared.replace("ip daddr", "ip6 daddr").replace("10.96.0.0/12", "fd00:10:96::/112"))
            }
        };
        rules.push_str(&shared);
        let Steady { to, node_port, endpoints, pods } = Steady::of(bed, family)?;
        let table = format!("{name} kube-proxy");
        // Writing to a String cannot fail.
        let _ = writeln!(rules, "add chain {table} service-steady\nadd chain {table} external-steady");
        for (number, endpoint) in endpoints.iter().enumerate() {
            let _ = writeln!(rules, "add chain {table} endpoint-{number}");
            let _ = writeln!(
                rules,
                "add rule {table} endpoint-{number} {name} saddr {} jump mark-for-masquerade",
                endpoint.ip()
            );
            let _ = writeln!(rules, "add rule {table} endpoint-{number} meta l4proto tcp dnat to {endpoint}");
        }
        let choice = "numgen random mod 2 vmap { 0 : goto endpoint-0 , 1 : goto endpoint-1 }";
        let at = |address: IpAddr, port: u16| format!("{address} . tcp . {port}");
        let _ = writeln!(rules, "add rule {table} service-steady {name} saddr != {pods} jump mark-for-masquerade");
        let _ = writeln!(rules, "add rule {table} service-steady {choice}");
        let _ = writeln!(rules, "add rule {table} external-steady jump mark-for-masquerade");
        let _ = writeln!(rules, "add rule {table} external-steady {choice}");
        let _ = writeln!(rules, "add element {table} cluster-ips {{ {} }}", to.ip());
        let _ =
            writeln!(rules, "add element {table} service-ips {{ {} : goto service-steady }}", at(to.ip(), to.port()));
        let _ = writeln!(rules, "add element {table} nodeport-ips {{ {} }}", node_port.ip());
        let _ = writeln!(
            rules,
            "add element {table} service-nodeports {{ tcp . {} : goto external-steady }}",
            node_port.port()
        );
    }
    bed.machines().machine("node-a")?.run(|| kube_proxy_nft_shape::load(&rules))
}
