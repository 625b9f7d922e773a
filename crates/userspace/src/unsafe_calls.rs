//! The system calls for which rustix has no safe function.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

/// Whether the send buffer has bytes (SIOCOUTQ, tcp(7)). A failed socket has none left.
pub(crate) fn has_unacknowledged_bytes(socket: &OwnedFd) -> bool {
    let mut bytes: c_int = 0;
    // SAFETY: the descriptor is open, and TIOCOUTQ, which equals SIOCOUTQ, writes one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    result == 0 && bytes > 0
}

/// Lets the kernel fragment the datagrams of an IPv6 socket (IPV6_DONTFRAG, ipv6(7)).
pub(crate) fn allow_fragments(socket: &OwnedFd) -> io::Result<()> {
    let no: c_int = 0;
    let length = libc::socklen_t::try_from(size_of::<c_int>()).map_err(io::Error::other)?;
    let (level, option, value) = (libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, (&raw const no).cast());
    // SAFETY: the descriptor is open, and the kernel reads one int.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
