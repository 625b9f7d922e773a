//! Renders one rule in the form in which `iptables-save` prints it: addresses, interfaces,
//! protocol, matches in the order given, target.

use std::{
    fmt::{Display, Write as _},
    net::IpAddr,
};

use super::names::gate_set;
use crate::{
    behaviours::view::{LocalDetector, MasqueradeConfig},
    dataplane::ipsets::Set,
    model::{Family, Protocol},
};

/// A rule that is being appended to a text. Writing to a `String` cannot fail, so results of
/// `write!` are ignored.
#[derive(Debug)]
pub(in crate::dataplane) struct Line<'a> {
    text: &'a mut String,
}

impl<'a> Line<'a> {
    /// Begins a rule of a chain.
    pub(in crate::dataplane) fn append(text: &'a mut String, chain: impl Display) -> Self {
        let _ = write!(text, "-A {chain}");
        Self { text }
    }

    /// Begins a rule without the name of its chain. Dispatch lines need this function: the chain
    /// may be a group that is not known yet.
    pub(in crate::dataplane) fn bare(text: &'a mut String) -> Self {
        Self { text }
    }

    pub(in crate::dataplane) fn add(self, part: impl Display) -> Self {
        let _ = write!(self.text, " {part}");
        self
    }

    pub(in crate::dataplane) fn source(self, net: impl Display) -> Self {
        self.add(format_args!("-s {net}"))
    }

    pub(in crate::dataplane) fn source_host(self, address: IpAddr) -> Self {
        self.source(host(address))
    }

    pub(in crate::dataplane) fn destination_host(self, address: IpAddr) -> Self {
        self.add(format_args!("-d {}", host(address)))
    }

    /// Matches packets that the detector recognizes as traffic from local pods. If `is_local` is
    /// false, matches all other packets instead.
    pub(in crate::dataplane) fn local(self, detector: &LocalDetector, is_local: bool) -> Self {
        let not = if is_local { "" } else { "! " };
        match detector {
            LocalDetector::Cidr(cidr) => self.add(format_args!("{not}-s {cidr}")),
            LocalDetector::BridgeInterface(name) => self.add(format_args!("{not}-i {name}")),
            LocalDetector::InterfaceNamePrefix(prefix) => self.add(format_args!("{not}-i {prefix}+")),
        }
    }

    /// Matches packets that are masqueraded if their destination is a ClusterIP. Call this function
    /// only if the configuration [covers ClusterIPs](MasqueradeConfig::covers_cluster_ips).
    pub(in crate::dataplane) fn masqueraded_to_cluster_ips(self, config: &MasqueradeConfig, family: Family) -> Self {
        match config.detector(family) {
            Some(detector) if !config.all => self.local(detector, false),
            _ => self,
        }
    }

    pub(in crate::dataplane) fn protocol(self, protocol: Protocol) -> Self {
        self.add(format_args!("-p {}", protocol.as_lower_str()))
    }

    /// Adds a comment in quotes. `iptables-save` quotes every comment that Headgate writes, because
    /// each contains a character that requires quotes. The control plane has checked the names in
    /// comments. As a second safeguard against injected rules, this function removes all characters
    /// that could end the quotes or the line.
    pub(in crate::dataplane) fn comment(self, comment: impl Display) -> Self {
        let line = self.add("-m comment --comment \"");
        let start = line.text.len();
        let _ = write!(line.text, "{comment}");
        let is_unsafe = |c: char| c.is_control() || matches!(c, '"' | '\\');
        if line.text[start..].contains(is_unsafe) {
            let safe = line.text[start..].replace(is_unsafe, "");
            line.text.truncate(start);
            line.text.push_str(&safe);
        }
        line.text.push('"');
        line
    }

    pub(in crate::dataplane) fn port(self, protocol: Protocol, port: u16) -> Self {
        self.add(format_args!("-m {} --dport {port}", protocol.as_lower_str()))
    }

    pub(in crate::dataplane) fn source_is_node(self) -> Self {
        self.add("-m addrtype --src-type LOCAL")
    }

    pub(in crate::dataplane) fn destination_is_node(self) -> Self {
        self.add("-m addrtype --dst-type LOCAL")
    }

    pub(in crate::dataplane) fn recent(self, what: impl Display, list: impl Display, family: Family) -> Self {
        let mask = match family {
            Family::V4 => "255.255.255.255",
            Family::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        };
        self.add(format_args!("-m recent {what} --name {list} --mask {mask} --rsource"))
    }

    /// Matches packets whose addresses and ports are in a set. `flags` selects the addresses and
    /// ports to compare, for example `dst,dst`.
    pub(in crate::dataplane) fn in_set(self, set: Set, family: Family, flags: &str) -> Self {
        self.add(format_args!("-m set --match-set {} {flags}", set.name(family)))
    }

    /// Matches packets while the gate of mode userspace is closed.
    pub(in crate::dataplane) fn while_gate_is_closed(self, family: Family) -> Self {
        self.add(format_args!("-m set --match-set {} src", gate_set(family)))
    }

    /// Matches packets whose addresses and ports are not in a set.
    pub(in crate::dataplane) fn not_in_set(self, set: Set, family: Family, flags: &str) -> Self {
        self.add(format_args!("-m set ! --match-set {} {flags}", set.name(family)))
    }

    /// Matches packets at random, with probability `part / whole`. The kernel stores this
    /// probability in units of 2⁻³¹, and `iptables-save` prints eleven decimal places.
    pub(in crate::dataplane) fn part_of(self, part: u32, whole: u32) -> Self {
        const UNITS: f64 = 2_147_483_648.0;
        let units = (UNITS * f64::from(part) / f64::from(whole)).round();
        self.add(format_args!("-m statistic --mode random --probability {:.11}", units / UNITS))
    }

    /// Counts packets that match the previous conditions in an nfacct counter, which must exist.
    /// This condition always matches.
    pub(in crate::dataplane) fn counted_by(self, counter: &str) -> Self {
        self.add(format_args!("-m nfacct --nfacct-name {counter}"))
    }

    pub(in crate::dataplane) fn jump(self, target: impl Display) {
        self.add(format_args!("-j {target}")).end();
    }

    pub(in crate::dataplane) fn reject(self, family: Family) {
        self.jump(match family {
            Family::V4 => "REJECT --reject-with icmp-port-unreachable",
            Family::V6 => "REJECT --reject-with icmp6-port-unreachable",
        });
    }

    pub(in crate::dataplane) fn end(self) {
        self.text.push('\n');
    }
}

fn host(address: IpAddr) -> impl Display {
    struct Host(IpAddr);
    impl Display for Host {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{}/{}", self.0, Family::of(self.0).host_prefix_length())
        }
    }
    Host(address)
}
