//! The netlink socket. All `unsafe` code of this crate is here.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use libc::c_int;

/// The kernel queues its answers before `send` returns, so a read reaches this timeout only after
/// an error.
const RECEIVE_TIMEOUT_SECONDS: libc::time_t = 30;

/// The initial size of the send buffer, and the size of the receive buffer of a connection, in
/// bytes. Sizes above the kernel's limits of about 200 KB (`net.core.wmem_max`,
/// `net.core.rmem_max`) need `CAP_NET_ADMIN`; without this capability the limits apply.
pub(super) const BUFFER_BYTES: u32 = 1 << 20;

/// A blocking netlink socket that accepts messages only from the kernel.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    /// The requested size of the send buffer.
    send_buffer_bytes: u32,
}

impl Socket {
    pub(super) fn open(protocol: c_int, receive_buffer_bytes: u32) -> io::Result<Self> {
        // SAFETY: the call takes and returns only integers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        check(fd)?;
        // SAFETY: the descriptor is open, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = Self { fd, send_buffer_bytes: BUFFER_BYTES };
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
        socket.set_buffer(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, BUFFER_BYTES)?;
        socket.set_buffer(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, receive_buffer_bytes)?;
        let timeout = libc::timeval { tv_sec: RECEIVE_TIMEOUT_SECONDS, tv_usec: 0 };
        socket.set_option(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout)?;
        socket.bind()?;
        Ok(socket)
    }

    fn set_option<T: Copy>(&self, level: c_int, name: c_int, value: &T) -> io::Result<()> {
        let length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
        // SAFETY: the pointer and the length describe `value`, which lives until the call returns.
        let result =
            unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length) };
        check(result).map(drop)
    }

    fn set_option_if_known(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        match self.set_option(level, name, &value) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
            result => result,
        }
    }

    /// Sets a buffer size. Without `CAP_NET_ADMIN` the system's limit applies.
    fn set_buffer(&self, forced: c_int, limited: c_int, bytes: u32) -> io::Result<()> {
        let bytes = c_int::try_from(bytes).map_err(io::Error::other)?;
        match self.set_option(libc::SOL_SOCKET, forced, &bytes) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.set_option(libc::SOL_SOCKET, limited, &bytes)
            }
            result => result,
        }
    }

    /// Ensures that the send buffer has room for one send of `bytes`.
    pub(super) fn make_room(&mut self, bytes: usize) -> io::Result<()> {
        let bytes = u32::try_from(bytes).map_err(io::Error::other)?;
        if bytes > self.send_buffer_bytes {
            self.set_buffer(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, bytes)?;
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
        // SAFETY: the structure consists of plain numbers, for which zero is valid.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        let mut length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or_default();
        // SAFETY: the pointers refer to `address` and its length. Nothing else uses them during the
        // call.
        check(unsafe {
            libc::getsockname(self.fd.as_raw_fd(), std::ptr::from_mut(&mut address).cast(), &raw mut length)
        })?;
        Ok(address.nl_pid)
    }

    /// Assigns a port to the socket. Without this call, the kernel assigns the port at the first
    /// send.
    pub(super) fn bind(&self) -> io::Result<()> {
        // SAFETY: the structure consists of plain numbers, for which zero is valid.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).map_err(io::Error::other)?;
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).map_err(io::Error::other)?;
        // SAFETY: pointer and length describe `address`, which lives until the call returns.
        check(unsafe { libc::bind(self.fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), length) }).map(drop)
    }

    /// Sends to the kernel, which processes the requests before this function returns.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        retry(|| {
            // SAFETY: pointer and length describe `bytes`, which lives until the call returns.
            unsafe { libc::send(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) }
        })
        .map(drop)
    }

    /// Waits for the kernel's next answer and reads it into `buffer`. Returns the filled part.
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        self.receive_with(0, buffer)
    }

    /// Like [`Self::receive`], but without waiting. Fails with `EAGAIN` if no answer is available.
    pub(super) fn receive_now<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        self.receive_with(libc::MSG_DONTWAIT, buffer)
    }

    fn receive_with<'a>(&self, flags: c_int, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        loop {
            let (received, sender) = self.receive_from_anyone(flags, buffer)?;
            if received > buffer.len() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a netlink message longer than the buffer"));
            }
            // Other processes with sufficient privileges may send to this socket. Only the kernel
            // has port 0.
            if sender == 0 {
                return buffer.get(..received).ok_or_else(|| io::ErrorKind::InvalidData.into());
            }
        }
    }

    fn receive_from_anyone(&self, flags: c_int, buffer: &mut [u8]) -> io::Result<(usize, u32)> {
        // SAFETY: the structure consists of plain numbers, for which zero is valid.
        let mut sender: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        let received = retry(|| {
            let mut length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or_default();
            // SAFETY: pointers and lengths describe `buffer` and `sender`. Nothing else uses them
            // during the call.
            unsafe {
                libc::recvfrom(
                    self.fd.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_TRUNC | flags,
                    std::ptr::from_mut(&mut sender).cast(),
                    &raw mut length,
                )
            }
        })?;
        Ok((received, sender.nl_pid))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        let result = call();
        match usize::try_from(result) {
            Ok(length) => return Ok(length),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
