//! Lists one kind and then watches it, until shutdown. `super::plan` decides which request comes
//! next. This module sends the requests, and passes on what arrives.
//!
//! A list is passed on only when it is complete, so a list that breaks removes nothing. A watch
//! resumes after the last event that was decoded, so a watch that breaks loses nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::{BoxFuture, OptionFuture};
use http::{HeaderValue, header};
use http_body_util::{BodyExt as _, Limited};
use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    contact::Contact,
    failure::{Failure, Verb},
    plan::{self, Cause, Plan, Request, Step},
    wire::{self, Line, Lines, Page},
};
use crate::{
    model::Event,
    objects::ObjectKind,
    transaction::{Sink, SourceKind},
};

/// How long the server may take to begin an answer, or to send one page of a list.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the answer with the version of the server may take. API servers wait 3 s for their
/// cache before they ask etcd.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// A streaming list that sends nothing for this time has failed.
const LIST_SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Number of objects in one page of a list.
const PAGE_OBJECTS: u32 = 500;

/// Maximum size of the body of an error answer.
const ERROR_BODY_LIMIT_BYTES: usize = 64 * 1024;

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

/// The watch of one kind.
pub(super) struct Watch {
    requests: Requests,
    sink: Arc<dyn Sink>,
    updates: mpsc::Sender<KindUpdate>,
    plan: Plan,
    /// The open watch.
    lines: Option<Lines>,
    /// The request for the version of the server, or the list that is compared with the watch.
    answer: OptionFuture<BoxFuture<'static, Result<Answer, Failure>>>,
    /// The list that is compared with the watch.
    kept: Option<(Vec<Event>, String)>,
    /// Positions that agents have seen at other replicas.
    wanted: watch::Receiver<BTreeMap<SourceKind, u64>>,
}

impl Watch {
    /// Creates the watch of a kind. After the silence `silence`, the server has to show that
    /// nothing has changed.
    pub(super) fn new(
        kind: ObjectKind,
        client: Client,
        silence: Duration,
        sink: Arc<dyn Sink>,
        contact: Arc<Contact>,
        updates: mpsc::Sender<KindUpdate>,
    ) -> Self {
        Self {
            plan: Plan::new(kind, silence, fastrand::Rng::new(), Instant::now()),
            wanted: sink.wanted_positions(),
            requests: Requests { kind, client, contact, sink: Arc::clone(&sink) },
            sink,
            updates,
            lines: None,
            answer: None.into(),
            kept: None,
        }
    }

