//! A ruleset of kube-proxy's nftables shape for the workload: a verdict map from frontends to
//! chains, one chain for each Service with an anonymous map, and one chain for each endpoint. `nft`
//! loads the ruleset. Before each partial sync, kube-proxy lists its chains, sets and maps.

use std::{
    fmt::Write as _,
    io::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::workload;

/// The tables, the sets and the chains that all Services share, and one rule or element of each
/// Service.
#[must_use]
pub fn full(services: u32, endpoints: u32) -> String {
    let mut script = String::from(SHARED);
    for service in 0..services {
        chains(&mut script, service, endpoints);
    }
    for service in 0..services {
        let (ip, chain) = (workload::cluster_ip(service), service_chain(service));
        // Writing to a String cannot fail.
        let _ = writeln!(script, "add element ip kube-proxy cluster-ips {{ {ip} }}");
        let _ = writeln!(script, "add element ip kube-proxy service-ips {{ {ip} . tcp . 80 : goto {chain} }}");
    }
    script
}

/// A script that changes the endpoints of these Services to the first `endpoints` endpoints.
#[must_use]
pub fn change(services: impl IntoIterator<Item = u32>, endpoints: u32) -> String {
    let mut script = String::new();
    for service in services {
        chains(&mut script, service, endpoints);
    }
    script
}

fn chains(script: &mut String, service: u32, endpoints: u32) {
    let (ip, chain) = (workload::cluster_ip(service), service_chain(service));
    let mut targets = Vec::new();
    for number in 0..endpoints {
        let (address, target) = (workload::endpoint_ip(service, number), endpoint_chain(service, number));
        let _ = writeln!(script, "add chain ip kube-proxy {target}\nflush chain ip kube-proxy {target}");
        let _ = writeln!(script, "add rule ip kube-proxy {target} ip saddr {address} jump mark-for-masquerade");
        let _ = writeln!(script, "add rule ip kube-proxy {target} meta l4proto tcp dnat to {address}:8080");
        targets.push(format!("{number} : goto {target}"));
    }
    let _ = writeln!(script, "add chain ip kube-proxy {chain}\nflush chain ip kube-proxy {chain}");
    let _ = writeln!(
        script,
        "add rule ip kube-proxy {chain} ip daddr {ip} tcp dport 80 ip saddr != 11.0.0.0/8 jump mark-for-masquerade"
    );
    let targets = targets.join(" , ");
    let _ = writeln!(script, "add rule ip kube-proxy {chain} numgen random mod {endpoints} vmap {{ {targets} }}");
}

fn service_chain(service: u32) -> String {
    format!("service-ABCDEFGH-{}/tcp/http", workload::key(service))
}

fn endpoint_chain(service: u32, number: u32) -> String {
    let address = workload::endpoint_ip(service, number);
    format!("endpoint-ABCDEFGH-{}/tcp/http__{address}/8080", workload::key(service))
}

/// Lists what kube-proxy lists before each sync: the names of all chains, and the elements of its
/// sets and maps.
///
/// # Errors
/// `nft` cannot be started, or it fails.
pub fn list() -> Result<()> {
    nft(&["--json", "list", "chains", "ip"], "")?;
    nft(&["--json", "list", "set", "ip", "kube-proxy", "cluster-ips"], "")?;
    for map in ["service-ips", "service-nodeports", "no-endpoint-services", "no-endpoint-nodeports", "firewall-ips"] {
        nft(&["--json", "list", "map", "ip", "kube-proxy", map], "")?;
    }
    Ok(())
}

/// Loads a script with `nft -f`.
///
/// # Errors
/// `nft` cannot be started, or it fails.
pub fn load(script: &str) -> Result<()> {
    nft(&["-f", "-"], script)
}

fn nft(arguments: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("starting nft (package nftables; `make setup` installs it)")?;
    child.stdin.take().context("no pipe")?.write_all(input.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "nft {}: {status}", arguments.join(" "));
    Ok(())
}

/// The commands that create the table of IPv4, and everything in it that all Services share.
pub const SHARED: &str = "\
add table ip kube-proxy
add set ip kube-proxy cluster-ips { type ipv4_addr ; }
add set ip kube-proxy nodeport-ips { type ipv4_addr ; }
add map ip kube-proxy no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict ; }
add map ip kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; }
add map ip kube-proxy firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }
add map ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; }
add chain ip kube-proxy filter-prerouting { type filter hook prerouting priority -110 ; }
add chain ip kube-proxy filter-input { type filter hook input priority -110 ; }
add chain ip kube-proxy filter-forward { type filter hook forward priority -110 ; }
add chain ip kube-proxy filter-output { type filter hook output priority -110 ; }
add chain ip kube-proxy filter-output-post-dnat { type filter hook output priority -90 ; }
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain ip kube-proxy cluster-ips-check
add chain ip kube-proxy firewall-check
add chain ip kube-proxy mark-for-masquerade
add chain ip kube-proxy masquerading
add chain ip kube-proxy nodeport-endpoints-check
add chain ip kube-proxy service-endpoints-check
add chain ip kube-proxy services
add rule ip kube-proxy filter-prerouting ct state new jump firewall-check
add rule ip kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule ip kube-proxy filter-input ct state new jump service-endpoints-check
add rule ip kube-proxy filter-forward ct state new jump service-endpoints-check
add rule ip kube-proxy filter-forward ct state new jump cluster-ips-check
add rule ip kube-proxy filter-output ct state new jump service-endpoints-check
add rule ip kube-proxy filter-output ct state new jump firewall-check
add rule ip kube-proxy filter-output-post-dnat ct state new jump cluster-ips-check
add rule ip kube-proxy nat-prerouting jump services
add rule ip kube-proxy nat-output jump services
add rule ip kube-proxy nat-postrouting jump masquerading
add rule ip kube-proxy cluster-ips-check ip daddr @cluster-ips reject
add rule ip kube-proxy cluster-ips-check ip daddr { 10.96.0.0/12 } drop
add rule ip kube-proxy firewall-check ip daddr . meta l4proto . th dport vmap @firewall-ips
add rule ip kube-proxy mark-for-masquerade mark set mark or 0x4000
add rule ip kube-proxy masquerading mark and 0x4000 == 0 return
add rule ip kube-proxy masquerading mark set mark xor 0x4000
add rule ip kube-proxy masquerading masquerade fully-random
add rule ip kube-proxy nodeport-endpoints-check ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
add rule ip kube-proxy service-endpoints-check ip daddr . meta l4proto . th dport vmap @no-endpoint-services
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips
add rule ip kube-proxy services ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
";
