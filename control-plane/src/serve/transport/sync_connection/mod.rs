//! A connection that carries one `Discovery.Sync` and nothing else, as every agent's does: HTTP/2
//! as far as that takes (RFC 9113).
//!
//! What makes it cheap, in memory and time: it owns no buffers, since what is read and written
//! passes through scratch memory of the thread; it is visited in place
//! ([`crate::serve::context::Visits`]) instead of being woken; and messages that are ready together
//! go out as one TLS record by one call to the kernel. Nothing is taken from the cursor before the
//! connection can write it, so a reader that is slow skips to current values.
//!
//! A client that wants more than the stream is told so by GOAWAY, which leaves the stream as it is:
//! clients then open another connection, whose first request is not `Sync`, for everything else.

pub(crate) mod frame;
mod http2;
mod input;
mod io;
mod message;

use std::{
    cell::RefCell,
    io::{Error, ErrorKind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use rustls::ServerConnection;
use tokio::{net::TcpStream, time::Instant};

use super::connection_limits::Held;
use crate::{
    identity::Peer,
    serve::{
        context::{Signal, Visit, Visited},
        stream::Streams,
    },
};
use frame::{MAX_PAYLOAD_BYTES, PREFACE};
use http2::Http2;
use io::Io;

/// What is read at a time.
const READ_BYTES: usize = 16 << 10;

/// Plaintext written at a time: one TLS record.
const WRITE_BYTES: usize = MAX_PAYLOAD_BYTES as usize;

/// Bytes read, and bytes written, in one go before others have their turn.
const TURN_BYTES: usize = 128 << 10;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch { read: vec![0; READ_BYTES].into(), write: Vec::new() });
}

struct Scratch {
    read: Box<[u8]>,
    write: Vec<u8>,
}

/// See the module.
pub(crate) struct SyncConnection {
    signal: Arc<Signal>,
    state: Mutex<Option<State>>,
    /// As of the last visit.
    is_late: AtomicBool,
    _held: Held,
}

struct State {
    io: Io,
    http2: Http2,
    /// The kernel takes nothing at the moment.
    is_blocked: bool,
    /// Nothing is read at the moment.
    is_paused: bool,
    /// Nothing more is going to be written.
    is_closed: bool,
}

/// Serves a connection on which `first` has been read, the preface and the headers of `Sync` among
/// it. Returns the task.
pub(crate) fn serve(
    streams: &Arc<Streams>,
    peer: Peer,
    stream: TcpStream,
    tls: Option<ServerConnection>,
    first: &[u8],
    held: Held,
) -> impl Future<Output = ()> + Send + use<> {
    let signal = Arc::new(Signal::new());
    let mut http2 = Http2::new(Arc::clone(streams), peer, Arc::clone(&signal));
    http2.receive(&first[PREFACE.len().min(first.len())..]);
    let state = State { io: Io::new(stream, tls), http2, is_blocked: false, is_paused: false, is_closed: false };
    let connection = Arc::new(SyncConnection {
        signal,
        state: Mutex::new(Some(state)),
        is_late: AtomicBool::new(false),
        _held: held,
    });
    let visited = streams.context.visits.add(Arc::<SyncConnection>::clone(&connection));
    Serve { connection, _visited: visited }
}

/// The task of a connection: it reads, and writes when the kernel takes something again.
struct Serve {
    connection: Arc<SyncConnection>,
    _visited: Visited,
}

impl Future for Serve {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.connection.signal.register(cx.waker());
        let mut slot = self.connection.state();
        let Some(state) = slot.as_mut() else { return Poll::Ready(()) };
        let is_over = match SCRATCH.with_borrow_mut(|scratch| state.run(scratch, cx)) {
            Ok(()) => state.http2.is_over(),
            Err(error) => {
                state.http2.disconnected(&error);
                true
            }
        };
        if !is_over {
            return Poll::Pending;
        }
        let state = slot.take();
        drop(slot);
        // Outside of the lock: the session says to others that it has ended.
        drop(state);
        Poll::Ready(())
    }
}

impl SyncConnection {
    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Reads what has come and writes what there is, as far as the kernel has and takes it, within
    /// a turn.
    fn run(&mut self, scratch: &mut Scratch, cx: &mut Context<'_>) -> Result<(), Error> {
        let now = Instant::now();
        let mut read = 0;
        while !self.io.is_paused(now)
            && let Poll::Ready(bytes) = self.io.poll_read(cx, &mut scratch.read)?
        {
            if bytes == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.http2.heard(now);
            self.http2.receive(&scratch.read[..bytes]);
            read += bytes;
            if read >= TURN_BYTES {
                cx.waker().wake_by_ref();
                break;
            }
        }
        self.is_paused = self.io.is_paused(now);
        loop {
            match self.write(&mut scratch.write, now)? {
                Written::All => return Ok(()),
                Written::Turn => {
                    cx.waker().wake_by_ref();
                    return Ok(());
                }
                Written::Blocked => match self.io.poll_writable(cx)? {
                    Poll::Ready(()) => {}
                    Poll::Pending => return Ok(()),
                },
            }
        }
    }

    fn write(&mut self, scratch: &mut Vec<u8>, now: Instant) -> Result<Written, Error> {
        let mut total = 0;
        loop {
            let before = self.io.written_bytes();
            let is_flushed = self.io.flush()?;
            if self.is_blocked && self.io.written_bytes() > before {
                // A slow reader is alive.
                self.http2.heard(now);
            }
            self.is_blocked = !is_flushed;
            if self.is_blocked {
                return Ok(Written::Blocked);
            }
            if total >= TURN_BYTES {
                return Ok(Written::Turn);
            }
            scratch.clear();
            self.http2.fill(scratch, WRITE_BYTES, now);
            if scratch.is_empty() {
                if self.http2.is_closing() && !self.is_closed {
                    self.is_closed = true;
                    self.io.close()?;
                }
                return Ok(Written::All);
            }
            total += scratch.len();
            self.io.write(scratch)?;
        }
    }
}

/// How far writing came.
#[derive(PartialEq, Eq)]
enum Written {
    /// There is nothing more.
    All,
    /// As far as the kernel takes it.
    Blocked,
    /// As much as fits a turn.
    Turn,
}

impl Visit for SyncConnection {
    fn visit(&self, now: Instant) {
        let mut slot = self.state();
        let Some(state) = slot.as_mut() else { return };
        state.http2.keep_time(now);
        // A blocked one's task waits for the kernel to take more.
        let written = match state.is_blocked {
            true => Ok(Written::All),
            false => SCRATCH.with_borrow_mut(|scratch| state.write(&mut scratch.write, now)),
        };
        if let Err(error) = &written {
            state.http2.disconnected(error);
        }
        self.is_late.store(state.http2.is_late(now), Ordering::Relaxed);
        let is_idle = matches!(written, Ok(Written::All)) && !state.http2.is_over();
        // Nothing else wakes the task for what has come already.
        let reads_again = state.is_paused && !state.io.is_paused(now);
        drop(slot);
        if !is_idle || reads_again {
            self.signal.wake();
        }
    }

    fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }

    fn abort(&self) {
        let state = self.state().take();
        drop(state);
        self.signal.wake();
    }
}
