//! What can go wrong.

use headgate_netlink::{Malformed, NetlinkError, Refusal};

/// Why nothing is known, or nothing done.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The kernel has no nf_tables, and found no module for it.
    #[error("this kernel has no nftables: load the module nf_tables (modprobe nf_tables)")]
    Missing,
    /// The kernel refuses a transaction. Nothing of it was done.
    #[error("{}", .0.first().map_or_else(String::new, ToString::to_string))]
    Refused(Vec<Fault>),
    /// The kernel cannot be reached, or refuses a question. Of a transaction it is not known
    /// whether it was carried out.
    #[error("nftables: {0}")]
    Netlink(#[from] NetlinkError),
    /// An answer is none.
    #[error("nftables: the kernel's answer is malformed: {0}")]
    Malformed(#[from] Malformed),
}

impl NftablesError {
    /// The kernel's first error number, when it was the kernel that refused.
    #[must_use]
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Refused(faults) => faults.first().map(|fault| fault.refusal.code),
            Self::Netlink(error) => error.refusal_code(),
            Self::Missing | Self::Malformed(_) => None,
        }
    }

    /// The transaction was for a generation that has passed ([`crate::Nftables::commit_at`]).
    #[must_use]
    pub fn is_of_past_generation(&self) -> bool {
        matches!(self, Self::Refused(_)) && self.refusal_code() == Some(libc::ERESTART)
    }

    /// The same request may succeed at once: answers were lost, or changes came between.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Netlink(error) if error.is_transient())
    }
}

/// A change that the kernel refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct Fault {
    /// The message of the transaction, counted from 0; none for the transaction as a whole. A
    /// change is one message, save long lists of elements. What the kernel finds at the end of a
    /// transaction, such as an anonymous set that no rule uses, it reports for the first message.
    pub message: Option<usize>,
    /// The element in the message, where the kernel names it (extended acknowledgements).
    pub element: Option<usize>,
    /// The change in words.
    pub what: String,
    /// Why the kernel refuses, in words.
    pub reason: String,
    /// The kernel's answer.
    pub refusal: Refusal,
}
