//! Errors of nftables requests.

use headgate_netlink::{NetlinkError, Refusal};

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The kernel has no nf_tables and found no module for it.
    #[error("this kernel has no nftables: load the module nf_tables (modprobe nf_tables)")]
    Missing,
    /// The kernel rejected a transaction and executed none of it.
    #[error("{}", .0.first().map_or_else(String::new, ToString::to_string))]
    Refused(Vec<Fault>),
    /// The kernel cannot be reached, or rejects a query. If a transaction fails with this error, it
    /// is unknown whether the kernel executed the transaction.
    #[error("nftables: {0}")]
    Netlink(#[from] NetlinkError),
}

impl NftablesError {
    /// The kernel's first error number, if the kernel rejected the request.
    #[must_use]
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Refused(faults) => faults.first().map(|fault| fault.refusal.code),
            Self::Netlink(error) => error.refusal_code(),
            Self::Missing => None,
        }
    }

    /// Whether a retry of the same request may succeed at once, because answers were lost or
    /// another change interfered.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Netlink(error) if error.is_transient())
    }
}

/// A change that the kernel rejects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct Fault {
    /// The index of the message in the transaction, from 0. None if the kernel rejects the
    /// transaction as a whole. Each change is one message, except that long lists of elements span
    /// several messages. Some errors, such as a loop of jumps, are detected at
    /// the end of a transaction. The kernel reports these errors for the first message.
    pub message: Option<usize>,
    /// The index of the element in the message, if the kernel reports it (extended
    /// acknowledgements).
    pub element: Option<usize>,
    /// A description of the change.
    pub what: String,
    /// The reason for the rejection.
    pub reason: String,
    /// The kernel's answer.
    pub refusal: Refusal,
}
