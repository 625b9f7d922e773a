//! Lists one kind and then watches it, until shutdown.
//!
//! ```text
//!       ┌──────── status 410, or an older server ────────────┐
//!       ▼                                                    │
//!   no version ── complete list ──► version ──► watch ───────┤
//!                                      ▲                     │
//!                                      └─────────────────────┘
//!                                the watch ended, broke, or sent an invalid line
//! ```
//!
//! A watch that receives neither a change nor a bookmark for the silence limit counts as dead, and
//! is opened again from its last version. The reason may be a server or load balancer that hangs,
//! or a connection whose other end is gone. Only a complete list, a change or a bookmark shows that
//! the known state is current. Other answers do not count, such as the start of a watch or one page
//! of a list. So the time since the last confirmation of the kind grows until the watch works
//! again.
//!
//! Another replica may have listed a kind later, and may have a higher position although no object
//! has changed. An agent that moves from the other replica to this replica has seen the higher
//! position. In this case, this replica asks the server for the server's current position. API
//! servers send a bookmark 2 s before a watch ends, so the watch is opened again with a time limit
//! of 3 s.
//!
//! A list is passed on only when it is complete, so a list that breaks removes nothing. A watch
//! resumes after the last event that was decoded, so a watch that breaks loses nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::{
    contact::Contact,
    failure::{BackOff, Failure, Verb},
    wire::{self, Line, Lines, Page},
};
use crate::{
    model::Event,
    objects::ObjectKind,
    transaction::{Sink, SourceKind},
};

/// How long the server may take to begin an answer, or to send one page of a list.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit of the check that detects a server restored from a backup. If no answer arrives in
/// this time, the watch is opened anyway.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// A streaming list that sends nothing for this time has failed.
const LIST_SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Number of objects in one page of a list.
const PAGE_OBJECTS: u32 = 500;

/// Maximum size of the body of an error answer.
const ERROR_BODY_LIMIT_BYTES: usize = 64 * 1024;

/// If the server does not have a kind, the watch asks for the kind again after this time. Each
/// answer confirms the state of the kind, like a bookmark. API servers send bookmarks about every
/// minute, so the time is similar.
const ABSENT_PAUSE: Duration = Duration::from_secs(50);

/// A pause follows a list or watch that ends within this time, even without a failure. Without the
/// pause, a server that ends every watch immediately would receive one request after the other.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// The time limit of a watch that is opened to learn the position of the server. The server sends a
/// bookmark in such a watch after one or two seconds.
const PROGRESS_WATCH: Duration = Duration::from_secs(3);

/// Maximum number of watches that are opened to reach the position that an agent has seen. The
/// bookmarks of old servers lag by the interval at which etcd reports progress, often 5 s. An agent
/// may send a position that the server never reaches. The bound limits the effect of such a
/// position.
const PROGRESS_WATCHES: u32 = 4;

/// What a watch reports.
#[derive(Debug)]
pub(super) enum WatchUpdate {
    /// All objects of the kind.
    Listed(Vec<Event>),
    /// One object.
    Changed(Event),
    /// The position moved without a change.
    Moved,
}

/// An update with its kind and the resourceVersion after the update. `version` is `None` if the
/// server does not have the kind.
#[derive(Debug)]
pub(super) struct KindUpdate {
    pub(super) kind: ObjectKind,
    pub(super) update: WatchUpdate,
    pub(super) version: Option<String>,
    pub(super) received: std::time::Instant,
}

/// Whether lists are read as streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamingLists {
    /// The next list is read as a stream.
    Used,
    /// A streaming list has begun and has not succeeded. If this list fails, the next list is read
    /// by pages.
    Broken,
    /// The server has no streaming lists.
    Refused,
}

