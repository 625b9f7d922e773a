//! The backends that the packet cases run against.

use std::fmt;

use super::{Transport, iptables::Variant, manifests::Via};

/// How an agent programs the kernel: a parameter of every packet case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// iptables over the legacy kernel interface, with kube-proxy's layout of rules.
    IptablesLegacy,
    /// iptables over nftables, with kube-proxy's layout of rules.
    IptablesNft,
    /// iptables over nftables, with the layout for large clusters.
    IptablesNftCompact,
    /// IPVS, with iptables rules over the legacy kernel interface.
    Ipvs,
    /// nftables without iptables.
    Nftables,
    /// A proxy in the agent, behind rules of nftables.
    Userspace,
    /// A proxy in the agent, behind rules of iptables over the legacy kernel interface.
    UserspaceIptables,
}

impl Backend {
    /// All backends.
    pub const ALL: [Self; 7] = [
        Self::IptablesLegacy,
        Self::IptablesNft,
        Self::IptablesNftCompact,
        Self::Ipvs,
        Self::Nftables,
        Self::Userspace,
        Self::UserspaceIptables,
    ];

    /// The agent's flags that choose this backend.
    pub fn agent_arguments(self) -> Vec<&'static str> {
        let variant = if self.variant() == Variant::Legacy { "legacy" } else { "nft" };
        let layout = if self.is_compact() { "compact" } else { "classic" };
        let mode = match self {
            Self::Ipvs => "ipvs",
            Self::Nftables => "nftables",
            Self::Userspace | Self::UserspaceIptables => "userspace",
            _ => "iptables",
        };
        let mut arguments = vec!["--proxy-mode", mode, "--iptables-variant", variant, "--iptables-layout", layout];
        arguments.extend((self == Self::UserspaceIptables).then_some("--userspace-rules=iptables"));
        arguments
    }

    /// The variant of iptables that the agent runs.
    pub fn variant(self) -> Variant {
        match self {
            Self::IptablesLegacy | Self::Ipvs | Self::UserspaceIptables => Variant::Legacy,
            Self::IptablesNft | Self::IptablesNftCompact | Self::Nftables | Self::Userspace => Variant::Nft,
        }
    }

    /// Whether tests of this backend run inside User-Mode Linux, because the host's kernel may lack
    /// its modules.
    pub fn runs_in_uml(self) -> bool {
        self == Self::Ipvs
    }

    /// Whether a node holds the services' addresses itself. If so, the node's kernel refuses
    /// connections to ports that no service has at these addresses.
    pub fn binds_addresses(self) -> bool {
        self == Self::Ipvs
    }

    /// Whether a node refuses connections to a ClusterIP at ports that the service does not have.
    pub fn refuses_unused_ports(self) -> bool {
        self.binds_addresses() || self.uses_nftables()
    }

    /// Whether the backend programs nftables without iptables.
    pub fn uses_nftables(self) -> bool {
        matches!(self, Self::Nftables | Self::Userspace)
    }

    /// Whether a proxy carries TCP connections. Endpoints then see the address of a node in place
    /// of the client's address, and the proxy tries another endpoint if an endpoint refuses.
    pub fn carries_tcp(self) -> bool {
        matches!(self, Self::Userspace | Self::UserspaceIptables)
    }

    /// Whether the backend refuses connections of SCTP.
    pub fn refuses_sctp(self) -> bool {
        self.carries_tcp()
    }

    /// Whether a proxy carries what a client sends by `via`. Datagrams go straight to endpoints if
    /// they are for node ports, or if the rules are those of iptables.
    pub fn carries(self, transport: Transport, via: Via) -> bool {
        let is_node_port = matches!(via, Via::NodePort(_) | Via::Localhost);
        let carries_udp = self == Self::Userspace && transport == Transport::Udp && !is_node_port;
        carries_udp || (self.carries_tcp() && transport.is_tcp())
    }

    /// Like [`Self::carries`], for connections that one of these servers answers. The proxy does
    /// not connect to addresses of nodes.
    pub fn carries_to(self, transport: Transport, via: Via, servers: &[&str]) -> bool {
        let is_node = |server: &&str| super::plan::NODES.iter().any(|node| node.name == *server);
        self.carries(transport, via) && !servers.iter().all(is_node)
    }

    /// Whether the backend uses the layout for large clusters.
    pub fn is_compact(self) -> bool {
        self == Self::IptablesNftCompact
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            Self::IptablesNftCompact => "iptables-nft, compact",
            Self::Ipvs => "ipvs",
            Self::Nftables => "nftables",
            Self::Userspace => "userspace",
            Self::UserspaceIptables => "userspace, iptables-legacy",
        })
    }
}
