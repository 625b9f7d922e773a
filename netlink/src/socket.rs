//! The netlink socket itself: the only `unsafe` of netlink.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use libc::c_int;

use super::Options;

/// Answers come from inside the kernel's work; this only ends what has gone wrong.
const RECEIVE_TIMEOUT_SECONDS: libc::time_t = 30;

/// A blocking netlink socket, to which the kernel alone sends.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn open(protocol: c_int, options: &Options) -> io::Result<Self> {
        // SAFETY: takes and returns integers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        check(fd)?;
        // SAFETY: the descriptor is open, ours, and nobody else's.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        // Refusals come without a copy of the request.
        socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, &1_i32)?;
        // Kernels before 4.12 have no extended acknowledgements, those before 4.20 no strict checks.
        socket.set_option_if_known(libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 1)?;
        if options.strict {
            socket.set_option_if_known(libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 1)?;
        }
        socket.set_buffer(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, options.send_buffer_bytes)?;
        socket.set_buffer(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, options.receive_buffer_bytes)?;
        let timeout = libc::timeval { tv_sec: RECEIVE_TIMEOUT_SECONDS, tv_usec: 0 };
        socket.set_option(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout)?;
        Ok(socket)
    }

    fn set_option<T: Copy>(&self, level: c_int, name: c_int, value: &T) -> io::Result<()> {
        let length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
        // SAFETY: the pointer and the length describe `value`, which lives until the call returns.
        let result =
            unsafe { libc::setsockopt(self.0.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length) };
        check(result).map(drop)
    }

    fn set_option_if_known(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        match self.set_option(level, name, &value) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
            result => result,
        }
    }

    /// Beyond the system's limit if we may, else up to it.
    fn set_buffer(&self, forced: c_int, limited: c_int, bytes: u32) -> io::Result<()> {
        let bytes = c_int::try_from(bytes).map_err(io::Error::other)?;
        match self.set_option(libc::SOL_SOCKET, forced, &bytes) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.set_option(libc::SOL_SOCKET, limited, &bytes)
            }
            result => result,
        }
    }

    /// Sends to the kernel, which does the work before this returns.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        retry(|| {
            // SAFETY: the pointer and the length describe `bytes`, which lives until the call returns.
            unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) }
        })
        .map(drop)
    }

    /// Waits for the kernel's next answer and puts it into `buffer`; the part of it that was filled.
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        loop {
            let (received, sender) = self.receive_from_anyone(buffer)?;
            if received > buffer.len() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a netlink message longer than the buffer"));
            }
            // Other processes may send to us where they have the right to; the kernel alone is number 0.
            if sender == 0 {
                return buffer.get(..received).ok_or_else(|| io::ErrorKind::InvalidData.into());
            }
        }
    }

    fn receive_from_anyone(&self, buffer: &mut [u8]) -> io::Result<(usize, u32)> {
        // SAFETY: the structure is plain numbers, for which zero is a value.
        let mut sender: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        let received = retry(|| {
            let mut length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or_default();
            // SAFETY: pointers and lengths describe `buffer` and `sender`, which are ours alone until the call returns.
            unsafe {
                libc::recvfrom(
                    self.0.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_TRUNC,
                    std::ptr::from_mut(&mut sender).cast(),
                    &raw mut length,
                )
            }
        })?;
        Ok((received, sender.nl_pid))
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
