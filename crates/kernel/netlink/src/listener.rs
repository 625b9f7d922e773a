//! Notifications: the kernel sends a message to every subscriber of a multicast group.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use super::{Message, NetlinkError, connection::RECEIVE_BUFFER_BYTES, message, socket::Socket};

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
