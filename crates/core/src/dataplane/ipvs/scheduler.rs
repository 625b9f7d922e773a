//! Schedulers: how a virtual server chooses among its destinations.

use std::fmt;

use crate::model::{LoadBalancing, Weight};

/// A scheduler of IPVS (`net/netfilter/ipvs/ip_vs_*.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Scheduler {
    /// Selects each destination in turn.
    #[default]
    RoundRobin,
    /// Selects destinations in turn, in proportion to their weights.
    WeightedRoundRobin,
    /// Selects the destination with the fewest connections.
    LeastConnection,
    /// Selects the destination with the fewest connections in proportion to its weight.
    WeightedLeastConnection,
    /// Selects one destination for each destination address, and another destination if the first
    /// is overloaded.
    LocalityBasedLeastConnection,
    /// Like [`Self::LocalityBasedLeastConnection`], with a set of destinations for each destination
    /// address.
    LocalityBasedLeastConnectionWithReplication,
    /// Selects by a hash of the source address.
    SourceHashing,
    /// Selects by a hash of the destination address.
    DestinationHashing,
    /// Selects the destination with the shortest expected delay.
    ShortestExpectedDelay,
    /// Selects an idle destination, or else the destination with the shortest expected delay.
    NeverQueue,
    /// Selects by a consistent hash of source address and port (Maglev).
    MaglevHashing,
    /// Selects the destination with the highest weight. Headgate sets the highest weight for the
    /// first destination in order of address, see [`Scheduler::weight`].
    WeightedFailover,
    /// Selects the first destination in order of address whose active connections do not exceed its
    /// weight, see [`Scheduler::weight`].
    WeightedOverflow,
}

impl Scheduler {
    /// All schedulers.
    pub const ALL: [Self; 13] = [
        Self::RoundRobin,
        Self::WeightedRoundRobin,
        Self::LeastConnection,
        Self::WeightedLeastConnection,
        Self::LocalityBasedLeastConnection,
        Self::LocalityBasedLeastConnectionWithReplication,
        Self::SourceHashing,
        Self::DestinationHashing,
        Self::ShortestExpectedDelay,
        Self::NeverQueue,
        Self::MaglevHashing,
        Self::WeightedFailover,
        Self::WeightedOverflow,
    ];

    /// Number of active connections above which [`Scheduler::WeightedOverflow`] treats the last
    /// destination as full.
    pub const OVERFLOW_CONNECTIONS: u32 = 100;

    /// The name in the kernel. The kernel module of the scheduler has this name after the prefix
    /// `ip_vs_`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "rr",
            Self::WeightedRoundRobin => "wrr",
            Self::LeastConnection => "lc",
            Self::WeightedLeastConnection => "wlc",
            Self::LocalityBasedLeastConnection => "lblc",
            Self::LocalityBasedLeastConnectionWithReplication => "lblcr",
            Self::SourceHashing => "sh",
            Self::DestinationHashing => "dh",
            Self::ShortestExpectedDelay => "sed",
            Self::NeverQueue => "nq",
            Self::MaglevHashing => "mh",
            Self::WeightedFailover => "fo",
            Self::WeightedOverflow => "ovf",
        }
    }

    /// Returns the scheduler with this name, or `None` if the name is unknown.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scheduler| scheduler.as_str() == name)
    }

    /// Returns the scheduler for an algorithm, or `None` if IPVS has no such scheduler. All
    /// returned schedulers observe weights. For consistent hashing, `mh` must hash only the
    /// client's address.
    #[must_use]
    pub fn of(algorithm: LoadBalancing) -> Option<Self> {
        match algorithm {
            LoadBalancing::Random => None,
            LoadBalancing::RoundRobin => Some(Self::WeightedRoundRobin),
            LoadBalancing::LeastConnections => Some(Self::WeightedLeastConnection),
            LoadBalancing::ConsistentHash => Some(Self::MaglevHashing),
        }
    }

    /// Returns the weighted form of this scheduler, or the scheduler itself if it has no weighted
    /// form.
    #[must_use]
    pub fn weighted(self) -> Self {
        match self {
            Self::RoundRobin => Self::WeightedRoundRobin,
            Self::LeastConnection => Self::WeightedLeastConnection,
            other => other,
        }
    }

    /// True if the scheduler must select another destination when the hash selects a destination
    /// that accepts no connections, for example because it drains (flags `sh-fallback`,
    /// `mh-fallback`).
    #[must_use]
    pub fn falls_back(self) -> bool {
        matches!(self, Self::SourceHashing | Self::MaglevHashing)
    }

    /// True if the scheduler skips destinations of weight 0. `dh` does not: if the hash of an
    /// address selects a destination of weight 0, all connections to that address fail.
    #[must_use]
    pub fn skips_weight_zero(self) -> bool {
        self != Self::DestinationHashing
    }

    /// Returns the weight in the kernel of the destination at `position` of `count` destinations in
    /// order of address. Most schedulers get the weight of the endpoint. `fo` and `ovf` select by
    /// weight alone, so their weights fall with the position. For `ovf`, the weight is also the
    /// number of active connections above which the next destination is used.
    #[must_use]
    pub fn weight(self, position: usize, count: usize, of_endpoint: Weight) -> u32 {
        let rank = u32::try_from(count.saturating_sub(position)).unwrap_or(u32::MAX).min(0xffff);
        match self {
            Self::WeightedFailover => rank,
            Self::WeightedOverflow => Self::OVERFLOW_CONNECTIONS - 1 + rank,
            _ => of_endpoint.get(),
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
