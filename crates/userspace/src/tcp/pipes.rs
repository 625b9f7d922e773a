//! Pipes for `splice`. A connection borrows a pipe only while bytes are in it.

use std::{io, os::fd::OwnedFd, sync::Arc};

use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};

use crate::stats::TcpCounters;

/// The wanted capacity of a pipe. The kernel limits it by `fs.pipe-max-size` and, for users
/// without `CAP_SYS_RESOURCE`, by `fs.pipe-user-pages-soft`.
const CAPACITY_BYTES: usize = 256 * 1024;
/// A pipe with less capacity is not used. The kernel gives one page to users above their limit.
pub(super) const MIN_CAPACITY_BYTES: usize = 64 * 1024;
/// Empty pipes that a thread keeps.
const KEPT: usize = 32;

#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) reader: OwnedFd,
    pub(super) writer: OwnedFd,
}

/// The pipes of a thread.
#[derive(Debug)]
pub(super) struct Pipes {
    empty: Vec<Pipe>,
    /// All pipes, including the borrowed ones.
    count: usize,
    limit: usize,
    counters: Arc<TcpCounters>,
}

impl Pipes {
    pub(super) fn new(limit: usize, counters: Arc<TcpCounters>) -> Self {
        Self { empty: Vec::new(), count: 0, limit, counters }
    }

    /// Lends an empty pipe. `None` if the limit is reached, or if the kernel gives no pipe.
    pub(super) fn borrow(&mut self) -> Option<Pipe> {
        if let Some(pipe) = self.empty.pop() {
            return Some(pipe);
        }
        let made = if self.count < self.limit { make().ok() } else { None };
        if made.is_some() {
            self.count += 1;
            self.counters.pipes.add(1);
        } else {
            self.counters.pipes_refused.add(1);
        }
        made
    }

    /// Takes back an empty pipe.
    pub(super) fn give_back(&mut self, pipe: Pipe) {
        if self.empty.len() < KEPT {
            self.empty.push(pipe);
        } else {
            self.discard(pipe);
        }
    }

    /// Closes a pipe that holds bytes of an ended connection.
    pub(super) fn discard(&mut self, pipe: Pipe) {
        self.count -= 1;
        self.counters.pipes.subtract(1);
        drop(pipe);
    }
}

fn make() -> io::Result<Pipe> {
    let (reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?;
    // An error leaves the default capacity, which is checked below.
    if fcntl_setpipe_size(&writer, CAPACITY_BYTES).is_err() && fcntl_getpipe_size(&writer)? < MIN_CAPACITY_BYTES {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(Pipe { reader, writer })
}