    /// Lists and watches until `shutdown`.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            let mut event = plan::Event::Paused;
            while !self.updates.is_closed() {
                let step = self.plan.next(event, Instant::now());
                event = self.apply(step).await.unwrap_or_else(plan::Event::Failed);
            }
        };
        tokio::select! {
            () = work => {}
            () = shutdown.cancelled() => {}
        }
    }

    async fn apply(&mut self, step: Step) -> Result<plan::Event, Failure> {
        match step {
            Step::Stay => {}
            Step::Current => self.heard(),
            Step::Ask => self.answer = Some(self.requests.clone().version()).into(),
            Step::Check => self.answer = Some(self.requests.clone().check(self.plan.selectors())).into(),
            Step::TakeList => {
                let Some((listed, version)) = self.kept.take() else { return Ok(plan::Event::Ended) };
                return Ok(self.finish_list(listed, version).await);
            }
            Step::Pause { pause, cause, is_empty } => {
                self.lines = None;
                if !self.plan.is_checking() {
                    (self.answer, self.kept) = (None.into(), None);
                }
                self.report(cause, pause);
                if is_empty {
                    self.send_update(WatchUpdate::Listed(Vec::new()), None).await;
                }
                self.requests.contact.pause(pause).await;
                return Ok(plan::Event::Paused);
            }
            Step::Send(Request::List) => {
                let (listed, version) = self.requests.list(self.plan.selectors()).await?;
                return Ok(self.finish_list(listed, version).await);
            }
            Step::Send(Request::StreamingList(limit)) => return self.list_by_watch(limit).await,
            Step::Send(Request::Watch(version, limit)) => {
                self.lines = Some(self.requests.open_watch(self.plan.selectors(), &version, false, limit).await?);
                if !self.plan.is_checking() {
                    self.requests.contact.answered(self.requests.kind);
                }
            }
        }
        self.wait().await
    }

    /// Waits for the next event while a watch is open.
    async fn wait(&mut self) -> Result<plan::Event, Failure> {
        let Some(lines) = &mut self.lines else { return Ok(plan::Event::Ended) };
        // Lines come first: if the process was frozen, they have arrived before the time was over.
        tokio::select! {
            biased;
            line = lines.next() => match line? {
                Some(line) => self.take_in(&line).await,
                None => Ok(plan::Event::Ended),
            },
            Some(answer) = &mut self.answer => {
                self.answer = None.into();
                match answer? {
                    Answer::Version(version) => Ok(version.map_or(plan::Event::Time, plan::Event::Asked)),
                    Answer::List(listed, version) => {
                        let newest = listed.iter().filter_map(version_of).max();
                        self.kept = Some((listed, version.clone()));
                        Ok(plan::Event::Checked { version, newest })
                    }
                }
            }
            Ok(()) = self.wanted.changed() => {
                let wanted = self.wanted.borrow_and_update().get(&source_kind(self.requests.kind)).copied();
                Ok(wanted.map_or(plan::Event::Time, plan::Event::Wanted))
            }
            () = sleep_until(self.plan.wakes_at()) => Ok(plan::Event::Time),
        }
    }

    /// Passes on one line of the watch.
    async fn take_in(&mut self, line: &[u8]) -> Result<plan::Event, Failure> {
        let (update, version) = match self.requests.decode(line)? {
            Line::Event { event, version } => (Some(WatchUpdate::Changed(event)), version),
            Line::Bookmark { version, .. } => (Some(WatchUpdate::Moved), version),
            // The next bookmark reports the position.
            Line::Ignored { version } => (None, version),
            Line::Error(status) => return Err(Failure::event(self.requests.kind, &status)),
        };
        self.heard();
        self.requests.contact.delivered(self.requests.kind);
        if let Some(update) = update {
            self.send_update(update, Some(version.clone())).await;
        }
        Ok(plan::Event::Line(version))
    }

    /// Counts and logs why a list or a watch is over.
    fn report(&self, cause: Cause, pause: Duration) {
        let (kind, contact, pause_ms) = (self.requests.kind, &self.requests.contact, pause.as_millis());
        let name = kind.name();
        match cause {
            Cause::Done => {}
            Cause::Stuck => contact.stuck(kind),
            Cause::Behind => contact.behind(kind),
            Cause::Absent => {
                self.heard();
                tracing::debug!(name, "the server does not have this kind (ServiceCIDRs: Kubernetes 1.33)");
            }
            Cause::Lacks(failure, what) => {
                self.sink.count_error(source_kind(kind), failure.reason);
                tracing::info!(kind = name, "{what}: {}", failure.message);
            }
            Cause::Failed(Failure { reason, message, .. }) => {
                self.sink.count_error(source_kind(kind), reason);
                contact.failed(kind, &message);
                let next = if self.plan.resumes() { "the watch resumes" } else { "a list follows" };
                tracing::warn!(
                    kind = name,
                    reason,
                    "{message}; {next} in {pause_ms} ms; the last known state stays in service"
                );
            }
        }
    }

    /// Reads a streaming list: the watch begins with all present objects, and a bookmark marks the
    /// end of the list.
    async fn list_by_watch(&mut self, limit: Duration) -> Result<plan::Event, Failure> {
        let mut lines = self.requests.open_watch(self.plan.selectors(), "", true, limit).await?;
        let (listed, version) = self.requests.collect(&mut lines).await?;
        self.lines = Some(lines);
        Ok(self.finish_list(listed, version).await)
    }

    async fn finish_list(&mut self, listed: Vec<Event>, version: String) -> plan::Event {
        tracing::info!(kind = self.requests.kind.name(), objects = listed.len(), version, "listed");
        self.heard();
        self.send_update(WatchUpdate::Listed(listed), Some(version.clone())).await;
        plan::Event::Listed(version)
    }

    async fn send_update(&mut self, update: WatchUpdate, version: Option<String>) {
        // The clock is read before the wait for room in the channel. Sending fails only at
        // shutdown, which `run` detects.
        let update = KindUpdate { kind: self.requests.kind, update, version, received: std::time::Instant::now() };
        let _ = self.updates.send(update).await;
    }

    /// Notes that the kind is current.
    fn heard(&self) {
        if self.requests.kind.is_essential() {
            self.sink.heard(source_kind(self.requests.kind));
        }
        self.requests.contact.answered(self.requests.kind);
    }
}

