//! Load balancing: the algorithms by which a node chooses an endpoint for a new connection.
//!
//! The annotation `headgate.io/load-balancing` of a Service selects an algorithm, and the
//! annotation `headgate.io/weights` of an EndpointSlice sets weights. Each dataplane supports some
//! of the algorithms. In place of an algorithm that it does not support, a dataplane uses its
//! default and reports this ([`Demand`](crate::Demand)).

use std::fmt;

/// An algorithm that chooses endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoadBalancing {
    /// Selects an endpoint at random.
    Random,
    /// Selects the endpoints in turn.
    RoundRobin,
    /// Selects the endpoint with the fewest connections from this node.
    LeastConnections,
    /// Selects an endpoint by a hash of the client's address. All nodes select the same endpoint
    /// for a client. When an endpoint is removed, only few clients of the other endpoints change
    /// their endpoint.
    ConsistentHash,
}

impl LoadBalancing {
    /// All algorithms.
    pub const ALL: [Self; 4] = [Self::Random, Self::RoundRobin, Self::LeastConnections, Self::ConsistentHash];

    /// Returns the value of the annotation.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::LeastConnections => "least-connections",
            Self::ConsistentHash => "consistent-hash",
        }
    }

    /// Returns the algorithm with this name, or `None` if the name is unknown.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.as_str() == name)
    }
}

impl fmt::Display for LoadBalancing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