/// The watch of one kind.
pub(super) struct Watch {
    kind: ObjectKind,
    client: Client,
    sink: Arc<dyn Sink>,
    contact: Arc<Contact>,
    updates: mpsc::Sender<KindUpdate>,
    version: Option<String>,
    back_off: BackOff,
    streaming_lists: StreamingLists,
    /// True after the server has refused the field selector. The model ignores the objects that the
    /// selector would have excluded.
    is_field_selector_refused: bool,
    is_listed: bool,
    is_absence_logged: bool,
    silence_limit: Duration,
    /// Positions that agents have seen at other replicas.
    wanted: watch::Receiver<BTreeMap<SourceKind, u64>>,
    /// How many watches may still be opened to reach the wanted position.
    progress_watches: u32,
}

impl Watch {
    /// Creates the watch of a kind. A watch that receives neither a change nor a bookmark for
    /// `silence_limit` is opened again.
    pub(super) fn new(
        kind: ObjectKind,
        client: Client,
        silence_limit: Duration,
        sink: Arc<dyn Sink>,
        contact: Arc<Contact>,
        updates: mpsc::Sender<KindUpdate>,
    ) -> Self {
        Self {
            silence_limit,
            wanted: sink.wanted_positions(),
            progress_watches: 0,
            kind,
            client,
            sink,
            contact,
            updates,
            version: None,
            back_off: BackOff::default(),
            streaming_lists: StreamingLists::Used,
            is_field_selector_refused: false,
            is_listed: false,
            is_absence_logged: false,
        }
    }

