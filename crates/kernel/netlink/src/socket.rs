//! The netlink socket. All `unsafe` code of this crate is here.
#![allow(unsafe_code)]

use std::{
    io,
    num::NonZeroU32,
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

/// The kernel queues its answers before `send` returns, so a read reaches this timeout only after
/// an error.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The initial size of the send buffer, and the size of the receive buffer of a connection, in
/// bytes. Sizes above the kernel's limits of about 200 KB (`net.core.wmem_max`,
/// `net.core.rmem_max`) need `CAP_NET_ADMIN`; without this capability the limits apply.
pub(super) const BUFFER_BYTES: u32 = 1 << 20;

/// A blocking netlink socket that accepts messages only from the kernel.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    /// The requested size of the send buffer.
    send_buffer_bytes: usize,
}

impl Socket {
    pub(super) fn open(protocol: c_int, receive_buffer_bytes: u32) -> io::Result<Self> {
        let number = u32::try_from(protocol).ok().and_then(NonZeroU32::new).map(Protocol::from_raw);
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, number)?;
        let mut socket = Self { fd, send_buffer_bytes: 0 };
        // Makes the kernel repeat only the header of a request in its error answers.
        socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, &1_i32)?;
        // Kernels before 4.12 have no extended acknowledgements, and kernels before 4.20 no strict
        // checks.
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

    /// Subscribes to a multicast group.
    pub(super) fn join(&self, group: c_int) -> io::Result<()> {
        self.set_option(libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, &group)
    }

    /// Makes the kernel drop notifications about changes that the socket with this port made.
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

    /// The port of the socket, which identifies it in its network namespace.
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
            // Other processes with sufficient privileges may send to this socket. Only the kernel
            // has port 0.
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
