//! Schedulers: how a virtual server chooses among its destinations.

use crate::model::{LoadBalancing, Weight};

named! {
    /// A scheduler of IPVS (`net/netfilter/ipvs/ip_vs_*.c`). Named as in the kernel, whose module
    /// has this name after the prefix `ip_vs_`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
    pub enum Scheduler {
        /// Selects each destination in turn.
        #[default]
        RoundRobin = "rr",
        /// Selects destinations in turn, in proportion to their weights.
        WeightedRoundRobin = "wrr",
        /// Selects the destination with the fewest connections.
        LeastConnection = "lc",
        /// Selects the destination with the fewest connections in proportion to its weight.
        WeightedLeastConnection = "wlc",
        /// Selects one destination for each destination address, and another destination if the
        /// first is overloaded.
        LocalityBasedLeastConnection = "lblc",
        /// Like [`Self::LocalityBasedLeastConnection`], with a set of destinations for each
        /// destination address.
        LocalityBasedLeastConnectionWithReplication = "lblcr",
        /// Selects by a hash of the source address.
        SourceHashing = "sh",
        /// Selects by a hash of the destination address.
        DestinationHashing = "dh",
        /// Selects the destination with the shortest expected delay.
        ShortestExpectedDelay = "sed",
        /// Selects an idle destination, or else the destination with the shortest expected delay.
        NeverQueue = "nq",
        /// Selects by a consistent hash of source address and port (Maglev).
        MaglevHashing = "mh",
        /// Selects the destination with the highest weight. Headgate sets the highest weight for
        /// the first destination in order of address, see [`Scheduler::weight`].
        WeightedFailover = "fo",
        /// Selects the first destination in order of address whose active connections do not exceed
        /// its weight, see [`Scheduler::weight`].
        WeightedOverflow = "ovf",
    }
}

impl Scheduler {
    /// Number of active connections above which [`Scheduler::WeightedOverflow`] treats the last
    /// destination as full.
    pub const OVERFLOW_CONNECTIONS: u32 = 100;

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
