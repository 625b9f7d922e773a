//! A stream as the body of a response of hyper's: for connections that carry other requests beside it.

use std::{convert::Infallible, future::poll_fn, sync::Arc, task::Poll};

use bytes::Bytes;
use futures::{Stream, stream};
use headgate_proto::v1;
use http::HeaderMap;
use http_body::Frame;
use tokio::{
    task::JoinHandle,
    time::{Instant, timeout},
};
use tonic::Streaming;

use super::{
    Lifecycle, Shared,
    agents::End,
    inbound,
    session::{self, Session},
    signal::Signal,
    streams::{Visit, Visited},
};
use crate::identity::Peer;

/// The frames of a response body.
pub(super) fn frames(
    shared: Arc<Shared>,
    peer: Peer,
    requests: Streaming<v1::AgentMessage>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    let start = State::Opening(Box::new((shared, peer, requests)));
    stream::unfold(start, |state| async move {
        let (frame, state) = match state {
            State::Opening(opening) => {
                let (shared, peer, requests) = *opening;
                match open(&shared, &peer, requests).await {
                    Ok(mut stream) => {
                        stream.step().await.map_or_else(|end| State::ended(&end), |frame| (frame, State::Open(stream)))
                    }
                    Err(end) => {
                        shared.count_end(&end, peer.address, "");
                        State::ended(&end)
                    }
                }
            }
            State::Open(mut stream) => match stream.step().await {
                Ok(frame) => (frame, State::Open(stream)),
                Err(end) => State::ended(&end),
            },
            State::Ended => return None,
        };
        Some((Ok(frame), state))
    })
}

enum State {
    Opening(Box<(Arc<Shared>, Peer, Streaming<v1::AgentMessage>)>),
    Open(Box<Open>),
    Ended,
}

impl State {
    fn ended(end: &End) -> (Frame<Bytes>, Self) {
        let mut trailers = HeaderMap::new();
        if let Err(status) = end.status.add_header(&mut trailers) {
            // Only metadata can fail to be a header, and there is none.
            tracing::error!(%status, "a stream's status cannot be written");
        }
        (Frame::trailers(trailers), Self::Ended)
    }
}

/// A stream that is open, with the task that reads it: a stream that cannot be written to still takes in ACKs.
struct Open {
    session: Session,
    signal: Arc<Signal>,
    inbound: JoinHandle<()>,
    _visited: Visited,
}

/// Waits for `Hello`, checks it, and enters the stream.
async fn open(shared: &Arc<Shared>, peer: &Peer, mut requests: Streaming<v1::AgentMessage>) -> Result<Box<Open>, End> {
    let mut lifecycle = shared.lifecycle.subscribe();
    let first = tokio::select! {
        first = timeout(shared.settings.hello_timeout, requests.message()) => first,
        _ = lifecycle.wait_for(|lifecycle| *lifecycle == Lifecycle::Ended) => return Err(session::stopping()),
    };
    let message = match first {
        Err(_) => return Err(session::no_hello_in_time(shared)),
        Ok(Err(status)) => return Err(inbound::failure(&status)),
        Ok(Ok(None)) => return Err(session::closed_before_hello()),
        Ok(Ok(Some(message))) => message,
    };
    let signal = Arc::new(Signal::new());
    // Visited before the first look, so that nothing is missed between the two.
    let visited = shared.streams.add(Arc::<Signal>::clone(&signal));
    let session = Session::open(shared, peer, &message, &signal)?;
    let inbound = tokio::spawn(inbound::read(requests, Arc::clone(session.agent()), Arc::clone(shared)));
    Ok(Box::new(Open { session, signal, inbound, _visited: visited }))
}

impl Open {
    /// The next frame, as soon as there is one.
    async fn step(&mut self) -> Result<Frame<Bytes>, End> {
        poll_fn(|cx| {
            self.signal.register(cx.waker());
            match self.session.next(Instant::now()) {
                Ok(Some(bytes)) => Poll::Ready(Ok(Frame::data(bytes))),
                Ok(None) => Poll::Pending,
                Err(end) => Poll::Ready(Err(end)),
            }
        })
        .await
    }
}

impl Visit for Signal {
    fn visit(&self, _: Instant) {
        self.wake();
    }

    fn abort(&self) {
        // The server that carries the stream is aborted as well.
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.inbound.abort();
    }
}
