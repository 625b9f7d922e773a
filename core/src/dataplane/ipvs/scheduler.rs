//! Schedulers: how a virtual server chooses among its destinations.

use std::fmt;

/// A scheduler of the kernel's (`net/netfilter/ipvs/ip_vs_*.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Scheduler {
    /// One after the other.
    #[default]
    RoundRobin,
    /// One after the other, by weight.
    WeightedRoundRobin,
    /// The one with the fewest connections.
    LeastConnection,
    /// The one with the fewest connections for its weight.
    WeightedLeastConnection,
    /// The same for the same destination address, unless it is overloaded.
    LocalityBasedLeastConnection,
    /// As before, from a set of destinations for each address.
    LocalityBasedLeastConnectionWithReplication,
    /// By hash of the source address.
    SourceHashing,
    /// By hash of the destination address.
    DestinationHashing,
    /// The one with the shortest expected delay.
    ShortestExpectedDelay,
    /// An idle one, else the one with the shortest expected delay.
    NeverQueue,
    /// By consistent hash of source address and port (Maglev).
    MaglevHashing,
    /// The first in order of address that is there.
    WeightedFailover,
    /// The first in order of address that has not its fill of active connections, see
    /// [`Scheduler::weight`].
    WeightedOverflow,
}

impl Scheduler {
    /// All of them.
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

    /// Active connections beyond which a destination has its fill under
    /// [`Scheduler::WeightedOverflow`], if it is the last in order.
    pub const OVERFLOW_CONNECTIONS: u32 = 100;

    /// The name that the kernel knows it by, which is also that of its module behind `ip_vs_`.
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

    /// The scheduler of that name; `None` for one that is not known.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scheduler| scheduler.as_str() == name)
    }

    /// Whether the kernel is to hash the source port as well. kube-proxy asks for it with `mh`
    /// (flag `mh-port`).
    #[must_use]
    pub fn hashes_source_port(self) -> bool {
        self == Self::MaglevHashing
    }

    /// Whether the kernel is to look for another destination when the one that the hash gives takes
    /// no connections, as while it drains (flags `sh-fallback`, `mh-fallback`).
    #[must_use]
    pub fn falls_back(self) -> bool {
        matches!(self, Self::SourceHashing | Self::MaglevHashing)
    }

    /// Whether new connections find another destination while one drains. `dh` does not look for
    /// another one: all connections to an address would fail as long as the one that its hash gives
    /// has weight 0.
    #[must_use]
    pub fn passes_over_weight_zero(self) -> bool {
        self != Self::DestinationHashing
    }

    /// Weight of the destination at `position` of `count`, in order of address. Kubernetes knows no
    /// weights, so all are alike, but where the scheduler goes by nothing else: `fo` takes the
    /// highest, and so does `ovf`, to which it is also the number of active connections beyond
    /// which the next one is used.
    #[must_use]
    pub fn weight(self, position: usize, count: usize) -> u32 {
        let rank = u32::try_from(count.saturating_sub(position)).unwrap_or(u32::MAX).min(0xffff);
        match self {
            Self::WeightedFailover => rank,
            Self::WeightedOverflow => Self::OVERFLOW_CONNECTIONS - 1 + rank,
            _ => 1,
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
