//! What can go wrong.

use std::{fmt, io};

/// Why the kernel did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket.
    #[error("cannot open a netlink socket: {0}")]
    Open(#[source] io::Error),
    /// Sending failed.
    #[error("cannot send to netlink: {0}")]
    Send(#[source] io::Error),
    /// Receiving failed; `ENOBUFS` when answers were lost, `EAGAIN` when none came within seconds.
    #[error("cannot receive from netlink: {0}")]
    Receive(#[source] io::Error),
    /// The kernel refuses the request.
    #[error("the kernel refuses a netlink request: {0}")]
    Kernel(#[source] Refusal),
    /// An answer that is none.
    #[error("the kernel's netlink answer is malformed: {0}")]
    Malformed(#[from] Malformed),
    /// A request with an attribute longer than 65,535 bytes. Nothing of its batch was sent that is not reported as done.
    #[error("a netlink request is too long: an attribute holds 65,531 bytes at most")]
    RequestTooLong,
}

impl NetlinkError {
    /// The same request may succeed at once: answers were lost or the kernel was interrupted.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        let code = match self {
            Self::Send(error) | Self::Receive(error) => error.raw_os_error(),
            Self::Kernel(refusal) => Some(refusal.code),
            Self::Open(_) | Self::Malformed(_) | Self::RequestTooLong => None,
        };
        matches!(code, Some(libc::EINTR | libc::ENOBUFS | libc::EAGAIN | libc::EBUSY))
    }

    /// The kernel's error number, when it was the kernel that refused.
    #[must_use]
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Kernel(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}

/// What the kernel says of a request that it refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// The error number, positive: one of `errno`, or of the subsystem's own above 4095.
    pub code: i32,
    /// The kernel's own words, where it has any (extended acknowledgement, `NLMSGERR_ATTR_MSG`).
    pub message: Option<String>,
    /// Where in the request the fault is, in bytes from the head of its header (`NLMSGERR_ATTR_OFFS`).
    pub offset_bytes: Option<u32>,
}

impl Refusal {
    /// A refusal of which only the number is known.
    #[must_use]
    pub fn of_code(code: i32) -> Self {
        Self { code, message: None, offset_bytes: None }
    }

    /// The error number as the standard library's error. Numbers of subsystems have no text there.
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

/// An answer of another form than the kernel's. What of it is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);
