//! A small netlink client: encode requests, dump, and execute batches. Synchronous: the kernel works inside `send`.
//!
//! A connection belongs to the network namespace of the thread that opened it. Numbers in headers are in the machine's byte order; payloads
//! are the caller's.

mod message;
mod socket;

pub use message::{Attributes, Request, attributes};

use std::io;

use socket::Socket;

/// Room for what the kernel sends at once, which is at most 32 KiB.
const RECEIVE_BUFFER_BYTES: usize = 64 * 1024;
/// Most requests in one batch: their answers have to fit into the socket's receive buffer.
pub const BATCH_REQUESTS: usize = 128;

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
    Kernel(#[source] io::Error),
    /// An answer that is none.
    #[error("the kernel's netlink answer is cut short")]
    Malformed,
}

impl NetlinkError {
    /// The same request may succeed at once: answers were lost or the kernel was interrupted.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        let (Self::Send(error) | Self::Receive(error) | Self::Kernel(error)) = self else { return false };
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::ENOBUFS | libc::EAGAIN | libc::EBUSY))
    }
}

/// How a dump ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dumped {
    /// Everything was listed.
    Whole,
    /// The table changed its shape meanwhile: entries may be missing or listed twice.
    Interrupted,
}

/// A netlink socket with its buffer.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Connection {
    /// Opens a socket in the calling thread's network namespace, of a family such as [`libc::NETLINK_NETFILTER`].
    ///
    /// # Errors
    /// The system gives us none.
    pub fn open(protocol: libc::c_int) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol).map_err(NetlinkError::Open)?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; RECEIVE_BUFFER_BYTES] })
    }

    /// Asks for a list and hands out each message's type and payload.
    ///
    /// # Errors
    /// Whatever was handed out until then is true all the same. After an error the connection is in mid-dump: open another.
    pub fn dump(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> Result<Dumped, NetlinkError> {
        self.sequence += 1;
        self.socket.send(&request.finish(self.sequence)).map_err(NetlinkError::Send)?;
        let mut dumped = Dumped::Whole;
        loop {
            let received = self.socket.receive(&mut self.buffer).map_err(NetlinkError::Receive)?;
            for message in message::messages(self.buffer.get(..received).ok_or(NetlinkError::Malformed)?) {
                let message = message.ok_or(NetlinkError::Malformed)?;
                if message.sequence != self.sequence {
                    continue;
                }
                if message.is_interrupted() {
                    dumped = Dumped::Interrupted;
                }
                match message.kind {
                    message::DONE => return message.done_status().map_err(NetlinkError::Kernel).map(|()| dumped),
                    message::ERROR => message.error_status()?.map_err(NetlinkError::Kernel)?,
                    kind => each(kind, message.payload),
                }
            }
        }
    }

    /// Sends requests at once, at most [`BATCH_REQUESTS`], and waits until the kernel has done them all. Each request that it refuses is
    /// given to `refused` by its index; the others are done.
    ///
    /// # Errors
    /// What was done is not known, all or part of it.
    pub fn execute(
        &mut self,
        requests: Vec<Request>,
        mut refused: impl FnMut(usize, io::Error),
    ) -> Result<(), NetlinkError> {
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return Ok(());
        }
        let first = self.sequence + 1;
        self.sequence += count;
        let mut bytes = Vec::new();
        for (sequence, request) in (first..).zip(requests) {
            // Refusals come unasked, and the last answer comes after them.
            let request = if sequence == self.sequence { request.acknowledged() } else { request };
            bytes.extend(request.finish(sequence));
        }
        self.socket.send(&bytes).map_err(NetlinkError::Send)?;
        loop {
            let received = self.socket.receive(&mut self.buffer).map_err(NetlinkError::Receive)?;
            for message in message::messages(self.buffer.get(..received).ok_or(NetlinkError::Malformed)?) {
                let message = message.ok_or(NetlinkError::Malformed)?;
                if message.kind != message::ERROR || !(first..=self.sequence).contains(&message.sequence) {
                    continue;
                }
                if let Err(error) = message.error_status()? {
                    refused(usize::try_from(message.sequence - first).unwrap_or(usize::MAX), error);
                }
                if message.sequence == self.sequence {
                    return Ok(());
                }
            }
        }
    }
}
