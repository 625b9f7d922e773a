//! One agent's stream: what comes next, asked for one message at a time.
//!
//! There is no queue between the store and the connection. When the connection can take a message, the body is polled, and the next one is looked
//! up at the stream's cursor; a connection that takes nothing costs nothing.

use std::{collections::VecDeque, convert::Infallible, sync::Arc};

use bytes::Bytes;
use futures::{Stream, stream};
use headgate_core::Node;
use headgate_proto::{node_to_wire, v1};
use http::HeaderMap;
use http_body::Frame;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};
use tonic::{Status, Streaming};
use v1::server_message::Body;

use super::{
    Lifecycle, Settings, Shared,
    agents::{Agent, End},
    hello::{self, Admitted},
    inbound,
};
use crate::{
    identity::{Expiry, Peer},
    store::{Cursor, NotYet, ResumeMode, Resumption, server_frame},
};

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
                    Ok(mut session) => {
                        session.step().await.map_or_else(|end| State::ended(&end), |frame| State::open(session, frame))
                    }
                    Err(end) => {
                        shared.count_end(&end, peer.address, "");
                        State::ended(&end)
                    }
                }
            }
            State::Open(mut session) => match session.step().await {
                Ok(frame) => (frame, State::Open(session)),
                Err(end) => State::ended(&end),
            },
            State::Ended => return None,
        };
        Some((Ok(frame), state))
    })
}

enum State {
    Opening(Box<(Arc<Shared>, Peer, Streaming<v1::AgentMessage>)>),
    Open(Box<Session>),
    Ended,
}

impl State {
    fn open(session: Box<Session>, frame: Frame<Bytes>) -> (Frame<Bytes>, Self) {
        (frame, Self::Open(session))
    }

    fn ended(end: &End) -> (Frame<Bytes>, Self) {
        let mut trailers = HeaderMap::new();
        if let Err(status) = end.status.add_header(&mut trailers) {
            // Only metadata can fail to be a header, and there is none.
            tracing::error!(%status, "a stream's status cannot be written");
        }
        (Frame::trailers(trailers), Self::Ended)
    }
}

/// Waits for `Hello`, checks it, and enters the stream.
async fn open(
    shared: &Arc<Shared>,
    peer: &Peer,
    mut requests: Streaming<v1::AgentMessage>,
) -> Result<Box<Session>, End> {
    let mut lifecycle = shared.lifecycle.subscribe();
    let limit = shared.settings.hello_timeout;
    let first = tokio::select! {
        first = timeout(limit, requests.message()) => first,
        _ = lifecycle.wait_for(|lifecycle| *lifecycle == Lifecycle::Ended) => return Err(stopping()),
    };
    let message = match first {
        Err(_) => {
            let text = format!("no Hello within {} s", limit.as_secs());
            return Err(End::refusal("no_hello", Status::deadline_exceeded(text)));
        }
        Ok(Err(status)) => return Err(inbound::failure(&status)),
        Ok(Ok(None)) => {
            return Err(End::refusal("no_hello", Status::invalid_argument("the stream closed before Hello")));
        }
        Ok(Ok(Some(message))) => message,
    };
    let Some(v1::agent_message::Body::Hello(hello)) = message.body else {
        return Err(End::refusal("no_hello", Status::invalid_argument("the first message of a stream must be Hello")));
    };
    let admitted = hello::admit(&hello, peer)?;
    Ok(Box::new(Session::start(Arc::clone(shared), peer, &hello, admitted, requests)))
}

fn stopping() -> End {
    End::plain("stopping", Status::unavailable("this replica stops"))
}

fn next_heartbeat(settings: &Settings, expiry: Option<Expiry>) -> Instant {
    let next = Instant::now() + settings.heartbeat_interval;
    expiry.map_or(next, |expiry| next.min(expiry.at))
}

/// A stream whose `Hello` was accepted.
struct Session {
    shared: Arc<Shared>,
    agent: Arc<Agent>,
    inbound: JoinHandle<()>,
    position: Position,
    /// At most `Welcome` and one `OwnNode`.
    first: VecDeque<Bytes>,
    node: watch::Receiver<Option<Arc<Node>>>,
    node_revision: u64,
    head: watch::Receiver<u64>,
    ended: watch::Receiver<Option<End>>,
    lifecycle: watch::Receiver<Lifecycle>,
    has_drained: bool,
    /// Not after `expiry`, so that one timer serves both.
    next_heartbeat: Instant,
    /// An identity that has expired keeps no stream.
    expiry: Option<Expiry>,
    has_resumed: bool,
}

