//! A stream as the body of an HTTP response, for connections that carry other requests beside it.

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
    Streams, inbound,
    session::{self, Session},
};
use crate::{
    identity::Peer,
    serve::{
        context::{Lifecycle, Signal, Visited},
        fleet::End,
    },
};

/// The frames of a response body.
pub(crate) fn frames(
    streams: Arc<Streams>,
    peer: Peer,
    requests: Streaming<v1::AgentMessage>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    let start = State::Opening(Box::new((streams, peer, requests)));
    stream::unfold(start, |state| async move {
        let (frame, state) = match state {
            State::Opening(opening) => {
                let (streams, peer, requests) = *opening;
                match open(&streams, &peer, requests).await {
                    Ok(mut stream) => {
                        stream.step().await.map_or_else(|end| State::ended(&end), |frame| (frame, State::Open(stream)))
                    }
                    Err(end) => {
                        end.record(&streams.context, peer.address, "");
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
    Opening(Box<(Arc<Streams>, Peer, Streaming<v1::AgentMessage>)>),
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

/// An open stream, with the task that reads it, so that ACKs are taken in also when the stream
/// cannot be written to.
struct Open {
    session: Session,
    signal: Arc<Signal>,
    inbound: JoinHandle<()>,
    _visited: Visited,
}

/// Waits for `Hello`, checks it, and enters the stream.
async fn open(
    streams: &Arc<Streams>,
    peer: &Peer,
    mut requests: Streaming<v1::AgentMessage>,
) -> Result<Box<Open>, End> {
    let mut lifecycle = streams.context.lifecycle.subscribe();
    let first = tokio::select! {
        first = timeout(streams.context.settings.hello_timeout, requests.message()) => first,
        _ = lifecycle.wait_for(|lifecycle| *lifecycle == Lifecycle::Ended) => return Err(session::stopping()),
    };
    let message = match first {
        Err(_) => return Err(session::no_hello_in_time(&streams.context)),
        Ok(Err(status)) => return Err(inbound::failure(&status)),
        Ok(Ok(None)) => return Err(session::closed_before_hello()),
        Ok(Ok(Some(message))) => message,
    };
    let signal = Arc::new(Signal::new());
    // Visited before the first look, so that nothing is missed between the two.
    let visited = streams.context.visits.add(Arc::<Signal>::clone(&signal));
    let session = Session::open(streams, peer, &message, &signal)?;
    let inbound = tokio::spawn(inbound::read(requests, Arc::clone(session.agent()), Arc::clone(&streams.context)));
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

impl Drop for Open {
    fn drop(&mut self) {
        self.inbound.abort();
    }
}
