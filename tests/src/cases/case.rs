//! The data of a case.

use crate::testbed::manifests::Via;
use crate::testbed::{Backend, Family};

/// Requests to the ports of a service, over some families, and their expected outcome.
#[derive(Debug, Clone)]
pub struct Case {
    /// The client: a pod, a node or an outside client.
    pub from: &'static str,
    /// The service to which the client sends the requests.
    pub service: &'static str,
    /// The kind of address to which the client sends the requests.
    pub via: Via,
    /// The names of the service's ports.
    pub ports: &'static [&'static str],
    /// The address families.
    pub families: &'static [Family],
    /// The expected outcome.
    pub expect: Expect,
    /// The rows of the checklist in `docs/behaviours.md` that the case shows.
    pub rows: &'static [u8],
    /// Backends that do not run the case because they differ on purpose, each with the reason.
    pub excluded: Vec<(Backend, &'static str)>,
}

/// The expected outcome of a case.
#[derive(Debug, Clone)]
pub enum Expect {
    /// All servers in `by` answer, and no other server answers.
    Answered {
        /// Pods, or nodes for their host network.
        by: &'static [&'static str],
        /// The source address that the servers see.
        source: SourceAddress,
        /// Whether to send enough requests to check that each server gets an equal share.
        even: bool,
    },
    /// The request is refused at once.
    Refused,
    /// The request gets no answer until the time-out.
    Dropped,
    /// No server answers at the address of a removed service. A backend that binds addresses to the
    /// node may also refuse, because the node keeps the address while connections to it exist.
    Gone,
}

/// The source address that a server sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceAddress {
    /// The client's own address.
    Kept,
    /// The address of the named node, which masquerades the client's packets. If the client is the
    /// named node, only the source port changes.
    Masqueraded(&'static str),
}

/// Begins a case: requests over TCP and both families. A method of [`Question`] adds the expected
/// outcome.
pub fn ask(from: &'static str, service: &'static str, via: Via) -> Question {
    Question { from, service, via, ports: &["tcp"], families: &Family::BOTH }
}

/// A case without its expectation.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    from: &'static str,
    service: &'static str,
    via: Via,
    ports: &'static [&'static str],
    families: &'static [Family],
}

/// One port of each protocol, and HTTP.
pub const EVERY_TRANSPORT: &[&str] = &["tcp", "udp", "sctp", "http"];

impl Question {
    /// Replaces the ports.
    #[must_use]
    pub fn ports(self, ports: &'static [&'static str]) -> Self {
        Self { ports, ..self }
    }

    /// Replaces the families.
    #[must_use]
    pub fn over(self, families: &'static [Family]) -> Self {
        Self { families, ..self }
    }

    /// Expects that all servers in `by` answer, and that they see the source address `source`.
    pub fn answered(self, by: &'static [&'static str], source: SourceAddress) -> Case {
        self.must(Expect::Answered { by, source, even: false })
    }

    /// Expects that all servers in `by` answer equal shares of the requests, and that they see the
    /// source address `source`.
    pub fn answered_evenly(self, by: &'static [&'static str], source: SourceAddress) -> Case {
        self.must(Expect::Answered { by, source, even: true })
    }

    /// Expects a refusal.
    pub fn refused(self) -> Case {
        self.must(Expect::Refused)
    }

    /// Expects that the packets are dropped.
    pub fn dropped(self) -> Case {
        self.must(Expect::Dropped)
    }

    /// Expects that no server answers at the address of a removed service.
    pub fn gone(self) -> Case {
        self.must(Expect::Gone)
    }

    fn must(self, expect: Expect) -> Case {
        let Self { from, service, via, ports, families } = self;
        Case { from, service, via, ports, families, expect, rows: &[], excluded: Vec::new() }
    }
}

/// Sets the rows of the checklist that each case of `cases` shows.
pub fn rows<const N: usize>(rows: &'static [u8], cases: [Case; N]) -> Vec<Case> {
    cases.into_iter().map(|case| case.rows(rows)).collect()
}

impl Case {
    /// Sets the rows of the checklist that the case shows.
    #[must_use]
    pub fn rows(self, rows: &'static [u8]) -> Self {
        Self { rows, ..self }
    }

    /// Excludes `backend` from the case. The reason is printed when the case is skipped.
    #[must_use]
    pub fn except(mut self, backend: Backend, reason: &'static str) -> Self {
        self.excluded.push((backend, reason));
        self
    }
}