/// The answer to a request that is sent while a watch is open.
enum Answer {
    /// The version of the server; `None` if it did not answer.
    Version(Option<String>),
    /// All objects, and the version of the list.
    List(Vec<Event>, String),
}

/// The version of an object that was listed.
fn version_of(event: &Event) -> Option<u64> {
    match event {
        Event::Apply(object) => object.names()[2].parse().ok(),
        Event::Delete(_) | Event::Undecodable { .. } => None,
    }
}

/// The label selector and the field selector of a request.
type Selectors = (Option<&'static str>, Option<&'static str>);

/// The requests for one kind.
#[derive(Clone)]
struct Requests {
    kind: ObjectKind,
    client: Client,
    contact: Arc<Contact>,
    sink: Arc<dyn Sink>,
}

impl Requests {
    /// Asks for the version of the server: a list of one object without a version is a consistent
    /// read. Selectors would let the server search.
    fn version(self) -> BoxFuture<'static, Result<Answer, Failure>> {
        Box::pin(async move {
            let page = timeout(VERSION_TIMEOUT, self.page((None, None), None, Some(1))).await;
            Ok(Answer::Version(page.ok().and_then(Result::ok).map(|page| page.version)))
        })
    }

    fn check(self, selectors: Selectors) -> BoxFuture<'static, Result<Answer, Failure>> {
        Box::pin(async move { self.list(selectors).await.map(|(listed, version)| Answer::List(listed, version)) })
    }

    /// Lists the kind in pages. Returns the objects and the version of the list.
    async fn list(&self, selectors: Selectors) -> Result<(Vec<Event>, String), Failure> {
        let (mut listed, mut continue_token) = (Vec::new(), None);
        loop {
            let is_first = continue_token.is_none();
            let page = match self.page(selectors, continue_token, Some(PAGE_OBJECTS)).await {
                // The token has expired, because the server no longer has the version of the first
                // page. A list without pages needs no token.
                Err(failure) if failure.needs_list && !is_first => {
                    self.sink.count_error(source_kind(self.kind), failure.reason);
                    listed.clear();
                    self.page(selectors, None, None).await?
                }
                other => other?,
            };
            self.contact.answered(self.kind);
            listed.extend(page.events);
            continue_token = page.continue_token;
            if continue_token.is_none() {
                return Ok((listed, page.version));
            }
        }
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

    async fn page(
        &self,
        (label_selector, field_selector): Selectors,
        continue_token: Option<String>,
        limit: Option<u32>,
    ) -> Result<Page, Failure> {
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

    async fn open_watch(
        &self,
        (label_selector, field_selector): Selectors,
        version: &str,
        send_initial_events: bool,
        limit: Duration,
    ) -> Result<Lines, Failure> {
        let parameters = WatchParams {
            label_selector: label_selector.map(str::to_owned),
            field_selector: field_selector.map(str::to_owned),
            timeout: u32::try_from(limit.as_secs()).ok(),
            bookmarks: true,
            send_initial_events,
        };
        let request = kube::core::Request::new(wire::path(self.kind)).watch(&parameters, version);
        let mut request = request.map_err(Failure::malformed)?;
        // Servers from 1.37 on compress each event separately, which the client cannot decompress.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let body = timeout(ANSWER_TIMEOUT, self.send(request, Verb::Watch)).await;
        let body = body.map_err(|_| Failure::silent("a watch request was not answered", ANSWER_TIMEOUT))??;
        self.contact.touched();
        Ok(Lines::new(body))
    }

    async fn send(&self, request: http::Request<Vec<u8>>, verb: Verb) -> Result<Body, Failure> {
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

    fn decode(&self, line: &[u8]) -> Result<Line, Failure> {
        wire::line(self.kind, line).map_err(Failure::malformed)
    }
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
