//! Sockets that get a RST once their peers have acknowledged all bytes. A socket that is reset at
//! once loses the bytes in its send buffer.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::net::sockopt;

use crate::unsafe_calls::has_unacknowledged_bytes;

/// The time between two looks at the sockets.
pub(super) const CHECK_MS: u64 = 20;
/// A peer that has not acknowledged all bytes after this time gets the RST.
const LONGEST_MS: u64 = 30_000;
/// The most sockets of a thread. Further sockets are reset at once, so that their number and the
/// cost of a look are bounded.
const MOST: usize = 256;

/// Closes a socket with a RST.
pub(super) fn reset(fd: OwnedFd) {
    // The option fails only on sockets that have no connection to reset.
    let _ = sockopt::set_socket_linger(&fd, Some(Duration::ZERO));
    drop(fd);
}

#[derive(Debug, Default)]
pub(super) struct Lingering {
    /// Sockets, and when each is reset at the latest.
    sockets: Vec<(OwnedFd, u64)>,
    next_check_ms: u64,
}

impl Lingering {
    pub(super) fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// Resets a socket after its peer has acknowledged all bytes.
    pub(super) fn reset_after_delivery(&mut self, socket: OwnedFd, now_ms: u64) {
        if self.sockets.len() < MOST && has_unacknowledged_bytes(&socket) {
            self.sockets.push((socket, now_ms + LONGEST_MS));
        } else {
            reset(socket);
        }
    }

    /// Resets the sockets whose time has come.
    pub(super) fn check(&mut self, now_ms: u64) {
        if self.is_empty() || now_ms < self.next_check_ms {
            return;
        }
        self.next_check_ms = now_ms + CHECK_MS;
        let is_due = |(socket, until_ms): &mut (OwnedFd, u64)| now_ms >= *until_ms || !has_unacknowledged_bytes(socket);
        self.sockets.extract_if(.., is_due).for_each(|(socket, _)| reset(socket));
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        self.sockets.drain(..).for_each(|(socket, _)| reset(socket));
    }
}
