//! One open watch: a response body that sends one JSON document per line.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::{
    sync::watch::Receiver,
    time::{Instant, sleep, sleep_until},
};

use super::{
    http::{Body, Connection, Params, cut, with_headers},
    kinds::Kind,
    state::{Piece, Shared},
    status::Failure,
};

/// The pause between half an event and the cut. During this pause the server writes the half event
/// to the socket.
const CUT_PAUSE: Duration = Duration::from_millis(20);

/// The first bookmark of a watch is sent at least this long before the end of the watch, if the
/// watch is longer than this time. `cacheWatcher.nextBookmarkTime` of the real server has the same
/// rule.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);

/// The body of one watch. It is dropped also when the client disconnects.
struct Session {
    shared: Arc<Shared>,
    socket: Connection,
    id: u64,
    kind: Kind,
    changes: Receiver<()>,
    /// `None` if the watch gets no bookmarks.
    next_bookmark: Option<Instant>,
    deadline: Instant,
}

/// Opens a watch.
///
/// # Errors
/// The version is too old. The caller sends the failure as an HTTP code or as an ERROR event.
pub(super) fn open(
    shared: &Arc<Shared>,
    socket: &Connection,
    kind: Kind,
    params: Params,
) -> Result<Response<Body>, Failure> {
    // If the client sets no time-out, the real server chooses a random time-out of at least half an
    // hour.
    let seconds = params.timeout_seconds.unwrap_or_else(|| fastrand::u64(1_800..3_600)).min(86_400);
    let (now, allows_bookmarks) = (Instant::now(), params.bookmarks);
    let deadline = now + Duration::from_secs(seconds);
    let changes = shared.subscribe();
    let (id, options) = {
        let mut state = shared.lock();
        (state.open_watch(kind, params)?, state.options.clone())
    };
    let next_bookmark = (allows_bookmarks && options.bookmarks).then(|| {
        let (next, last) = (now + options.bookmark_interval, deadline - LAST_BOOKMARK);
        if last > now { next.min(last) } else { next }
    });
    let (shared, socket) = (shared.clone(), socket.clone());
    let session = Session { shared, socket, id, kind, changes, next_bookmark, deadline };
    let pieces = stream::unfold(session, |mut session| async move {
        let piece = session.next().await?;
        Some((piece.map(Frame::data), session))
    });
    Ok(with_headers(StatusCode::OK, BodyExt::boxed_unsync(StreamBody::new(pieces))))
}

impl Session {
    /// The next piece of the body. `None` ends the body. An error cuts the connection.
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            self.changes.borrow_and_update();
            let piece = self.shared.lock().take_piece(self.id);
            match piece {
                Some(Piece::Bytes(bytes)) => return Some(Ok(bytes)),
                Some(Piece::End) => return None,
                Some(Piece::Cut(how)) => {
                    sleep(CUT_PAUSE).await;
                    return Some(Err(cut(&self.socket, how)));
                }
                None => self.wait().await,
            }
        }
    }

    async fn wait(&mut self) {
        let (is_blocked, is_endless) = {
            let state = self.shared.lock();
            (state.blocked.contains(&self.kind), state.endless.contains(&self.kind))
        };
        let next_bookmark = self.next_bookmark.filter(|_| !is_blocked);
        tokio::select! {
            _ = self.changes.changed() => {}
            () = sleep_until(self.deadline), if !is_endless => {
                let mut state = self.shared.lock();
                if next_bookmark.is_some() {
                    state.push_bookmark(self.id);
                }
                state.push_end(self.id);
            }
            () = sleep_until(next_bookmark.unwrap_or(self.deadline)), if next_bookmark.is_some() => {
                let mut state = self.shared.lock();
                state.push_bookmark(self.id);
                self.next_bookmark = Some(Instant::now() + state.options.bookmark_interval);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.lock().watches.remove(&self.id);
    }
}
