//! One kind: list, then watch, for ever.
//!
//! ```text
//!       ┌── 410, versions went back ──────────────┐
//!       ▼                                         │
//!   no version ── list complete ──► version ── watch ── ended, broke, garbage ─► same version
//! ```
//!
//! A watch in which nothing comes for a while, neither change nor bookmark, is taken for dead and
//! opened anew from where it was: a server or a load balancer that hangs says nothing, and neither
//! does a connection whose other end is gone. Only what shows the state to be current counts as
//! heard: a complete list, a change, a bookmark. A watch that opens, a page and a server that
//! answers something else show nothing of the kind, so that the age of a kind grows until its watch
//! really works again.
//!
//! An agent that comes from another replica may have seen a higher position of a kind in which
//! nothing has changed since (that replica listed later). How far the server has come is then asked
//! at once: servers send a bookmark 2 s before a watch ends, so the watch is opened anew for 3 s.
//!
//! A list is handed on as a whole when it is complete, never in part, so nothing is removed by one
//! that breaks. A watch goes on behind the last event that was understood, so nothing is lost by
//! one that breaks.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

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

/// How long an answer may take to begin, and one page to come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the check for a restored server may take; without an answer the watch goes on without
/// it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// A streaming list in which nothing comes for so long is given up.
const LIST_SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Objects a page.
const PAGE_OBJECTS: u32 = 500;

/// Error bodies are read up to here.
const ERROR_BODY_LIMIT_BYTES: usize = 64 * 1024;

/// How often a server that does not have a kind is asked again: within a minute, as bookmarks would
/// come.
const ABSENT_PAUSE: Duration = Duration::from_secs(50);

/// A watch that ends sooner counts as a failed try, so that a server which ends each at once is not
/// asked without pause.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// How long a watch is opened for that shall only tell how far the server has come. Its bookmark
/// comes in a second or two.
const PROGRESS_WATCH: Duration = Duration::from_secs(3);

/// How many such watches are opened until the position that an agent has seen is reached. Bookmarks
/// of old servers lag by what their etcd takes to report progress, often 5 s. No agent can make
/// more of a position that is never reached.
const PROGRESS_WATCHES: u32 = 4;

/// What a watch hands on.
#[derive(Debug)]
pub(super) enum WatchUpdate {
    /// All objects of the kind.
    Listed(Vec<Event>),
    /// One object.
    Changed(Event),
    /// The position moved.
    Moved,
}

/// An update with its kind and the resourceVersion that it leads to; no version where the server
/// does not have the kind.
#[derive(Debug)]
pub(super) struct KindUpdate {
    pub(super) kind: ObjectKind,
    pub(super) update: WatchUpdate,
    pub(super) version: Option<String>,
    pub(super) received: SystemTime,
}

/// One kind's watch.
pub(super) struct Watch {
    kind: ObjectKind,
    client: Client,
    sink: Arc<dyn Sink>,
    contact: Arc<Contact>,
    updates: mpsc::Sender<KindUpdate>,
    version: Option<String>,
    back_off: BackOff,
    /// The server said that it has no streaming lists.
    is_streaming_refused: bool,
    /// The server refused the kind's field selector. The model leaves out what it would have kept
    /// away.
    is_field_selector_refused: bool,
    /// A streaming list failed: the next list is by pages.
    is_streaming_broken: bool,
    is_listed: bool,
    is_absence_told: bool,
    silence_limit: Duration,
    wanted: watch::Receiver<BTreeMap<SourceKind, u64>>,
    /// Watches that are left to reach the wanted position.
    progress_watches: u32,
}

impl Watch {
    /// `silence_limit`: how long a watch may say nothing.
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
            is_streaming_refused: false,
            is_field_selector_refused: false,
            is_streaming_broken: false,
            is_listed: false,
            is_absence_told: false,
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

    /// One list with the watch behind it, or one watch.
    async fn turn(&mut self) -> Result<(), Failure> {
        let Some(version) = self.version.clone() else {
            return if self.is_streaming_refused || self.is_streaming_broken {
                self.list_by_pages().await
            } else {
                self.list_by_watch().await
            };
        };
        self.check_not_behind(&version).await?;
        let is_for_progress = self.progress_watches > 0 && self.wants_more_than(&version);
        self.progress_watches = if is_for_progress { self.progress_watches - 1 } else { 0 };
        let time_limit = if is_for_progress { PROGRESS_WATCH } else { time_limit() };
        let lines = self.open_watch(&version, false, time_limit).await?;
        self.follow(lines).await
    }

    /// Whether an agent has seen more of the kind than was watched up to `version`.
    fn wants_more_than(&self, version: &str) -> bool {
        let wanted = self.wanted.borrow().get(&source_kind(self.kind)).copied();
        version.parse().is_ok_and(|version: u64| wanted.is_some_and(|wanted| wanted > version))
    }

