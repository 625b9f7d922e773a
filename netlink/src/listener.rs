//! Multicast groups: the kernel tells every subscriber of a change.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use super::{NetlinkError, Options, connection::RECEIVE_BUFFER_BYTES, message, socket::Socket};

/// A message to all subscribers of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification<'a> {
    /// The message's type.
    pub kind: u16,
    /// The socket that made the change ([`super::Connection::port`]); 0 for the kernel itself.
    pub port: u32,
    /// What follows the message's header.
    pub payload: &'a [u8],
}

/// What one read of a [`Listener`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// Nothing waits; wait until the descriptor is readable.
    Nothing,
    /// Notifications were handed out. More may wait.
    Notifications,
    /// The receive buffer overflowed and notifications are lost. Read the state anew.
    Lost,
}

/// A socket that receives the notifications of multicast groups. Reading never blocks: wait for the
/// descriptor ([`AsFd`]) to become readable.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    buffer: Vec<u8>,
}

impl Listener {
    /// Subscribes to groups of a netlink family, such as 7 (`NFNLGRP_NFTABLES`) of
    /// [`libc::NETLINK_NETFILTER`], in the calling thread's network namespace.
    ///
    /// # Errors The system gives us no socket, or does not let us join: netfilter's groups need
    /// `CAP_NET_ADMIN`.
    pub fn open(protocol: libc::c_int, groups: &[u32], options: &Options) -> Result<Self, NetlinkError> {
        let socket = Socket::open(protocol, options).map_err(NetlinkError::Open)?;
        for group in groups {
            let group = libc::c_int::try_from(*group).map_err(io::Error::other);
            group.and_then(|group| socket.join(group)).map_err(NetlinkError::Open)?;
        }
        Ok(Self { socket, buffer: vec![0; RECEIVE_BUFFER_BYTES] })
    }

    /// Reads once, without waiting, and hands out what came.
    ///
    /// # Errors
    /// Receiving fails, or a message is malformed. What was handed out until then is true.
    pub fn receive(&mut self, mut each: impl FnMut(Notification<'_>)) -> Result<Heard, NetlinkError> {
        let received = match self.socket.receive_now(&mut self.buffer) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Heard::Nothing),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Heard::Lost),
            Err(error) => return Err(NetlinkError::Receive(error)),
        };
        for message in message::messages(received) {
            let message = message?;
            each(Notification { kind: message.kind, port: message.port, payload: message.payload });
        }
        Ok(Heard::Notifications)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