enum Position {
    /// Until this replica has synced and is not behind the agent.
    Waiting(Box<Waiting>),
    At(Cursor),
}

struct Waiting {
    resumption: Resumption,
    synced: watch::Receiver<bool>,
    moves: watch::Receiver<u64>,
    /// When waiting for a source that is behind ends; set once that wait begins.
    behind_until: Option<Instant>,
}

impl Session {
    fn start(
        shared: Arc<Shared>,
        peer: &Peer,
        hello: &v1::Hello,
        admitted: Admitted,
        requests: Streaming<v1::AgentMessage>,
    ) -> Self {
        let store = &shared.store;
        let (synced, moves, head) = (store.watch_synced(), store.moves(), store.head());
        let (mode, begun) = Resumption::begin(store, admitted.resume);
        let agent = Arc::new(Agent::new(admitted.node, peer.address, hello, mode));
        let position = match begun {
            Ok(cursor) => {
                agent.set_sent_version(cursor.version());
                Position::At(cursor)
            }
            Err(resumption) => Position::Waiting(Box::new(Waiting { resumption, synced, moves, behind_until: None })),
        };
        shared.agents.enter(&agent);
        shared.metrics.stream_opened();
        shared.metrics.count_resume(mode);
        tracing::info!(node = %agent.node, address = %peer.address, resume = mode.as_str(), "agent connected");
        let welcome = server_frame(Body::Welcome(v1::Welcome {
            replica: shared.settings.replica_name.clone(),
            epoch: store.epoch(),
            resume: match mode {
                ResumeMode::Log => v1::welcome::ResumeMode::Log,
                ResumeMode::Digests => v1::welcome::ResumeMode::Digests,
                ResumeMode::Full => v1::welcome::ResumeMode::Full,
            }
            .into(),
            heartbeat_interval_ms: shared.settings.heartbeat_interval_ms(),
            behind_wait_ms: shared.settings.behind_wait_ms(),
        }));
        let expiry = peer.expiry();
        let mut node = store.follow_node(&agent.node);
        node.mark_changed();
        Self {
            inbound: tokio::spawn(inbound::read(requests, Arc::clone(&agent), Arc::clone(&shared.metrics))),
            position,
            first: VecDeque::from([welcome]),
            node,
            node_revision: 0,
            head,
            ended: agent.ended(),
            lifecycle: shared.lifecycle.subscribe(),
            has_drained: false,
            next_heartbeat: next_heartbeat(&shared.settings, expiry),
            expiry,
            has_resumed: false,
            agent,
            shared,
        }
    }

    /// The next frame, as soon as there is one.
    async fn step(&mut self) -> Result<Frame<Bytes>, End> {
        loop {
            if let Some(bytes) = self.poll_next()? {
                self.shared.metrics.count_sent(bytes.len());
                return Ok(Frame::data(bytes));
            }
            self.wait().await;
        }
    }

    /// The next message, if there is one now.
    fn poll_next(&mut self) -> Result<Option<Bytes>, End> {
        if let Some(end) = self.ended.borrow_and_update().clone() {
            return Err(end);
        }
        let lifecycle = *self.lifecycle.borrow_and_update();
        if lifecycle == Lifecycle::Ended {
            return Err(stopping());
        }
        if let Some(bytes) = self.first.pop_front() {
            return Ok(Some(bytes));
        }
        if lifecycle == Lifecycle::Draining && !self.has_drained {
            self.has_drained = true;
            return Ok(Some(self.drain()));
        }
        if self.next_heartbeat <= Instant::now() {
            if let Some(denied) = self.expiry.and_then(Expiry::due) {
                // Through the agent, so that it is counted as what it is.
                self.agent.end(End::refusal(denied.reason(), denied.into()));
                return self.poll_next();
            }
            return Ok(Some(self.heartbeat()));
        }
        // Before the source has synced there may be nodes that are just not listed yet.
        if self.shared.store.is_synced() && self.node.has_changed().unwrap_or(false) {
            return Ok(Some(self.own_node()));
        }
        if let Position::Waiting(waiting) = &mut self.position {
            let Some(cursor) = waiting.place(&self.shared, &self.agent) else { return Ok(None) };
            self.position = Position::At(cursor);
        }
        self.resource_message()
    }

