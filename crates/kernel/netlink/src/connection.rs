//! A socket with its buffers, for lists, queries and batches of changes.

use std::{
    io,
    ops::ControlFlow,
    os::fd::{AsFd, BorrowedFd},
};

use crate::{
    Malformed, NetlinkError, Refusal, Request,
    message::{self, Message},
    socket::{BUFFER_BYTES, Socket},
};

/// The size of the receive buffer in bytes. The kernel sends at most 32 KiB at once.
pub(super) const RECEIVE_BUFFER_BYTES: usize = 64 * 1024;
/// The maximum number of requests in one send. Their answers must fit into the socket's receive
/// buffer.
pub const BATCH_REQUESTS: usize = 128;
/// The maximum number of bytes in one send, unless a single request is larger. The kernel copies a
/// send into contiguous memory.
pub const BATCH_BYTES: usize = 64 * 1024;

/// The maximum capacity in bytes of the request buffer between sends.
const KEPT_BYTES: usize = 64 * 1024;

/// The maximum number of attempts for a list that the kernel interrupts.
const LIST_ATTEMPTS: u32 = 5;

/// The result of a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dumped {
    /// The list is complete.
    Whole,
    /// The table changed during the dump. Entries may be missing or listed twice.
    Interrupted,
}

/// A request that the kernel rejected. The kernel executed the other requests of the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The index of the request in the batch.
    pub index: usize,
    /// The kernel's answer.
    pub refusal: Refusal,
}

/// The sequence numbers of the requests in one send.
#[derive(Debug)]
pub(super) struct Sent {
    first: u32,
    last: u32,
    /// 0, which no request has, if no request asks for an acknowledgement.
    acknowledged: u32,
}

