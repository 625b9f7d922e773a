//! How packets end that no rule translates.

use headgate_core::forwarding::Fate;

/// How a packet ends that is not translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It is accepted.
    Accept,
    /// It is dropped.
    Drop,
    /// It is rejected.
    Reject,
}

impl Ending {
    /// The fate of an untranslated packet.
    pub(crate) fn fate(ending: Option<Self>) -> Fate {
        match ending {
            None | Some(Self::Accept) => Fate::NotServed,
            Some(Self::Drop) => Fate::Dropped,
            Some(Self::Reject) => Fate::Rejected,
        }
    }
}
