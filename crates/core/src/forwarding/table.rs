//! The forwarding table of one family.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    behaviours::{
        view::Destination,
        view::{Outcome, ServicePortView},
    },
    explain::Mode,
    model::{Family, ServiceKey, TrafficPolicy},
    state::{
        Form,
        frontends::{Frontend, FrontendOwners},
        service_bucket,
    },
};

named! {
    /// Where a packet comes from, as a part of a sentence. A traffic policy Local applies only to
    /// [`Self::Outside`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Origin {
        /// A client that is neither the node itself nor recognised as a pod of the node.
        Outside = "from outside",
        /// A pod of the node. Without a detector of local pods the same as [`Self::Outside`].
        Pod = "from pods of the node",
        /// The node itself.
        Node = "from the node itself",
    }
}

/// What happens to a packet that begins a connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Fate {
    /// No rule decides about the packet.
    #[default]
    NotServed,
    /// The packet goes to one of these endpoints, which are sorted and distinct.
    Forwarded(Arc<[SocketAddr]>),
    /// Some packets go to one of these endpoints, and others are not served. No state asks for
    /// this fate.
    Partly(Arc<[SocketAddr]>),
    /// The client gets an error at once.
    Rejected,
    /// The packet is dropped.
    Dropped,
}

impl Fate {
    /// Returns [`Self::Forwarded`] to these endpoints.
    #[must_use]
    pub fn to(endpoints: impl IntoIterator<Item = SocketAddr>) -> Self {
        let endpoints: BTreeSet<SocketAddr> = endpoints.into_iter().collect();
        Self::Forwarded(endpoints.into_iter().collect())
    }
}

/// The maximum number of endpoints that a sentence names.
const MAX_NAMED: usize = 8;

/// The fate as a part of a sentence: "forwarded to 10.0.0.1:80".
impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotServed => f.write_str("not served"),
            Self::Rejected => f.write_str("rejected"),
            Self::Dropped => f.write_str("dropped"),
            Self::Forwarded(endpoints) | Self::Partly(endpoints) => {
                f.write_str(if matches!(self, Self::Partly(_)) {
                    "only partly forwarded, to "
                } else {
                    "forwarded to "
                })?;
                let named: Vec<String> = endpoints.iter().take(MAX_NAMED).map(ToString::to_string).collect();
                f.write_str(&named.join(", "))?;
                match endpoints.len() - named.len() {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

/// The clients that reach a frontend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Admitted {
    /// All clients.
    #[default]
    All,
    /// The clients in these ranges, which are sorted and distinct. The packets of other clients are
    /// dropped.
    Only(Arc<[IpNet]>),
}

impl Admitted {
    /// Returns [`Self::Only`] for these ranges.
    #[must_use]
    pub fn only(ranges: impl IntoIterator<Item = IpNet>) -> Self {
        let ranges: BTreeSet<IpNet> = ranges.into_iter().collect();
        Self::Only(ranges.into_iter().collect())
    }
}

/// The clients as a part of a sentence: "clients in 10.0.0.0/8".
impl fmt::Display for Admitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Only(ranges) = self else { return f.write_str("all clients") };
        let named: Vec<String> = ranges.iter().take(MAX_NAMED).map(ToString::to_string).collect();
        match (ranges.len(), ranges.len() - named.len()) {
            (0, _) => f.write_str("no client"),
            (_, 0) => write!(f, "clients in {}", named.join(", ")),
            (_, more) => write!(f, "clients in {} and {more} more ranges", named.join(", ")),
        }
    }
}

/// What happens to packets for one frontend.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Entry {
    /// The fate for each origin, in the order of [`Origin::ALL`].
    pub fates: [Fate; 3],
    /// The clients for whom the fates hold.
    pub admitted: Admitted,
    /// Whether connections from each origin reach the proxy of mode userspace while it accepts
    /// connections. Only rules of iptables lead each Service to the proxy by rules of its own.
    pub reaches_proxy: [bool; 3],
}

impl Entry {
    /// The same fate for every origin and all clients.
    #[must_use]
    pub fn always(fate: &Fate) -> Self {
        Self { fates: [fate.clone(), fate.clone(), fate.clone()], ..Self::default() }
    }

    /// The fate of a packet from `origin`.
    #[must_use]
    pub fn fate(&self, origin: Origin) -> &Fate {
        &self.fates[origin as usize]
    }

    /// The endpoints that packets of any origin reach.
    #[must_use]
    pub fn endpoints(&self) -> BTreeSet<SocketAddr> {
        let endpoints = self.fates.iter().filter_map(|fate| match fate {
            Fate::Forwarded(endpoints) | Fate::Partly(endpoints) => Some(&**endpoints),
            Fate::NotServed | Fate::Rejected | Fate::Dropped => None,
        });
        endpoints.flatten().copied().collect()
    }

    /// Sets the fate of packets from `origin`.
    pub fn set(&mut self, origin: Origin, fate: Fate) {
        self.fates[origin as usize] = fate;
    }

