//! The form of a case.

use crate::testbed::manifests::Via;
use crate::testbed::{Backend, Family};

/// One question to a service and what must come of it, for each of some ports and families.
#[derive(Debug, Clone)]
pub struct Case {
    /// Pod, node or outside client that asks.
    pub from: &'static str,
    /// Service that is asked.
    pub service: &'static str,
    /// By which of its addresses.
    pub via: Via,
    /// Names of its ports.
    pub ports: &'static [&'static str],
    /// Families to ask by.
    pub families: &'static [Family],
    /// What must come of it.
    pub expect: Expect,
    /// Rows of the checklist in `docs/behaviours.md` that it proves.
    pub rows: &'static [u8],
    /// Backends that behave otherwise on purpose, and why.
    pub excluded: Vec<(Backend, &'static str)>,
}

/// What must come of a case.
#[derive(Debug, Clone)]
pub enum Expect {
    /// All these servers, no others, answer.
    Answered {
        /// Pods, or nodes for their host network.
        by: &'static [&'static str],
        /// The source address that they see.
        source: SourceAddress,
        /// Whether to ask often enough to see that each gets its share.
        even: bool,
    },
    /// Refused at once.
    Refused,
    /// Silence.
    Dropped,
    /// Nobody answers where a service has been: silence, or, where the node keeps the address as
    /// long as connections to it live, a refusal.
    Gone,
}

/// The source address that a server sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceAddress {
    /// The client's own.
    Kept,
    /// That of a node, which put it in the place of the client's. If the client is that node, its
    /// ports change at least.
    Masqueraded(&'static str),
}

/// A question; say next what must come of it. TCP, over both families.
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
    /// The same for other ports.
    #[must_use]
    pub fn ports(self, ports: &'static [&'static str]) -> Self {
        Self { ports, ..self }
    }

    /// The same over some families only.
    #[must_use]
    pub fn over(self, families: &'static [Family]) -> Self {
        Self { families, ..self }
    }

    /// All these servers must answer, and see this source.
    pub fn answered(self, by: &'static [&'static str], source: SourceAddress) -> Case {
        self.must(Expect::Answered { by, source, even: false })
    }

    /// As [`Self::answered`], each server with its share.
    pub fn answered_evenly(self, by: &'static [&'static str], source: SourceAddress) -> Case {
        self.must(Expect::Answered { by, source, even: true })
    }

    /// It must be refused.
    pub fn refused(self) -> Case {
        self.must(Expect::Refused)
    }

    /// It must vanish without a word.
    pub fn dropped(self) -> Case {
        self.must(Expect::Dropped)
    }

    /// Nobody must answer any more.
    pub fn gone(self) -> Case {
        self.must(Expect::Gone)
    }

    fn must(self, expect: Expect) -> Case {
        let Self { from, service, via, ports, families } = self;
        Case { from, service, via, ports, families, expect, rows: &[], excluded: Vec::new() }
    }
}

/// Cases that prove the same rows of the checklist.
pub fn rows<const N: usize>(rows: &'static [u8], cases: [Case; N]) -> Vec<Case> {
    cases.into_iter().map(|case| case.rows(rows)).collect()
}

impl Case {
    /// Rows of the checklist that the case proves.
    #[must_use]
    pub fn rows(self, rows: &'static [u8]) -> Self {
        Self { rows, ..self }
    }

    /// The case does not hold for `backend`, for a reason that is printed instead.
    #[must_use]
    pub fn except(mut self, backend: Backend, reason: &'static str) -> Self {
        self.excluded.push((backend, reason));
        self
    }
}