/// A netlink socket with its buffers.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Connection {
    /// Opens a socket for a netlink protocol such as [`libc::NETLINK_NETFILTER`] in the calling
    /// thread's network namespace.
    ///
    /// # Errors
    /// The kernel creates no socket.
    pub fn open(protocol: libc::c_int) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol, BUFFER_BYTES).map_err(NetlinkError::Open)?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; RECEIVE_BUFFER_BYTES], outgoing: Vec::new() })
    }

    /// Requests a list and passes the type and payload of each message to `each`.
    ///
    /// # Errors
    /// Messages already passed to `each` are valid. After an error the dump is incomplete and the
    /// connection is unusable: open another connection.
    #[allow(clippy::needless_pass_by_value)] // callers make the request for this call
    pub fn dump(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> Result<Dumped, NetlinkError> {
        self.exchange(&request, false, |message| {
            each(message.kind, message.payload);
            Ok(())
        })
    }

    /// Requests a list once. `add` adds the payload of one message to the result.
    ///
    /// # Errors
    /// The errors of [`Connection::dump`], or a malformed message that `add` reports. After a
    /// malformed message the connection remains usable.
    pub fn list_once<L: Default>(
        &mut self,
        request: &Request,
        mut add: impl FnMut(&mut L, &[u8]) -> Result<(), Malformed>,
    ) -> Result<(L, Dumped), NetlinkError> {
        let mut found = L::default();
        let dumped = self.exchange(request, false, |message| add(&mut found, message.payload))?;
        Ok((found, dumped))
    }

    /// Requests a list, and repeats the request a limited number of times until no change of the
    /// table interrupts the list. `add` adds the payload of one message to the result. Each attempt
    /// starts with an empty result.
    ///
    /// # Errors
    /// The errors of [`Connection::list_once`], or `EINTR` if every attempt was interrupted. A
    /// retry after `EINTR` may succeed.
    pub fn list<L: Default>(
        &mut self,
        request: &Request,
        add: impl Fn(&mut L, &[u8]) -> Result<(), Malformed>,
    ) -> Result<L, NetlinkError> {
        for _ in 0..LIST_ATTEMPTS {
            if let (found, Dumped::Whole) = self.list_once(request, &add)? {
                return Ok(found);
            }
        }
        Err(NetlinkError::Kernel(Refusal::of_code(libc::EINTR)))
    }

    /// Sends a query for a single object, or one change. Passes the type and payload of each answer
    /// to `each` until the kernel acknowledges the request.
    ///
    /// # Errors
    /// The kernel rejects the request, or the answer is lost, so the result is unknown.
    #[allow(clippy::needless_pass_by_value)] // callers make the request for this call
    pub fn ask(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> Result<(), NetlinkError> {
        self.exchange(&request, true, |message| {
            each(message.kind, message.payload);
            Ok(())
        })
        .map(drop)
    }

    /// Sends a query for a single object, and reads the last message of the answer.
    ///
    /// # Errors
    /// The errors of [`Connection::ask`], the error of `read`, or an answer without a message.
    pub fn ask_one<T>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<T, NetlinkError> {
        let mut found = Err(Malformed("an answer without a message"));
        self.exchange(request, true, |message| {
            found = read(message.payload);
            Ok(())
        })?;
        Ok(found?)
    }

    /// Sends a request and reads the answers until the acknowledgement or the end of the list. Then
    /// returns the last error of `each`, if any.
    fn exchange(
        &mut self,
        request: &Request,
        acknowledged: bool,
        mut each: impl FnMut(&Message<'_>) -> Result<(), Malformed>,
    ) -> Result<Dumped, NetlinkError> {
        let sent = self.send_together(std::iter::once(request), if acknowledged { 0 } else { usize::MAX })?;
        let (mut dumped, mut read) = (Dumped::Whole, Ok(()));
        self.receive(&sent, |_, message| {
            if message.is_interrupted() {
                dumped = Dumped::Interrupted;
            }
            Ok(match message.kind {
                message::DONE => ControlFlow::Break(message.done_status()),
                message::ERROR => ControlFlow::Break(message.error_status()?),
                _ => {
                    read = each(message).and(read);
                    ControlFlow::Continue(())
                }
            })
        })?
        .map_err(NetlinkError::Kernel)?;
        Ok(read.map(|()| dumped)?)
    }

    /// Like [`Connection::execute`]. Returns the rejected requests in order.
    ///
    /// # Errors
    /// The kernel may have executed none, some or all of the requests.
    pub fn execute_all(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<Vec<Refused>, NetlinkError> {
        let mut all_refused = Vec::new();
        self.execute(requests, |index, refusal| all_refused.push(Refused { index, refusal }))?;
        Ok(all_refused)
    }

    /// Sends requests, many in one send ([`BATCH_REQUESTS`], [`BATCH_BYTES`]), and waits until the
    /// kernel has executed them in order. `refused` receives the index of each request that the
    /// kernel rejects. The kernel executes the other requests. Only the last request of each send
    /// requires an acknowledgement: the kernel reports rejections in any case, and an
    /// acknowledgement for each request would be expensive. Requests for lists are not allowed.
    ///
    /// # Errors
    /// The kernel may have executed none, some or all of the requests.
    pub fn execute(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut refused: impl FnMut(usize, Refusal),
    ) -> Result<(), NetlinkError> {
        let mut requests = requests.into_iter().peekable();
        let mut done = 0;
        while requests.peek().is_some() {
            let (mut batch, mut bytes) = (Vec::new(), 0);
            while batch.len() < BATCH_REQUESTS
                && let Some(request) =
                    requests.next_if(|request| batch.is_empty() || bytes + request.length() <= BATCH_BYTES)
            {
                bytes += request.length();
                batch.push(request);
            }
            let count = batch.len();
            let sent = self.send_together(batch.iter(), count - 1)?;
            self.collect_refusals(&sent, |index, refusal| {
                refused(done + index, refusal);
                ControlFlow::Continue(())
            })?;
            done += count;
        }
        Ok(())
    }

    /// Sends requests in one send of any length. The request with the index `acknowledged`, if any,
    /// requires an acknowledgement.
    pub(super) fn send_together<'a>(
        &mut self,
        requests: impl ExactSizeIterator<Item = &'a Request>,
        acknowledged: usize,
    ) -> Result<Sent, NetlinkError> {
        let count = u32::try_from(requests.len()).map_err(|_| NetlinkError::RequestTooLong)?;
        let first = self.reserve(count);
        let mut sent = Sent { first, last: self.sequence, acknowledged: 0 };
        self.outgoing.clear();
        for (index, (sequence, request)) in (first..).zip(requests).enumerate() {
            if index == acknowledged {
                sent.acknowledged = sequence;
            }
            request.append_to(&mut self.outgoing, sequence, index == acknowledged)?;
        }
        self.socket.make_room(self.outgoing.len()).map_err(NetlinkError::Send)?;
        self.socket.send(&self.outgoing).map_err(NetlinkError::Send)?;
        self.outgoing.shrink_to(KEPT_BYTES);
        Ok(sent)
    }

    /// Passes each rejection of sent requests to `refused`, with the index of the request. Ends
    /// when the acknowledgement arrives or `refused` returns `Break`.
    pub(super) fn collect_refusals(
        &mut self,
        sent: &Sent,
        mut refused: impl FnMut(usize, Refusal) -> ControlFlow<()>,
    ) -> Result<(), NetlinkError> {
        self.receive(sent, |index, message| {
            if message.kind == message::ERROR {
                if let Err(refusal) = message.error_status()? {
                    let index = usize::try_from(index).map_err(|_| Malformed("a sequence number too large"))?;
                    if refused(index, refusal).is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                if message.sequence == sent.acknowledged {
                    return Ok(ControlFlow::Break(()));
                }
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Passes each message about a sent request to `each`, with the index of the request, until
    /// `each` returns `Break`.
    fn receive<T>(
        &mut self,
        sent: &Sent,
        mut each: impl FnMut(u32, &Message<'_>) -> Result<ControlFlow<T>, NetlinkError>,
    ) -> Result<T, NetlinkError> {
        let mut lost = false;
        loop {
            let received = match self.socket.receive(&mut self.buffer, !lost) {
                // Answers to a batch that arrived before the overflow are still in the receive
                // buffer after `ENOBUFS`. The answer to a single request is incomplete.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) && sent.first < sent.last => {
                    lost = true;
                    continue;
                }
                Err(error) if lost && error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(NetlinkError::Receive(io::Error::from_raw_os_error(libc::ENOBUFS)));
                }
                received => received.map_err(NetlinkError::Receive)?,
            };
            for message in message::messages(received) {
                let message = message?;
                if (sent.first..=sent.last).contains(&message.sequence)
                    && let ControlFlow::Break(done) = each(message.sequence - sent.first, &message)?
                {
                    return Ok(done);
                }
            }
        }
    }

    /// The port of the socket in its network namespace (`nl_pid`). Notifications contain the port
    /// of the socket that made the change.
    ///
    /// # Errors
    /// The system does not report the port.
    pub fn port(&self) -> Result<u32, NetlinkError> {
        self.socket.port().map_err(NetlinkError::Open)
    }

    /// Reserves `count` sequence numbers and returns the first number.
    fn reserve(&mut self, count: u32) -> u32 {
        if self.sequence.checked_add(count).is_none() {
            self.sequence = 0;
        }
        let first = self.sequence + 1;
        self.sequence += count;
        first
    }
}

// Notifications: the kernel sends a message to every subscriber of a multicast group.

/// The result of one read of a [`Listener`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// No notification was available. The caller must wait until the descriptor is readable.
    Nothing,
    /// At least one notification was passed to the caller. More notifications may be available.
    Notifications,
    /// The receive buffer overflowed and notifications were lost. The caller must list the state
    /// again.
    Lost,
}

/// A socket that receives the notifications of multicast groups. Reads never block: wait for the
/// descriptor ([`AsFd`]) to become readable.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    buffer: Vec<u8>,
}

impl Listener {
    /// Subscribes to multicast groups of a netlink protocol in the calling thread's network
    /// namespace, for example group 7 (`NFNLGRP_NFTABLES`) of [`libc::NETLINK_NETFILTER`].
    ///
    /// Notifications that are not read yet fill the receive buffer. The kernel doubles the size of
    /// the buffer to account for its own overhead. A size above `net.core.rmem_max` needs
    /// `CAP_NET_ADMIN`. Without this capability the limit applies.
    ///
    /// # Errors
    /// The kernel creates no socket, or does not let the socket join a group. Groups of netfilter
    /// need `CAP_NET_ADMIN`.
    pub fn open(protocol: libc::c_int, groups: &[u32], receive_buffer_bytes: u32) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol, receive_buffer_bytes).map_err(NetlinkError::Open)?;
        for group in groups {
            let group = libc::c_int::try_from(*group).map_err(io::Error::other);
            group.and_then(|group| socket.join(group)).map_err(NetlinkError::Open)?;
        }
        Ok(Self { socket, buffer: vec![0; RECEIVE_BUFFER_BYTES] })
    }

    /// Makes the kernel drop notifications about changes that the connection with this port made
    /// ([`super::Connection::port`]). These notifications neither wake the reader nor fill the
    /// receive buffer.
    ///
    /// # Errors
    /// The kernel does not accept the filter.
    pub fn ignore_changes_of(&self, port: u32) -> Result<(), NetlinkError> {
        self.socket.ignore_changes_of(port).map_err(NetlinkError::Open)
    }

    /// Reads once without blocking and passes each notification to `each`.
    ///
    /// # Errors
    /// The read fails, or a message is malformed. Notifications already passed to `each` are valid.
    pub fn receive(&mut self, mut each: impl FnMut(Message<'_>)) -> Result<Heard, NetlinkError> {
        let received = match self.socket.receive(&mut self.buffer, false) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Heard::Nothing),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Heard::Lost),
            Err(error) => return Err(NetlinkError::Receive(error)),
        };
        for message in message::messages(received) {
            each(message?);
        }
        Ok(Heard::Notifications)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
