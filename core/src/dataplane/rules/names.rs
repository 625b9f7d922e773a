//! Chain names.
//!
//! A service's chains end in the first 16 characters of base32(sha256(text)), text being `namespace/name[:port]` and the lower-case
//! protocol, for an endpoint's chain followed by `address:port` (IPv6 in brackets). Sixteen characters are ten bytes of the hash.

use std::fmt;

use data_encoding::BASE32_NOPAD;
use sha2::{Digest as _, Sha256};

use crate::{behaviours::endpoint_choice::Destination, behaviours::view::ServicePortView};

/// What a hashed chain is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChainKind {
    /// `KUBE-SVC-`: spreads over the endpoints for Cluster policy.
    ClusterPolicy,
    /// `KUBE-SVL-`: spreads over the endpoints for Local policy.
    LocalPolicy,
    /// `KUBE-EXT-`: traffic to external destinations.
    External,
    /// `KUBE-FW-`: source ranges of load balancer IPs.
    Firewall,
    /// `KUBE-SEP-`: one endpoint.
    Endpoint,
    /// `KUBE-SVC-G-`: second level of the dispatch by address.
    AddressGroup,
    /// `KUBE-EXT-G-`: second level of the dispatch by NodePort.
    NodePortGroup,
    /// `KUBE-HPS-`: second level of KUBE-HAIRPIN.
    HairpinGroup,
}

impl ChainKind {
    const ALL: [Self; 8] = [
        Self::ClusterPolicy,
        Self::LocalPolicy,
        Self::External,
        Self::Firewall,
        Self::Endpoint,
        Self::AddressGroup,
        Self::NodePortGroup,
        Self::HairpinGroup,
    ];

    /// The name's beginning.
    ///
    /// Groups that lead to services' chains begin as those do. So kube-proxy, where it takes a node over, finds them among the chains of services that it does
    /// not know, and removes them. Left behind, they would keep the chains that they lead to from being deleted, and with that each of its syncs from
    /// succeeding. KUBE-HAIRPIN leads to its groups and stays there, so that theirs have to stay as well.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::ClusterPolicy => "KUBE-SVC-",
            Self::LocalPolicy => "KUBE-SVL-",
            Self::External => "KUBE-EXT-",
            Self::Firewall => "KUBE-FW-",
            Self::Endpoint => "KUBE-SEP-",
            Self::AddressGroup => "KUBE-SVC-G-",
            Self::NodePortGroup => "KUBE-EXT-G-",
            Self::HairpinGroup => "KUBE-HPS-",
        }
    }
}

/// The name of a hashed chain, in eleven bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainName {
    kind: ChainKind,
    hash: [u8; 10],
}

impl ChainName {
    /// A chain of that kind named after the text.
    #[must_use]
    pub fn of(kind: ChainKind, text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let mut hash = [0; 10];
        hash.copy_from_slice(&digest[..10]);
        Self { kind, hash }
    }

    /// A chain of a service port.
    #[must_use]
    pub fn of_port(kind: ChainKind, view: &ServicePortView) -> Self {
        Self::of(kind, &port_text(view))
    }

    /// The chain of one endpoint of a service port.
    #[must_use]
    pub fn of_endpoint(view: &ServicePortView, destination: &Destination) -> Self {
        let endpoint = destination.socket_address();
        Self::of(ChainKind::Endpoint, &format!("{}{endpoint}", port_text(view)))
    }

    /// The same service port's chain of another kind.
    #[must_use]
    pub fn sibling(self, kind: ChainKind) -> Self {
        Self { kind, ..self }
    }

    /// Reads a name back; `None` when it is not one of ours.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        ChainKind::ALL.into_iter().find_map(|kind| {
            // A prefix may begin with another one; what follows that is no hash then, for the dash in it.
            let hash = BASE32_NOPAD.decode(text.strip_prefix(kind.prefix())?.as_bytes()).ok()?;
            Some(Self { kind, hash: hash.try_into().ok()? })
        })
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.prefix())?;
        BASE32_NOPAD.encode_display(&self.hash).fmt(f)
    }
}

fn port_text(view: &ServicePortView) -> String {
    let mut text = view.display_name();
    text.push_str(view.protocol.as_lower_str());
    text
}
