//! The netlink socket itself: the only `unsafe` of netlink.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use libc::c_int;

/// Answers come from inside the kernel's work; this only ends what has gone wrong.
const RECEIVE_TIMEOUT_SECONDS: libc::time_t = 30;

/// A blocking netlink socket, to which the kernel alone sends.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn open(protocol: c_int) -> io::Result<Self> {
        // SAFETY: takes and returns integers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        check(fd)?;
        // SAFETY: the descriptor is open, ours, and nobody else's.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        // Refusals come without a copy of the request.
        socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, &1_i32)?;
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

    /// Sends to the kernel, which does the work before this returns.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        retry(|| {
            // SAFETY: the pointer and the length describe `bytes`, which lives until the call returns.
            unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) }
        })
        .map(drop)
    }

    /// Waits for the next answer and puts it into `buffer`; its length.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let received = retry(|| {
            // SAFETY: the pointer and the length describe `buffer`, which is ours alone until the call returns.
            unsafe { libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_TRUNC) }
        })?;
        if received > buffer.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a netlink message longer than the buffer"));
        }
        Ok(received)
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