    /// The content hash of a frontend with this entry.
    fn hash(&self, frontend: &Frontend) -> u128 {
        let mut form = Form::new(b'F');
        match frontend {
            Frontend::Address(address, ..) => form.address(*address),
            Frontend::NodePort(family, ..) => form.number(u64::from(family.host_prefix_length())),
        }
        form.text(frontend.protocol().as_lower_str());
        form.number(u64::from(frontend.port()));
        for fate in &self.fates {
            match fate {
                Fate::NotServed => form.text("not served"),
                Fate::Rejected => form.text("rejected"),
                Fate::Dropped => form.text("dropped"),
                Fate::Forwarded(endpoints) | Fate::Partly(endpoints) => {
                    form.text(if matches!(fate, Fate::Partly(_)) { "partly" } else { "forwarded" });
                    form.number(endpoints.len() as u64);
                    for endpoint in &**endpoints {
                        form.address(endpoint.ip());
                        form.number(u64::from(endpoint.port()));
                    }
                }
            }
        }
        for reaches_proxy in self.reaches_proxy {
            form.number(u64::from(reaches_proxy));
        }
        match &self.admitted {
            Admitted::All => form.number(u64::MAX),
            Admitted::Only(ranges) => {
                form.number(ranges.len() as u64);
                for range in &**ranges {
                    form.address(range.addr());
                    form.number(u64::from(range.prefix_len()));
                }
            }
        }
        form.finish()
    }
}

/// The addresses of the node at which NodePorts answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodePortsAt {
    /// The dump does not say, for example because it has no NodePort. This value is not compared.
    #[default]
    Unknown,
    /// Every address of the node.
    AnyAddress,
    /// These addresses.
    Only(BTreeSet<IpAddr>),
    /// These addresses, which may be all addresses of the node: the dataplane lists the addresses
    /// also if every address answers.
    Listed(BTreeSet<IpAddr>),
}

/// What is wrong with a dump as a whole.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// A rule or an object that all Services need is missing or wrong. A sentence. The entries of
    /// the table are then not compared, because one cause would make thousands of differences.
    Broken(String),
    /// The decoder does not understand a part of the dump, such as a rule of another program
    /// between the rules of Headgate. A sentence that begins with "cannot verify". The entries are
    /// compared, and hold as far as the decoder understands the dump.
    NotUnderstood(String),
    /// The decoder gave up, because the dump needs too many steps. A sentence that begins with
    /// "cannot verify". The entries of the table are not compared.
    GivenUp(String),
}

/// The forwarding table of one family. A frontend that is absent is not served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The family.
    pub family: Family,
    /// What happens to packets for each frontend. In mode userspace, the fates are those while the
    /// proxy accepts no connections.
    pub entries: BTreeMap<Frontend, Entry>,
    /// Where NodePorts answer.
    pub node_ports_at: NodePortsAt,
    /// Frontends of which the table says nothing, and which are not compared: Services may specify
    /// contradictory values, such as the same address with and without source ranges.
    pub unverified: BTreeSet<Frontend>,
    /// The dataplane leaves out ports of SCTP and reports this. They are not compared.
    pub leaves_out_sctp: bool,
    /// The mode of the kube-proxy that wrote the rules. `None` for rules of Headgate, and in an
    /// expected table.
    pub of_kube_proxy: Option<Mode>,
    /// What is wrong with the dump as a whole. Empty in an expected table.
    pub problems: BTreeSet<Problem>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            entries: BTreeMap::new(),
            node_ports_at: NodePortsAt::Unknown,
            unverified: BTreeSet::new(),
            leaves_out_sctp: false,
            of_kube_proxy: None,
            problems: BTreeSet::new(),
        }
    }

    /// The bucket and the hash of each frontend that is verified. Each frontend counts in the
    /// bucket of the Service that owns it, also if the table comes from a kernel. Frontends without
    /// an owner count in bucket 0. Two tables of the same state are equal exactly if the digests of
    /// their buckets are.
    pub fn hashes<'a>(&'a self, owners: &'a FrontendOwners) -> impl Iterator<Item = (u16, u128)> + 'a {
        let verified = self.entries.iter().filter(|(frontend, _)| !self.unverified.contains(frontend));
        verified.map(|(frontend, entry)| (owner(owners, frontend).map_or(0, service_bucket), entry.hash(frontend)))
    }

    /// True if the entries are not compared: something that all Services need is missing, or the
    /// decoder gave up.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.problems.iter().any(|problem| matches!(problem, Problem::Broken(_) | Problem::GivenUp(_)))
    }
}

/// The Service that owns a frontend of a table. In a table of a kernel, a NodePort may appear at
/// one address of the node.
#[must_use]
pub fn owner<'a>(owners: &'a FrontendOwners, frontend: &Frontend) -> Option<&'a ServiceKey> {
    owners.owner(frontend).or_else(|| match frontend {
        Frontend::Address(address, protocol, port) => {
            owners.owner(&Frontend::NodePort(Family::of(*address), *protocol, *port))
        }
        Frontend::NodePort(..) => None,
    })
}

/// The fate under a policy.
pub(super) fn fate_of(view: &ServicePortView, policy: TrafficPolicy) -> Fate {
    match view.outcome(policy) {
        Outcome::Forwarded(endpoints) => Fate::to(endpoints.iter().map(Destination::socket_address)),
        Outcome::Rejected => Fate::Rejected,
        Outcome::Dropped => Fate::Dropped,
    }
}
