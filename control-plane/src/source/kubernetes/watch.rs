//! Lists one kind and then watches it, until shutdown. `super::plan` decides which request comes
//! next. This module sends the requests, and passes on what arrives.
//!
//! A list is passed on only when it is complete, so a list that breaks removes nothing. A watch
//! resumes after the last event that was decoded, so a watch that breaks loses nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{
    FutureExt as _,
    future::{BoxFuture, OptionFuture},
};
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
    Contact,
    plan::{Cause, Plan, PlanEvent, Step},
    wire::{self, Failure, Line, Lines, Listed},
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
    updates: mpsc::Sender<KindUpdate>,
    plan: Plan,
    /// The open watch.
    lines: Option<Lines>,
    /// The request for the version of the server, or the list that is compared with the watch.
    answer: OptionFuture<BoxFuture<'static, Result<PlanEvent, Failure>>>,
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
            requests: Requests { kind, client, contact, sink },
            updates,
            lines: None,
            answer: None.into(),
        }
    }

    /// Lists and watches until `shutdown`.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            let mut event = PlanEvent::Paused;
            while !self.updates.is_closed() {
                let step = self.plan.next(event, Instant::now());
                event = self.apply(step).await.unwrap_or_else(PlanEvent::Failed);
            }
        };
        tokio::select! {
            () = work => {}
            () = shutdown.cancelled() => {}
        }
    }

    async fn apply(&mut self, step: Step) -> Result<PlanEvent, Failure> {
        match step {
            Step::Stay => {}
            Step::Current => self.heard(),
            Step::Ask => self.answer = Some(self.requests.clone().ask().boxed()).into(),
            Step::Check => {
                let (requests, selectors) = (self.requests.clone(), self.plan.selectors());
                let list = async move { requests.list(selectors).await.map(PlanEvent::Checked) };
                self.answer = Some(list.boxed()).into();
            }
            Step::TakeList { list, is_stuck } => {
                let listed = self.pass_on(list).await;
                if is_stuck {
                    self.requests.contact.stuck(self.requests.kind);
                }
                return Ok(listed);
            }
            Step::Pause { pause, cause, is_empty } => {
                self.lines = None;
                if !self.plan.is_checking() {
                    self.answer = None.into();
                }
                self.report(cause, pause);
                if is_empty {
                    self.send_update(WatchUpdate::Listed(Vec::new()), None).await;
                }
                self.requests.contact.pause(pause).await;
                return Ok(PlanEvent::Paused);
            }
            Step::List => {
                let list = self.requests.list(self.plan.selectors()).await?;
                return Ok(self.pass_on(list).await);
            }
            Step::Watch(version, limit) => {
                let lines = self.requests.open_watch(self.plan.selectors(), version.as_deref(), limit).await?;
                let lines = self.lines.insert(lines);
                if version.is_none() {
                    let list = self.requests.collect(lines).await?;
                    return Ok(self.pass_on(list).await);
                }
                if !self.plan.is_checking() {
                    self.requests.contact.answered(self.requests.kind);
                }
            }
        }
        self.wait().await
    }

    /// Waits for the next event while a watch is open.
    async fn wait(&mut self) -> Result<PlanEvent, Failure> {
        let Some(lines) = &mut self.lines else { return Ok(PlanEvent::Ended) };
        // Lines come first: if the process was frozen, they have arrived before the time was over.
        tokio::select! {
            biased;
            line = lines.next() => match line? {
                Some(line) => self.take_in(&line).await,
                None => Ok(PlanEvent::Ended),
            },
            Some(event) = &mut self.answer => {
                self.answer = None.into();
                event
            }
            Ok(()) = self.wanted.changed() => {
                let wanted = self.wanted.borrow_and_update().get(&source_kind(self.requests.kind)).copied();
                Ok(wanted.map_or(PlanEvent::Time, PlanEvent::Wanted))
            }
            () = sleep_until(self.plan.wakes_at()) => Ok(PlanEvent::Time),
        }
    }

    /// Passes on one line of the watch.
    async fn take_in(&mut self, line: &[u8]) -> Result<PlanEvent, Failure> {
        let (update, version) = match self.requests.decode(line)? {
            // Without an event, the next bookmark reports the position.
            Line::Object { event, version } => (event.map(WatchUpdate::Changed), version),
            Line::Bookmark { version, .. } => (Some(WatchUpdate::Moved), version),
            Line::Error(status) => return Err(Failure::event(self.requests.kind, &status)),
        };
        self.heard();
        self.requests.contact.delivered(self.requests.kind);
        if let Some(update) = update {
            self.send_update(update, Some(version.clone())).await;
        }
        Ok(PlanEvent::Line(version))
    }

    /// Counts and logs why a list or a watch is over.
    fn report(&self, cause: Cause, pause: Duration) {
        let (kind, contact, pause_ms) = (self.requests.kind, &self.requests.contact, pause.as_millis());
        let name = kind.name();
        match cause {
            Cause::Done => {}
            Cause::Behind => contact.behind(kind),
            Cause::Absent => {
                self.heard();
                tracing::debug!(name, "the server does not have this kind (ServiceCIDRs: Kubernetes 1.33)");
            }
            Cause::Lacks(failure, what) => {
                self.requests.sink.count_error(source_kind(kind), failure.reason);
                tracing::info!(kind = name, "{what}: {}", failure.message);
            }
            Cause::Failed(Failure { reason, message, .. }) => {
                self.requests.sink.count_error(source_kind(kind), reason);
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

    async fn pass_on(&mut self, Listed { events, version }: Listed) -> PlanEvent {
        tracing::info!(kind = self.requests.kind.name(), objects = events.len(), version, "listed");
        self.heard();
        self.send_update(WatchUpdate::Listed(events), Some(version.clone())).await;
        PlanEvent::Listed(version)
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
            self.requests.sink.heard(source_kind(self.requests.kind));
        }
        self.requests.contact.answered(self.requests.kind);
    }
}

/// The label selector and the field selector of a request.
type Selectors = [Option<&'static str>; 2];

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
    /// read. Selectors would let the server search. Without an answer, the watch goes on.
    async fn ask(self) -> Result<PlanEvent, Failure> {
        let parameters = ListParams { limit: Some(1), ..ListParams::default() };
        let answer = timeout(VERSION_TIMEOUT, self.page(&parameters)).await;
        Ok(answer.ok().and_then(Result::ok).map_or(PlanEvent::Time, |(page, _)| PlanEvent::Asked(page.version)))
    }

    /// Lists the kind in pages.
    async fn list(&self, selectors: Selectors) -> Result<Listed, Failure> {
        let [label_selector, field_selector] = selectors.map(|selector| selector.map(str::to_owned));
        let mut parameters =
            ListParams { label_selector, field_selector, limit: Some(PAGE_OBJECTS), ..ListParams::default() };
        let mut events = Vec::new();
        loop {
            let (page, continue_token) = match self.page(&parameters).await {
                // The token has expired, because the server no longer has the version of the first
                // page. A list without pages needs no token.
                Err(failure) if failure.needs_list && parameters.continue_token.is_some() => {
                    self.sink.count_error(source_kind(self.kind), failure.reason);
                    events.clear();
                    (parameters.continue_token, parameters.limit) = (None, None);
                    continue;
                }
                other => other?,
            };
            self.contact.answered(self.kind);
            events.extend(page.events);
            parameters.continue_token = continue_token;
            if parameters.continue_token.is_none() {
                return Ok(Listed { events, version: page.version });
            }
        }
    }

    /// Reads a streaming list: the watch begins with all present objects, and a bookmark marks the
    /// end of the list.
    async fn collect(&self, lines: &mut Lines) -> Result<Listed, Failure> {
        let mut events = Vec::new();
        loop {
            let line = timeout(LIST_SILENCE_LIMIT, lines.next()).await;
            let line =
                line.map_err(|_| Failure::silent("nothing arrived in a streaming list", LIST_SILENCE_LIMIT))??;
            let Some(line) = line else { return Err(Failure::incomplete_list()) };
            self.contact.touched();
            match self.decode(&line)? {
                // The protocol has no deletions in a streaming list. If a deletion arrives anyway,
                // its object must not be served.
                Line::Object { event: Some(Event::Delete(key)), .. } => {
                    events.retain(|other: &Event| other.key() != key);
                }
                Line::Object { event, .. } => events.extend(event),
                Line::Bookmark { version, ends_initial_state: true } => return Ok(Listed { events, version }),
                Line::Bookmark { .. } => {}
                Line::Error(status) => return Err(Failure::event(self.kind, &status)),
            }
        }
    }

    /// Reads one page, and the token for the next page.
    async fn page(&self, parameters: &ListParams) -> Result<(Listed, Option<String>), Failure> {
        let request = kube::core::Request::new(self.kind.path()).list(parameters).map_err(Failure::malformed)?;
        let read = async {
            let body = self.send(request, "list").await?;
            body.collect().await.map_err(|error| Failure::dropped(&error))
        };
        let body = timeout(ANSWER_TIMEOUT, read).await;
        let body = body.map_err(|_| Failure::silent("a list request was not answered", ANSWER_TIMEOUT))??;
        wire::page(self.kind, &body.to_bytes()).map_err(Failure::malformed)
    }

    /// Opens a watch after `version`, or one that begins with all present objects.
    async fn open_watch(&self, selectors: Selectors, version: Option<&str>, limit: Duration) -> Result<Lines, Failure> {
        let [label_selector, field_selector] = selectors.map(|selector| selector.map(str::to_owned));
        let parameters = WatchParams {
            label_selector,
            field_selector,
            timeout: u32::try_from(limit.as_secs()).ok(),
            bookmarks: true,
            send_initial_events: version.is_none(),
        };
        let request = kube::core::Request::new(self.kind.path()).watch(&parameters, version.unwrap_or_default());
        let mut request = request.map_err(Failure::malformed)?;
        // Servers from 1.37 on compress each event separately, which the client cannot decompress.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let body = timeout(ANSWER_TIMEOUT, self.send(request, "watch")).await;
        let body = body.map_err(|_| Failure::silent("a watch request was not answered", ANSWER_TIMEOUT))??;
        self.contact.touched();
        Ok(Lines::new(body))
    }

    async fn send(&self, request: http::Request<Vec<u8>>, verb: &str) -> Result<Body, Failure> {
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