    /// Lists and watches until `shutdown`.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            while !self.updates.is_closed() {
                let started = Instant::now();
                let outcome = self.turn().await;
                let pause = self.pause_after(outcome, started).await;
                self.contact.pause(pause).await;
            }
        };
        tokio::select! {
            () = work => {}
            () = shutdown.cancelled() => {}
        }
    }

    /// Runs one list or one watch. A streaming list continues as a watch.
    async fn turn(&mut self) -> Result<(), Failure> {
        let Some(version) = self.version.clone() else {
            return match self.streaming_lists {
                StreamingLists::Used => self.list_by_watch().await,
                StreamingLists::Broken | StreamingLists::Refused => self.list_by_pages().await,
            };
        };
        self.check_not_behind(&version).await?;
        let is_for_progress = self.progress_watches > 0 && self.wants_more_than(&version);
        self.progress_watches = if is_for_progress { self.progress_watches - 1 } else { 0 };
        let time_limit = if is_for_progress { PROGRESS_WATCH } else { time_limit() };
        let lines = self.open_watch(&version, false, time_limit).await?;
        self.follow(lines).await
    }

    /// Whether an agent has seen a position of this kind beyond `version`.
    fn wants_more_than(&self, version: &str) -> bool {
        let wanted = self.wanted.borrow().get(&source_kind(self.kind)).copied();
        version.parse().is_ok_and(|version: u64| wanted.is_some_and(|wanted| wanted > version))
    }

    /// Counts and logs a failure. Returns how long to wait before the next list or watch.
    async fn pause_after(&mut self, outcome: Result<(), Failure>, started: Instant) -> Duration {
        let Err(failure) = outcome else {
            if started.elapsed() >= SHORTEST_WATCH {
                self.back_off.reset();
                return Duration::ZERO;
            }
            return self.back_off.pause(None);
        };
        if failure.code == Some(StatusCode::NOT_FOUND) && self.kind == ObjectKind::ServiceCidr {
            self.note_absent().await;
            return ABSENT_PAUSE.mul_f64(0.8 + 0.2 * fastrand::f64());
        }
        self.sink.count_error(source_kind(self.kind), failure.reason);
        self.contact.failed(self.kind, &failure.message);
        if failure.needs_list {
            self.version = None;
        }
        let (kind, reason) = (self.kind.name(), failure.reason);
        if failure.code == Some(StatusCode::BAD_REQUEST) && self.selectors().1.is_some() {
            self.is_field_selector_refused = true;
            self.try_streaming_lists();
            tracing::info!(
                kind,
                "the server refuses the field selector, as Kubernetes before 1.31 does; the watch continues without it: {}",
                failure.message
            );
            return Duration::ZERO;
        }
        let is_streaming_list = self.version.is_none() && self.streaming_lists == StreamingLists::Broken;
        if is_streaming_list && failure.refuses_streaming() {
            self.streaming_lists = StreamingLists::Refused;
            tracing::info!(kind, "the server has no streaming lists; lists are read by pages: {}", failure.message);
            return Duration::ZERO;
        }
        let pause = if is_streaming_list && failure.retry_after.is_none() {
            Duration::ZERO
        } else {
            self.back_off.pause(failure.retry_after)
        };
        if !self.kind.is_essential() && !is_streaming_list && !self.is_listed {
            // Without the objects of this kind the replica serves all the same.
            self.is_listed = true;
            self.send_update(WatchUpdate::Listed(Vec::new()), None).await;
        }
        let next = match (&self.version, is_streaming_list) {
            (Some(_), _) => "the watch resumes",
            (None, true) => "a list by pages starts",
            (None, false) => "a new list starts",
        };
        tracing::warn!(
            kind,
            reason,
            "{}; {next} in {} ms; the last known state stays in service",
            failure.message,
            pause.as_millis()
        );
        pause
    }

    /// Records that the server has no ServiceCIDRs, as is the case before Kubernetes 1.33. If the
    /// kind has not been listed yet, the answer counts as a complete, empty list. Otherwise the
    /// known ServiceCIDRs stay in use.
    async fn note_absent(&mut self) {
        self.heard();
        if !self.is_absence_logged {
            self.is_absence_logged = true;
            tracing::info!(
                "the server has no ServiceCIDRs (networking.k8s.io/v1, Kubernetes 1.33); continuing without them"
            );
        }
        if !self.is_listed {
            self.is_listed = true;
            self.send_update(WatchUpdate::Listed(Vec::new()), None).await;
        }
    }

    /// Reads a streaming list: the watch begins with all present objects, and a bookmark marks the
    /// end of the list. A streaming list may fail even if a list by pages works. For example, the
    /// server may not support streaming lists, or etcd may not report progress. So the next list
    /// after any failure is read by pages.
    async fn list_by_watch(&mut self) -> Result<(), Failure> {
        self.streaming_lists = StreamingLists::Broken;
        let mut lines = self.open_watch("", true, time_limit()).await?;
        let (listed, version) = self.collect(&mut lines).await?;
        self.streaming_lists = StreamingLists::Used;
        self.finish_list(listed, version).await;
        self.follow(lines).await
    }

    async fn collect(&self, lines: &mut Lines) -> Result<(Vec<Event>, String), Failure> {
        let mut listed = Vec::new();
        loop {
            let line = timeout(LIST_SILENCE_LIMIT, lines.next()).await;
            let line =
                line.map_err(|_| Failure::silent("nothing arrived in a streaming list", LIST_SILENCE_LIMIT))??;
            let Some(line) = line else { return Err(Failure::incomplete_list()) };
            self.contact.touched();
            match self.decode(&line)? {
                // The protocol has no deletions in a streaming list. If a deletion arrives anyway,
                // its object must not be served.
                Line::Event { event: Event::Delete(key), .. } => listed.retain(|other: &Event| other.key() != key),
                Line::Event { event, .. } => listed.push(event),
                Line::Bookmark { version, ends_initial_state: true } => return Ok((listed, version)),
                Line::Bookmark { .. } | Line::Ignored { .. } => {}
                Line::Error(status) => return Err(Failure::event(self.kind, &status)),
            }
        }
    }

    /// Lets the next list be a streaming list again, unless the server refuses streaming lists.
    fn try_streaming_lists(&mut self) {
        if self.streaming_lists == StreamingLists::Broken {
            self.streaming_lists = StreamingLists::Used;
        }
    }

    async fn list_by_pages(&mut self) -> Result<(), Failure> {
        self.try_streaming_lists();
        let mut listed = Vec::new();
        let mut continue_token = None;
        loop {
            let is_first = continue_token.is_none();
            let page = match self.page(continue_token, Some(PAGE_OBJECTS)).await {
                // The token has expired, because the server no longer has the version of the first
                // page. A list without pages needs no token.
                Err(failure) if failure.needs_list && !is_first => {
                    self.sink.count_error(source_kind(self.kind), failure.reason);
                    listed.clear();
                    self.page(None, None).await?
                }
                other => other?,
            };
            self.contact.answered(self.kind);
            listed.extend(page.events);
            continue_token = page.continue_token;
            if continue_token.is_none() {
                self.finish_list(listed, page.version).await;
                return Ok(());
            }
        }
    }

    async fn page(&self, continue_token: Option<String>, limit: Option<u32>) -> Result<Page, Failure> {
        let (label_selector, field_selector) = self.selectors();
        let parameters = ListParams {
            label_selector: label_selector.map(str::to_owned),
            field_selector: field_selector.map(str::to_owned),
            continue_token,
            limit,
            ..ListParams::default()
        };
        let request = kube::core::Request::new(wire::path(self.kind)).list(&parameters).map_err(Failure::malformed)?;
        let read = async {
            let body = self.send(request, Verb::List).await?;
            body.collect().await.map(http_body_util::Collected::to_bytes).map_err(|error| Failure::dropped(&error))
        };
        let bytes = timeout(ANSWER_TIMEOUT, read).await;
        let bytes: Bytes = bytes.map_err(|_| Failure::silent("a list request was not answered", ANSWER_TIMEOUT))??;
        wire::page(self.kind, &bytes).map_err(Failure::malformed)
    }

    async fn finish_list(&mut self, listed: Vec<Event>, version: String) {
        tracing::info!(kind = self.kind.name(), objects = listed.len(), version, "listed");
        self.heard();
        self.is_listed = true;
        self.back_off.reset();
        self.version = Some(version.clone());
        self.send_update(WatchUpdate::Listed(listed), Some(version)).await;
    }

    /// Checks that the server has reached `version`. After the server was restored from a backup,
    /// the server's version may be lower. A watch from a higher version would receive nothing, so
    /// the versions are compared first. Without an answer to the check, the watch is opened anyway.
    async fn check_not_behind(&self, version: &str) -> Result<(), Failure> {
        let Ok(ours) = version.parse::<u64>() else { return Ok(()) };
        let theirs = match timeout(CHECK_TIMEOUT, self.page(None, Some(1))).await {
            Ok(Ok(page)) => page.version.parse::<u64>().ok(),
            Ok(Err(failure)) => {
                tracing::debug!(kind = self.kind.name(), "cannot compare versions: {}", failure.message);
                None
            }
            Err(_) => None,
        };
        match theirs {
            Some(theirs) if theirs < ours => Err(Failure::went_back(ours, theirs)),
            _ => Ok(()),
        }
    }

    async fn open_watch(
        &self,
        version: &str,
        send_initial_events: bool,
        time_limit: Duration,
    ) -> Result<Lines, Failure> {
        let (label_selector, field_selector) = self.selectors();
        let parameters = WatchParams {
            label_selector: label_selector.map(str::to_owned),
            field_selector: field_selector.map(str::to_owned),
            timeout: u32::try_from(time_limit.as_secs()).ok(),
            bookmarks: true,
            send_initial_events,
        };
        let request = kube::core::Request::new(wire::path(self.kind)).watch(&parameters, version);
        let mut request = request.map_err(Failure::malformed)?;
        // Servers from 1.37 on compress each event separately, which the client cannot decompress.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let body = timeout(ANSWER_TIMEOUT, self.send(request, Verb::Watch)).await;
        let body = body.map_err(|_| Failure::silent("a watch request was not answered", ANSWER_TIMEOUT))??;
        self.contact.answered(self.kind);
        Ok(Lines::new(body))
    }

    async fn send(&self, request: Request<Vec<u8>>, verb: Verb) -> Result<Body, Failure> {
        let response = self.client.send(request.map(Body::from)).await.map_err(|error| Failure::request(&error))?;
        let code = response.status();
        if code.is_success() {
            return Ok(response.into_body());
        }
        let retry_after =
            response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let body = Limited::new(response.into_body(), ERROR_BODY_LIMIT_BYTES).collect().await;
        let status = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        let mut failure = Failure::answer(self.kind, verb, code, status.as_ref());
        failure.retry_after = failure.retry_after.or(retry_after.map(Duration::from_secs));
        Err(failure)
    }

    /// Passes on events until the watch ends, or until an agent has seen a later position. In the
    /// second case the next watch has the time limit [`PROGRESS_WATCH`], to learn the position of
    /// the server.
    async fn follow(&mut self, mut lines: Lines) -> Result<(), Failure> {
        let mut silent_since = Instant::now();
        loop {
            let line = tokio::select! {
                line = timeout_at(silent_since + self.silence_limit, lines.next()) => line,
                Ok(()) = self.wanted.changed() => {
                    if self.progress_watches == 0 && self.version.as_deref().is_some_and(|at| self.wants_more_than(at)) {
                        self.progress_watches = PROGRESS_WATCHES;
                        return Ok(());
                    }
                    continue;
                }
            };
            let line = line.map_err(|_| Failure::silent("nothing arrived in a watch", self.silence_limit))??;
            let Some(line) = line else { return Ok(()) };
            let (update, version) = match self.decode(&line)? {
                Line::Event { event, version } => (Some(WatchUpdate::Changed(event)), version),
                Line::Bookmark { version, .. } => (Some(WatchUpdate::Moved), version),
                // The next bookmark reports the position.
                Line::Ignored { version } => (None, version),
                Line::Error(status) => return Err(Failure::event(self.kind, &status)),
            };
            silent_since = Instant::now();
            self.heard();
            self.back_off.reset();
            self.version = Some(version.clone());
            if let Some(update) = update {
                self.send_update(update, Some(version)).await;
            }
        }
    }

    /// The label selector and the field selector. The selectors exclude objects that a service
    /// proxy does not serve. An object that no longer matches arrives as a deletion.
    fn selectors(&self) -> (Option<&'static str>, Option<&'static str>) {
        match self.kind {
            ObjectKind::Service => {
                let field_selector = (!self.is_field_selector_refused).then_some("spec.clusterIP!=None");
                (Some("!service.kubernetes.io/service-proxy-name"), field_selector)
            }
            ObjectKind::EndpointSlice => (Some("!service.kubernetes.io/headless"), None),
            ObjectKind::Node | ObjectKind::ServiceCidr | ObjectKind::Pod => (None, None),
        }
    }

    fn decode(&self, line: &[u8]) -> Result<Line, Failure> {
        wire::line(self.kind, line).map_err(Failure::malformed)
    }

    async fn send_update(&self, update: WatchUpdate, version: Option<String>) {
        // The clock is read before the wait for room in the channel. Sending fails only at
        // shutdown, which `run` detects.
        let _ = self
            .updates
            .send(KindUpdate { kind: self.kind, update, version, received: std::time::Instant::now() })
            .await;
    }

    fn heard(&self) {
        if self.kind.is_essential() {
            self.sink.heard(source_kind(self.kind));
        }
        self.contact.confirmed(self.kind);
    }
}

/// The time limit of a watch. The time limit is random, so that replicas that started together do
/// not open their watches together.
fn time_limit() -> Duration {
    Duration::from_secs(fastrand::u64(200..290))
}

/// Converts the kind for the sink.
pub(super) fn source_kind(kind: ObjectKind) -> SourceKind {
    match kind {
        ObjectKind::Service => SourceKind::Services,
        ObjectKind::EndpointSlice => SourceKind::EndpointSlices,
        ObjectKind::Node => SourceKind::Nodes,
        ObjectKind::ServiceCidr => SourceKind::ServiceCidrs,
        ObjectKind::Pod => SourceKind::Pods,
    }
}
