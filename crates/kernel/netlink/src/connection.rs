//! A socket with its buffers, for lists, queries and batches of changes.

use std::{
    io,
    num::NonZeroU32,
    ops::ControlFlow,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::Duration,
};

use libc::c_int;
use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, getsockname,
        netlink::SocketAddrNetlink,
        recvfrom, send, socket_with,
        sockopt::{self, Timeout},
    },
};

use crate::{
    Malformed, NetlinkError, Refusal, Request,
    message::{self, Message},
};

/// The size of the receive buffer in bytes. The kernel sends at most 32 KiB at once.
pub(super) const RECEIVE_BUFFER_BYTES: usize = 64 * 1024;
/// The most requests in one send. Their answers must fit into the socket's receive buffer.
pub const BATCH_REQUESTS: usize = 128;
/// The maximum number of bytes in one send, unless a single request is larger. The kernel copies a
/// send into contiguous memory.
pub const BATCH_BYTES: usize = 64 * 1024;

/// The maximum capacity in bytes of the request buffer between sends.
const KEPT_BYTES: usize = 64 * 1024;

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
    /// thread's network namespace. Errors: the kernel creates no socket.
    pub fn open(protocol: libc::c_int) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol, BUFFER_BYTES).map_err(NetlinkError::Open)?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; RECEIVE_BUFFER_BYTES], outgoing: Vec::new() })
    }

    /// Requests a list and passes the type and payload of each message to `each`.
    /// Errors: Messages already passed to `each` are valid. After an error the dump is incomplete
    /// and the connection is unusable: open another connection.
    #[allow(clippy::needless_pass_by_value)] // callers make the request for this call
    pub fn dump(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> Result<Dumped, NetlinkError> {
        self.exchange(&request, false, |message| {
            each(message.kind, message.payload);
            Ok(())
        })
    }

    /// Requests a list once. `add` adds the payload of one message to the result.
    /// Errors: the errors of [`Connection::dump`], or a malformed message that `add` reports. After
    /// a malformed message the connection remains usable.
    pub fn list_once<L: Default>(
        &mut self,
        request: &Request,
        mut add: impl FnMut(&mut L, &[u8]) -> Result<(), Malformed>,
    ) -> Result<(L, Dumped), NetlinkError> {
        let mut found = L::default();
        let dumped = self.exchange(request, false, |message| add(&mut found, message.payload))?;
        Ok((found, dumped))
    }

    /// Like [`Self::list_once`], repeated a limited number of times until no change interrupts the
    /// list. Each attempt starts with an empty result. Errors: those of [`Connection::list_once`],
    /// or `EINTR` if every attempt was interrupted. A retry after `EINTR` may succeed.
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
    /// Errors: the kernel rejects the request, or the answer is lost, so the result is unknown.
    #[allow(clippy::needless_pass_by_value)] // callers make the request for this call
    pub fn ask(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> Result<(), NetlinkError> {
        self.exchange(&request, true, |message| {
            each(message.kind, message.payload);
            Ok(())
        })
        .map(drop)
    }

    /// Sends a query for a single object, and reads the last message of the answer. Errors: the
    /// errors of [`Connection::ask`], the error of `read`, or an answer without a message.
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
    /// Errors: the kernel may have executed none, some or all of the requests.
    pub fn execute_all(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<Vec<Refused>, NetlinkError> {
        let mut all_refused = Vec::new();
        self.execute(requests, |index, refusal| all_refused.push(Refused { index, refusal }))?;
        Ok(all_refused)
    }

    /// Sends requests, many in one send ([`BATCH_REQUESTS`], [`BATCH_BYTES`]), and waits until the
    /// kernel has executed them in order. `refused` receives the index of each rejected one; the
    /// others are executed. Only the last of each send asks for an acknowledgement, which would be
    /// expensive for each. No lists. Errors: the kernel may have executed none, some or all of the
    /// requests.
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

    /// Executes requests of one netfilter subsystem as one transaction in one send. The kernel
    /// executes either all requests or none.
    ///
    /// `refused` receives each rejection with the index of the request, or without an index if the
    /// kernel rejects the transaction as a whole. After any rejection, the kernel has changed
    /// nothing. The kernel also checks the requests after a rejected request, so `refused` may
    /// receive several rejections. The first rejection shows the cause. Errors that the kernel
    /// detects only at the end of the transaction are reported for the first request.
    ///
    /// # Errors
    /// If `refused` received a rejection, the kernel changed nothing. If not, it is unknown whether
    /// the kernel executed the transaction.
    pub fn transact(
        &mut self,
        subsystem: libc::c_int,
        requests: &[Request],
        mut refused: impl FnMut(Option<usize>, Refusal),
    ) -> Result<(), NetlinkError> {
        if requests.is_empty() {
            return Ok(());
        }
        let begin = Request::batch_limit(libc::NFNL_MSG_BATCH_BEGIN, subsystem);
        let end = Request::batch_limit(libc::NFNL_MSG_BATCH_END, subsystem);
        let all: Vec<_> = std::iter::once(&begin).chain(requests).chain([&end]).collect();
        // Kernels before 6.10 acknowledge neither the begin nor the end message. The last request
        // asks for the acknowledgement.
        let sent = self.send_together(all.into_iter(), requests.len())?;
        self.collect_refusals(&sent, |index, refusal| {
            refused(index.checked_sub(1), refusal);
            // The kernel may send no other answer when it rejects the transaction as a whole.
            if index == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    }

    /// Sends requests in one send of any length. The request with the index `acknowledged`, if any,
    /// requires an acknowledgement.
    fn send_together<'a>(
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
    fn collect_refusals(
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
    /// of the socket that made the change. Errors: the system does not report the port.
    pub fn port(&self) -> Result<u32, NetlinkError> {
        self.socket.port().map_err(NetlinkError::Open)
    }

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
    /// The receive buffer overflowed and notifications were lost: list the state again.
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
    /// namespace, such as group 7 (`NFNLGRP_NFTABLES`) of [`libc::NETLINK_NETFILTER`]. Unread
    /// notifications fill the receive buffer, which the kernel doubles. A size above
    /// `net.core.rmem_max` needs `CAP_NET_ADMIN`. Errors: the kernel creates no socket, or does not
    /// let it join a group. Groups of netfilter need `CAP_NET_ADMIN`.
    pub fn open(protocol: libc::c_int, groups: &[u32], receive_buffer_bytes: u32) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol, receive_buffer_bytes).map_err(NetlinkError::Open)?;
        for group in groups {
            let group = libc::c_int::try_from(*group).map_err(io::Error::other);
            group.and_then(|group| socket.join(group)).map_err(NetlinkError::Open)?;
        }
        Ok(Self { socket, buffer: vec![0; RECEIVE_BUFFER_BYTES] })
    }

    /// Makes the kernel drop notifications about changes of the connection with this port
    /// ([`super::Connection::port`]), so that they neither wake the reader nor fill the buffer.
    /// Errors: the kernel does not accept the filter.
    pub fn ignore_changes_of(&self, port: u32) -> Result<(), NetlinkError> {
        self.socket.ignore_changes_of(port).map_err(NetlinkError::Open)
    }

    /// Reads once without blocking and passes each notification to `each`. Errors: the read fails,
    /// or a message is malformed. Notifications already passed to `each` are valid.
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

// The netlink socket. All `unsafe` code of this crate is here.

/// The kernel queues its answers before `send` returns, so only an error leads to this timeout.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The initial size of the send buffer, and the size of the receive buffer, in bytes. Sizes above
/// about 200 KB (`net.core.wmem_max`, `net.core.rmem_max`) need `CAP_NET_ADMIN`.
pub(super) const BUFFER_BYTES: u32 = 1 << 20;

/// A blocking netlink socket that accepts messages only from the kernel.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    send_buffer_bytes: usize,
}

impl Socket {
    pub(super) fn open(protocol: c_int, receive_buffer_bytes: u32) -> io::Result<Self> {
        let number = u32::try_from(protocol).ok().and_then(NonZeroU32::new).map(Protocol::from_raw);
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, number)?;
        let mut socket = Self { fd, send_buffer_bytes: 0 };
        // Makes the kernel repeat only the header of a request in its error answers.
        socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, &1_i32)?;
        // Kernels before 4.12 have no extended acknowledgements, before 4.20 no strict checks.
        socket.set_option_if_known(libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 1)?;
        // With `NETLINK_GET_STRICT_CHK`, the kernel checks the headers of list requests and filters
        // the list by the fields of these headers.
        if protocol == libc::NETLINK_ROUTE {
            socket.set_option_if_known(libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 1)?;
        }
        socket.make_room(BUFFER_BYTES as usize)?;
        let bytes = receive_buffer_bytes as usize;
        limited(sockopt::set_socket_recv_buffer_size_force(&socket.fd, bytes), || {
            sockopt::set_socket_recv_buffer_size(&socket.fd, bytes)
        })?;
        sockopt::set_socket_timeout(&socket.fd, Timeout::Recv, Some(RECEIVE_TIMEOUT))?;
        // Without this call, the kernel assigns the port of the socket at the first send.
        bind(&socket.fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(socket)
    }

    #[allow(unsafe_code)]
    fn set_option<T: Copy>(&self, level: c_int, name: c_int, value: &T) -> io::Result<()> {
        let length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
        // SAFETY: the pointer and the length describe `value`, which lives until the call returns.
        match unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn set_option_if_known(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        match self.set_option(level, name, &value) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
            result => result,
        }
    }

    /// Ensures that the send buffer has room for one send of `bytes`.
    pub(super) fn make_room(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > self.send_buffer_bytes {
            limited(sockopt::set_socket_send_buffer_size_force(&self.fd, bytes), || {
                sockopt::set_socket_send_buffer_size(&self.fd, bytes)
            })?;
            self.send_buffer_bytes = bytes;
        }
        Ok(())
    }

    pub(super) fn join(&self, group: c_int) -> io::Result<()> {
        self.set_option(libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, &group)
    }

    pub(super) fn ignore_changes_of(&self, port: u32) -> io::Result<()> {
        // The position of `nlmsg_pid` in the header of a message. All messages that the kernel
        // sends together have the same port.
        const PORT_OFFSET: u32 = 12;
        // Bits of `linux/filter.h`: load a word, jump if it equals the constant, return.
        const LOAD_WORD: u16 = 0x20;
        const JUMP_IF_EQUAL: u16 = 0x15;
        const RETURN: u16 = 0x06;
        let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut program = [
            instruction(LOAD_WORD, 0, 0, PORT_OFFSET),
            // The load takes the bytes as a number in network byte order.
            instruction(JUMP_IF_EQUAL, 0, 1, u32::from_be_bytes(port.to_ne_bytes())),
            instruction(RETURN, 0, 0, 0),
            instruction(RETURN, 0, 0, u32::MAX),
        ];
        let length = u16::try_from(program.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
        self.set_option(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
    }

    pub(super) fn port(&self) -> io::Result<u32> {
        Ok(SocketAddrNetlink::try_from(getsockname(&self.fd)?)?.pid())
    }

    /// Sends to the kernel, which processes the requests before this function returns.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        Ok(retry_on_intr(|| send(&self.fd, bytes, SendFlags::empty())).map(drop)?)
    }

    /// Reads the kernel's next answer into `buffer`, and returns the filled part. `waits` waits for
    /// an answer. Otherwise, the call fails with `EAGAIN` if no answer is available.
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8], waits: bool) -> io::Result<&'a [u8]> {
        let flags = RecvFlags::TRUNC | if waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        loop {
            let (_, received, sender) = retry_on_intr(|| recvfrom(&self.fd, &mut buffer[..], flags))?;
            if received > buffer.len() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a netlink message longer than the buffer"));
            }
            // Privileged processes may send to this socket. Only the kernel has port 0.
            let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
            if sender.is_some_and(|sender| sender.pid() == 0) {
                return buffer.get(..received).ok_or_else(|| io::ErrorKind::InvalidData.into());
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Without `CAP_NET_ADMIN`, the system's limits of buffer sizes apply.
fn limited(forced: rustix::io::Result<()>, limit: impl FnOnce() -> rustix::io::Result<()>) -> io::Result<()> {
    Ok(match forced {
        Err(Errno::PERM) => limit(),
        result => result,
    }?)
}