    fn resource_message(&mut self) -> Result<Option<Bytes>, End> {
        let Position::At(cursor) = &mut self.position else { return Ok(None) };
        // Seen before the look, so that a version that comes meanwhile wakes us.
        self.head.borrow_and_update();
        let snapshots = cursor.snapshots();
        let bytes = match self.shared.store.next_frame(cursor) {
            Ok(bytes) => bytes,
            Err(error) => {
                // Through the agent, so that it is counted as what it is.
                self.agent.end(End::plain("too_slow", Status::unavailable(error.to_string())));
                return self.poll_next();
            }
        };
        if cursor.snapshots() > snapshots {
            self.shared.metrics.count_snapshot();
        }
        self.agent.set_sent_version(cursor.version());
        let is_resumed = if self.agent.resume == ResumeMode::Log { bytes.is_none() } else { cursor.is_complete() };
        if is_resumed && !self.has_resumed {
            self.has_resumed = true;
            self.agent.resumed_resources.store(cursor.resources(), std::sync::atomic::Ordering::Relaxed);
            self.shared.metrics.count_resumed_resources(cursor.resources());
        }
        Ok(bytes)
    }

    /// Until something may have changed. Spurious wake-ups are harmless.
    async fn wait(&mut self) {
        let is_waiting = matches!(self.position, Position::Waiting(_));
        tokio::select! {
            _ = self.ended.changed() => {}
            _ = self.lifecycle.changed() => {}
            () = sleep_until(self.next_heartbeat) => {}
            Ok(()) = self.head.changed(), if !is_waiting => {}
            () = node_change(&mut self.node), if self.shared.store.is_synced() => {}
            () = waiting_change(&mut self.position), if is_waiting => {}
        }
    }

    fn heartbeat(&mut self) -> Bytes {
        self.next_heartbeat = next_heartbeat(&self.shared.settings, self.expiry);
        let source_age_ms = u64::try_from(self.shared.store.source_age().as_millis()).unwrap_or(u64::MAX);
        server_frame(Body::Heartbeat(v1::Heartbeat { head_version: self.shared.store.version(), source_age_ms }))
    }

    fn drain(&self) -> Bytes {
        let reconnect_within_ms = self.shared.settings.drain_grace_ms();
        server_frame(Body::Drain(v1::Drain { reconnect_within_ms, reason: "this replica stops".into() }))
    }

    fn own_node(&mut self) -> Bytes {
        self.node_revision += 1;
        let node = self.node.borrow_and_update().as_deref().map(node_to_wire);
        server_frame(Body::OwnNode(v1::OwnNode { revision: self.node_revision, node }))
    }
}

/// Until the node changes. It stays marked as changed, since it has not been sent by then.
async fn node_change(node: &mut watch::Receiver<Option<Arc<Node>>>) {
    if node.changed().await.is_err() {
        // The store is gone, and with it everything that could happen.
        std::future::pending::<()>().await;
    }
    node.mark_changed();
}

async fn waiting_change(position: &mut Position) {
    let Position::Waiting(waiting) = position else { return };
    let behind_until = waiting.behind_until;
    tokio::select! {
        Ok(()) = waiting.synced.changed() => {}
        Ok(()) = waiting.moves.changed() => {}
        () = async { sleep_until(behind_until.unwrap_or_else(Instant::now)).await }, if behind_until.is_some() => {}
        else => std::future::pending().await,
    }
}

impl Waiting {
    /// The agent's place, once it need not wait any longer.
    fn place(&mut self, shared: &Shared, agent: &Agent) -> Option<Cursor> {
        // Seen before the look, so that what comes meanwhile wakes us.
        self.synced.borrow_and_update();
        self.moves.borrow_and_update();
        let (kind, here, there) = match self.resumption.go_on(&shared.store) {
            Ok(cursor) => return Some(cursor),
            Err(NotYet::Unlisted) => return None,
            Err(NotYet::Behind { kind, here, there }) => (kind, here, there),
        };
        let Some(until) = self.behind_until else {
            self.behind_until = Some(Instant::now() + shared.settings.behind_wait);
            shared.metrics.count_behind_wait();
            tracing::info!(node = %agent.node, ?kind, here, there, "the source is behind what the agent has: it waits");
            return None;
        };
        if until > Instant::now() {
            return None;
        }
        shared.metrics.count_behind_wait_expired();
        tracing::warn!(node = %agent.node, ?kind, here, there,
            "the source is still behind what the agent has (a restored etcd?): the agent goes back to this replica's state");
        Some(self.resumption.go_back(&shared.store))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.inbound.abort();
        self.shared.agents.leave(&self.agent);
        self.shared.metrics.stream_closed();
        let end = self.agent.ended().borrow().clone();
        let end = end.unwrap_or_else(|| {
            if *self.lifecycle.borrow() == Lifecycle::Ended {
                stopping()
            } else {
                End::plain("disconnected", Status::ok(""))
            }
        });
        self.shared.count_end(&end, self.agent.address, &self.agent.node);
    }
}