    /// Counts and logs what happened. Returns how long to wait.
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
            self.is_streaming_broken = false;
            tracing::info!(
                kind,
                "the server refuses the field selector, as Kubernetes before 1.31 does: going on without it: {}",
                failure.message
            );
            return Duration::ZERO;
        }
        let is_streaming_list = self.version.is_none() && self.is_streaming_broken;
        if is_streaming_list && failure.refuses_streaming() {
            self.is_streaming_refused = true;
            tracing::info!(kind, "the server has no streaming lists, lists are read by pages: {}", failure.message);
            return Duration::ZERO;
        }
        let pause = if is_streaming_list && failure.retry_after.is_none() {
            Duration::ZERO
        } else {
            self.back_off.pause(failure.retry_after)
        };
        let next = match (&self.version, is_streaming_list) {
            (Some(_), _) => "watching goes on",
            (None, true) => "a list by pages follows",
            (None, false) => "listing starts over",
        };
        tracing::warn!(kind, reason, "{}; {next} in {} ms, what is known stays", failure.message, pause.as_millis());
        pause
    }

    /// Servers before 1.33 have no ServiceCIDRs: that is a complete list of none. What was there
    /// before stays.
    async fn note_absent(&mut self) {
        self.heard();
        if !self.is_absence_told {
            self.is_absence_told = true;
            tracing::info!(
                "the server has no ServiceCIDRs (networking.k8s.io/v1, Kubernetes 1.33): going on without them"
            );
        }
        if !self.is_listed {
            self.is_listed = true;
            self.send_update(WatchUpdate::Listed(Vec::new()), None).await;
        }
    }

    /// A streaming list: the watch begins with the state as it is, and a bookmark tells that it is
    /// complete. A server may refuse these for good or fail at them alone (its etcd reports no
    /// progress, its cache is not filled), so a list by pages follows whatever this one fails with.
    async fn list_by_watch(&mut self) -> Result<(), Failure> {
        self.is_streaming_broken = true;
        let mut lines = self.open_watch("", true, time_limit()).await?;
        let (listed, version) = self.collect(&mut lines).await?;
        self.is_streaming_broken = false;
        self.finish_list(listed, version).await;
        self.follow(lines).await
    }

    async fn collect(&self, lines: &mut Lines) -> Result<(Vec<Event>, String), Failure> {
        let mut listed = Vec::new();
        loop {
            let line = timeout(LIST_SILENCE_LIMIT, lines.next()).await;
            let line = line.map_err(|_| Failure::silent("a streaming list stood still", LIST_SILENCE_LIMIT))??;
            let Some(line) = line else { return Err(Failure::incomplete_list()) };
            self.contact.touched();
            match self.decode(&line)? {
                // The protocol has none here; if one comes it must not be served.
                Line::Event { event: Event::Delete(key), .. } => listed.retain(|other: &Event| other.key() != key),
                Line::Event { event, .. } => listed.push(event),
                Line::Bookmark { version, ends_initial_state: true } => return Ok((listed, version)),
                Line::Bookmark { .. } => {}
                Line::Error(status) => return Err(Failure::event(self.kind, &status)),
            }
        }
    }

    async fn list_by_pages(&mut self) -> Result<(), Failure> {
        self.is_streaming_broken = false;
        let mut listed = Vec::new();
        let mut continue_token = None;
        loop {
            let is_first = continue_token.is_none();
            let page = match self.page(continue_token, Some(PAGE_OBJECTS)).await {
                // The token outlived the server's history: one list without pages does not.
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
        let bytes: Bytes = bytes.map_err(|_| Failure::silent("a list did not come", ANSWER_TIMEOUT))??;
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

    /// A watch from a version that the server has not reached would wait in silence: a server that
    /// was restored from a backup has to be noticed before. A server that does not answer this
    /// question is given the benefit of the doubt.
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
        // Servers from 1.37 compress each event by itself, which the client's decompression does
        // not read.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let body = timeout(ANSWER_TIMEOUT, self.send(request, Verb::Watch)).await;
        let body = body.map_err(|_| Failure::silent("a watch did not begin", ANSWER_TIMEOUT))??;
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

    /// Hands on events until the watch ends, or has to tell how far the server has come.
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
            let line = line.map_err(|_| Failure::silent("nothing came in a watch", self.silence_limit))??;
            let Some(line) = line else { return Ok(()) };
            let (update, version) = match self.decode(&line)? {
                Line::Event { event, version } => (WatchUpdate::Changed(event), version),
                Line::Bookmark { version, .. } => (WatchUpdate::Moved, version),
                Line::Error(status) => return Err(Failure::event(self.kind, &status)),
            };
            silent_since = Instant::now();
            self.heard();
            self.back_off.reset();
            self.version = Some(version.clone());
            self.send_update(update, Some(version)).await;
        }
    }

    /// Label and field selector: what is no business of a service proxy stays on the server, and
    /// what becomes so arrives as deleted.
    fn selectors(&self) -> (Option<&'static str>, Option<&'static str>) {
        match self.kind {
            ObjectKind::Service => {
                let field_selector = (!self.is_field_selector_refused).then_some("spec.clusterIP!=None");
                (Some("!service.kubernetes.io/service-proxy-name"), field_selector)
            }
            ObjectKind::EndpointSlice => (Some("!service.kubernetes.io/headless"), None),
            ObjectKind::Node | ObjectKind::ServiceCidr => (None, None),
        }
    }

    fn decode(&self, line: &[u8]) -> Result<Line, Failure> {
        wire::line(self.kind, line).map_err(Failure::malformed)
    }

    async fn send_update(&self, update: WatchUpdate, version: Option<String>) {
        // Taken before it may have to wait for the receiver, which goes only when everything ends,
        // which `run` sees.
        let _ = self.updates.send(KindUpdate { kind: self.kind, update, version, received: SystemTime::now() }).await;
    }

    fn heard(&self) {
        self.sink.heard(source_kind(self.kind));
        self.contact.is_current(self.kind);
    }
}

/// How long a watch is asked to last. Replicas that started together shall not come back together.
fn time_limit() -> Duration {
    Duration::from_secs(fastrand::u64(200..290))
}

/// The kind as the sink names it.
pub(super) fn source_kind(kind: ObjectKind) -> SourceKind {
    match kind {
        ObjectKind::Service => SourceKind::Services,
        ObjectKind::EndpointSlice => SourceKind::EndpointSlices,
        ObjectKind::Node => SourceKind::Nodes,
        ObjectKind::ServiceCidr => SourceKind::ServiceCidrs,
    }
}
