//! Errors of netlink requests.

use std::{fmt, io};

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened.
    #[error("cannot open a netlink socket: {0}")]
    Open(#[source] io::Error),
    /// Sending failed.
    #[error("cannot send to netlink: {0}")]
    Send(#[source] io::Error),
    /// Receiving failed: `ENOBUFS` if answers were lost, `EAGAIN` if no answer arrived within the
    /// timeout.
    #[error("cannot receive from netlink: {0}")]
    Receive(#[source] io::Error),
    /// The kernel rejected the request.
    #[error("the kernel rejects a netlink request: {0}")]
    Kernel(#[source] Refusal),
    /// The answer has an unexpected format.
    #[error("the kernel's answer is malformed: {0}")]
    Malformed(#[from] Malformed),
    /// An attribute of the request, with its header, is longer than 65,535 bytes. The batch with
    /// this request was not sent.
    #[error("a netlink request is too long: an attribute holds 65,531 bytes at most")]
    RequestTooLong,
}

impl NetlinkError {
    /// Returns whether a retry of the same request may succeed at once: answers were lost or late,
    /// or the kernel was interrupted or busy.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        let code = match self {
            Self::Send(error) | Self::Receive(error) => error.raw_os_error(),
            Self::Kernel(refusal) => Some(refusal.code),
            Self::Open(_) | Self::Malformed(_) | Self::RequestTooLong => None,
        };
        matches!(code, Some(libc::EINTR | libc::ENOBUFS | libc::EAGAIN | libc::EBUSY))
    }

    /// The kernel's error number, if the kernel rejected the request.
    #[must_use]
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Kernel(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}

/// The kernel's answer to a request that it rejects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// The positive error number: an `errno` value, or a subsystem's own number above 4095.
    pub code: i32,
    /// The kernel's error text, if it sent one (extended acknowledgement, `NLMSGERR_ATTR_MSG`).
    pub message: Option<String>,
    /// The position of the faulty attribute, in bytes from the start of the request's header
    /// (`NLMSGERR_ATTR_OFFS`).
    pub offset_bytes: Option<u32>,
}

impl Refusal {
    /// A rejection with an error number and no details.
    #[must_use]
    pub fn of_code(code: i32) -> Self {
        Self { code, message: None, offset_bytes: None }
    }

    /// The error number as [`std::io::Error`]. The standard library has no text for a subsystem's
    /// own numbers.
    #[must_use]
    pub fn to_io_error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.code)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{} ({message})", self.to_io_error()),
            None => write!(f, "{}", self.to_io_error()),
        }
    }
}

/// A message from the kernel has an unexpected format. The text describes the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);
