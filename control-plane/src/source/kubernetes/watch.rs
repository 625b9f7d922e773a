//! Lists one kind and then watches it, until shutdown. [`Plan`] decides which request comes next.
//! [`Watch`] sends the requests, and passes on what arrives.
//!
//! A list is passed on only when it is complete, so a list that breaks removes nothing. A watch
//! resumes after the last event that was decoded, so a watch that breaks loses nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{
    FutureExt as _,
    future::{BoxFuture, OptionFuture},
};
use http::{HeaderValue, StatusCode, header};
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

use super::{BackOff, Contact, Failure, Line, Lines, Listed, decode_line, decode_page};
use crate::{
    model::{Event, Sink},
    objects::{ObjectKind, SourceKind},
};

/// How long the server may take to begin an answer, or to send one page of a list.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the version of the server may take. Servers wait 3 s before they ask etcd.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// A streaming list that sends nothing for this time has failed.
const LIST_SILENCE_LIMIT: Duration = Duration::from_secs(60);

const PAGE_OBJECTS: u32 = 500;

const ERROR_BODY_LIMIT_BYTES: usize = 64 * 1024;

/// What a watch reports.
#[derive(Debug)]
pub(super) enum WatchUpdate {
    /// All objects of the kind.
    Listed(Vec<Event>),
    Changed(Event),
    /// The position moved without a change.
    Moved,
}

/// An update with its kind and version; `None` if the server does not have the kind.
#[derive(Debug)]
pub(super) struct KindUpdate {
    pub(super) kind: ObjectKind,
    pub(super) update: WatchUpdate,
    pub(super) version: Option<String>,
    pub(super) received: std::time::Instant,
}

pub(super) struct Watch {
    requests: Requests,
    updates: mpsc::Sender<KindUpdate>,
    plan: Plan,
    lines: Option<Lines>,
    /// The request for the version of the server, or the list that is compared with the watch.
    answer: OptionFuture<BoxFuture<'static, Result<PlanEvent, Failure>>>,
    /// Positions that agents have seen at other replicas.
    wanted: watch::Receiver<BTreeMap<SourceKind, u64>>,
}

impl Watch {
    /// Creates the watch of a kind, which has to be shown current after `silence`.
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
        // The clock is read before the wait for room. Sending fails only at shutdown.
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

#[derive(Clone)]
struct Requests {
    kind: ObjectKind,
    client: Client,
    contact: Arc<Contact>,
    sink: Arc<dyn Sink>,
}

impl Requests {
    /// Asks for the server's version by a list of one object. Without an answer, the watch goes on.
    async fn ask(self) -> Result<PlanEvent, Failure> {
        let parameters = ListParams { limit: Some(1), ..ListParams::default() };
        let answer = timeout(VERSION_TIMEOUT, self.page(&parameters)).await;
        Ok(answer.ok().and_then(Result::ok).map_or(PlanEvent::Time, |(page, _)| PlanEvent::Asked(page.version)))
    }

    async fn list(&self, selectors: Selectors) -> Result<Listed, Failure> {
        let [label_selector, field_selector] = selectors.map(|selector| selector.map(str::to_owned));
        let mut parameters =
            ListParams { label_selector, field_selector, limit: Some(PAGE_OBJECTS), ..ListParams::default() };
        let mut events = Vec::new();
        loop {
            let (page, continue_token) = match self.page(&parameters).await {
                // The first page's version has gone. A list without pages needs no token.
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

    /// Reads a streaming list: all present objects in a watch, up to a bookmark.
    async fn collect(&self, lines: &mut Lines) -> Result<Listed, Failure> {
        let mut events = Vec::new();
        loop {
            let line = timeout(LIST_SILENCE_LIMIT, lines.next()).await;
            let line =
                line.map_err(|_| Failure::silent("nothing arrived in a streaming list", LIST_SILENCE_LIMIT))??;
            let Some(line) = line else { return Err(Failure::incomplete_list()) };
            self.contact.touched();
            match self.decode(&line)? {
                // Not part of the protocol. If it comes, the object must not be served.
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
        decode_page(self.kind, &body.to_bytes()).map_err(Failure::malformed)
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
        decode_line(self.kind, line).map_err(Failure::malformed)
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

// Decides what the watch of one kind does next. [`Plan::next`] opens no connection and reads no
// clock. [`Watch`] applies its steps.
//
// The question is: has the watch brought every change? A kind may have no change for hours, and a
// server sends a bookmark only if its cache has moved on. So silence proves nothing. Instead, a
// watch runs in cycles of about a minute (decision 34, with the reasons):
//
// ```text
// watch opened            small list: version R        bookmark or change       the watch ends
// ├───────────────────────────────┼──────────────────────────┼───────────────────────────┤
// 0                          end - LEAD                    end - 2 s              limit = end
// ```
//
// A list without a version is a consistent read: R is the current version of the server's
// database. If the watch is at R, or reaches R, it has brought every change up to R. The cycle
// then starts again, without a list.
//
// If the watch does not reach R, it is opened again for a short time, and the kind is listed
// meanwhile. The objects decide. If the list has an object with a version that the watch does not
// bring within [`GRACE`], the watch is stuck, and the source is cut off until a watch brings
// something. Otherwise the server only sends no bookmarks, and the source is not cut off. The list
// replaces what is known in both cases.
//
// If a change does not arrive, the source is cut off within 90 s. The worst case is a change right
// after the answer with R, in a cluster without other changes, and a list that is not answered. By
// default, these times add up to 82 s:
//
// - the rest of that cycle: LEAD (8 s), and [`GRACE`] (2 s) if its watch does not end;
// - the next cycle: 60 to 62 s;
// - the time for which requests may fail: `super::FAILING_LIMIT` (10 s).

/// How long a watch may continue after its time limit. Then it counts as dead.
const GRACE: Duration = Duration::from_secs(2);

/// The limit of a watch to reach a version soon: a bookmark comes after one or two seconds.
const SHORT_WATCH: Duration = Duration::from_secs(3);

/// The least time before the end of a cycle: its last bookmark comes about 2 s before.
const LEAST_LEAD: Duration = Duration::from_secs(4);

/// A pause follows shorter watches, so that they do not become a flood of requests.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// The time limit of a streaming list. The watch that continues it ends with the cycle.
const STREAMING_LIST: Duration = Duration::from_secs(290);

/// If the server does not have a kind, its list is repeated, and confirmed, about so often.
const ABSENT_PAUSE: Duration = Duration::from_secs(50);

/// A watch that does not end at its time limit.
const DEAD: &str = "a watch did not end at its time limit, and has been open";

/// So many breaks at one version lead to a list, if the server caused them.
const BREAKS_BEFORE_LIST: u32 = 2;

/// How long a server that can be reached may fail to list an optional kind, until the replica
/// serves without its objects.
const OPTIONAL_FOR: Duration = Duration::from_secs(30);

/// How long before the end of a cycle the server is asked for its version.
fn lead(silence: Duration) -> Duration {
    (silence * 2 / 15).max(LEAST_LEAD).min(silence / 2)
}

/// What has happened.
#[derive(Debug)]
enum PlanEvent {
    Paused,
    /// The list with this version is complete, and its objects are passed on.
    Listed(String),
    /// The list that [`Step::Check`] asked for is complete.
    Checked(Listed),
    /// The watch brought a change or a bookmark with this version.
    Line(String),
    /// The server answered the small request with its version.
    Asked(String),
    /// An agent has seen this version at another replica.
    Wanted(u64),
    /// [`Plan::wakes_at`] has come.
    Time,
    Ended,
    /// The list or the watch failed.
    Failed(Failure),
}

/// What to do.
#[derive(Debug)]
enum Step {
    /// The open watch continues.
    Stay,
    /// The open watch continues. The kind was current when the server was asked.
    Current,
    /// The open watch continues, and the server is asked for its version.
    Ask,
    /// The open watch continues, and the kind is listed in pages.
    Check,
    /// The open watch is dropped, and the objects of this list are passed on.
    TakeList {
        /// The list that [`PlanEvent::Checked`] brought.
        list: Listed,
        /// Whether the list shows a change that the watch has not brought.
        is_stuck: bool,
    },
    /// The open watch is dropped. [`PlanEvent::Paused`] follows after the pause.
    Pause {
        pause: Duration,
        cause: Cause,
        /// Whether the kind counts as listed and empty.
        is_empty: bool,
    },
    List,
    /// A watch with a time limit, after this version, or a streaming list.
    Watch(Option<String>, Duration),
}

/// Why a list or a watch is over.
#[derive(Debug)]
enum Cause {
    /// It has done its work.
    Done,
    Failed(Failure),
    /// The server does not know an option. The next request does without the option.
    Lacks(Failure, &'static str),
    /// The server does not have the kind.
    Absent,
    /// The watch has not reached the version of the server.
    Behind,
}

/// What the server has shown in this cycle, in the order of time.
#[derive(Debug)]
enum Proof {
    /// It was not asked.
    Due,
    /// It was asked when the watch was at this version, and has not answered.
    Asked(Option<u64>),
    /// It has this version, which the watch has not reached.
    Behind(u64),
    /// The watch has reached the version that the server had when it was asked.
    Shown,
    /// The watch has not reached that version, so the kind is listed; when, and the list.
    Checking(Option<(Instant, Listed)>),
}

/// The state of the watch of one kind.
#[derive(Debug)]
struct Plan {
    kind: ObjectKind,
    /// The length of a cycle without the jitter.
    silence: Duration,
    back_off: BackOff,
    /// True if the server has no streaming lists.
    is_streaming_refused: bool,
    /// After a failed streaming list, as behind a proxy: the next list is read in pages.
    is_paged: bool,
    /// After a refusal of the field selector, whose objects the model ignores anyway.
    is_selector_refused: bool,
    /// The version of the last list, change or bookmark; `None` before a list.
    version: Option<String>,
    is_listed: bool,
    /// When the kind was first wanted, or the server could last not be reached.
    unreached_at: Instant,
    /// True until a streaming list is complete.
    is_streaming_list: bool,
    /// Breaks at this version that the server caused.
    breaks: u32,
    proof: Proof,
    /// The version that an agent has seen at another replica.
    wanted: u64,
    cycle_ends: Instant,
    /// When the next small list, or the list of a check, is sent.
    ask_at: Option<Instant>,
    opened: Instant,
    /// The time limit of the open watch.
    limit: Duration,
    /// When the open watch counts as over, if the server does not end it.
    over_at: Instant,
    /// Whether the open watch, or the next watch, is short.
    is_short: bool,
}

impl Plan {
    /// A kind that has not been listed. After `silence` it has to be shown current.
    fn new(kind: ObjectKind, silence: Duration, rng: fastrand::Rng, now: Instant) -> Self {
        Self {
            kind,
            silence,
            back_off: BackOff::new(rng),
            is_streaming_refused: false,
            is_paged: false,
            is_selector_refused: false,
            version: None,
            is_listed: false,
            unreached_at: now,
            is_streaming_list: false,
            breaks: 0,
            proof: Proof::Due,
            wanted: 0,
            cycle_ends: now,
            ask_at: None,
            opened: now,
            limit: Duration::ZERO,
            over_at: now,
            is_short: false,
        }
    }

    /// Label and field selector, without objects that a proxy does not serve.
    fn selectors(&self) -> [Option<&'static str>; 2] {
        match self.kind {
            ObjectKind::Service => {
                let field_selector = (!self.is_selector_refused).then_some("spec.clusterIP!=None");
                [Some("!service.kubernetes.io/service-proxy-name"), field_selector]
            }
            ObjectKind::EndpointSlice => [Some("!service.kubernetes.io/headless"), None],
            ObjectKind::Node | ObjectKind::ServiceCidr | ObjectKind::Pod => [None, None],
        }
    }

    /// When [`PlanEvent::Time`] is due while a watch is open.
    fn wakes_at(&self) -> Instant {
        self.ask_at.map_or(self.over_at, |ask_at| ask_at.min(self.over_at))
    }

    /// Whether the next watch continues at the last version.
    fn resumes(&self) -> bool {
        self.version.is_some()
    }

    /// Whether only the list, which is under way, shows that the kind is current.
    fn is_checking(&self) -> bool {
        matches!(self.proof, Proof::Checking(_))
    }

    /// Decides what to do after `event`, which happened at `now`.
    fn next(&mut self, event: PlanEvent, now: Instant) -> Step {
        match event {
            PlanEvent::Paused => self.send(now),
            PlanEvent::Checked(list) => {
                self.proof = Proof::Checking(Some((now, list)));
                Step::Stay
            }
            PlanEvent::Listed(version) => {
                self.version = Some(version);
                (self.is_listed, self.breaks) = (true, 0);
                self.new_cycle(now);
                if std::mem::take(&mut self.is_streaming_list) {
                    self.over_at = self.cycle_ends + GRACE;
                    return Step::Stay;
                }
                pause(Duration::ZERO, Cause::Done)
            }
            PlanEvent::Line(version) => {
                self.version = Some(version);
                self.breaks = 0;
                self.back_off.reset();
                if matches!(self.proof, Proof::Behind(theirs) if self.number() >= Some(theirs)) {
                    self.proof = Proof::Shown;
                }
                Step::Stay
            }
            // The list of a check shows more than this answer.
            PlanEvent::Asked(_) if self.is_checking() => Step::Stay,
            PlanEvent::Asked(theirs) => self.asked(theirs.parse().ok(), now),
            PlanEvent::Wanted(version) => {
                self.wanted = version;
                let is_ahead = self.number().is_some_and(|ours| ours < version);
                // What is under way reaches the version, too.
                let is_under_way = self.is_short || matches!(self.proof, Proof::Asked(_) | Proof::Checking(_));
                if is_ahead && !is_under_way { self.ask(now) } else { Step::Stay }
            }
            PlanEvent::Time if now >= self.over_at => self.watch_is_over(false, now),
            PlanEvent::Time if self.ask_at.is_none_or(|ask_at| now < ask_at) => Step::Stay,
            PlanEvent::Time if self.is_checking() => {
                self.ask_at = None;
                Step::Check
            }
            PlanEvent::Time => self.ask(now),
            PlanEvent::Ended => self.watch_is_over(true, now),
            PlanEvent::Failed(failure) => self.failed(failure, now),
        }
    }

    fn send(&mut self, now: Instant) -> Step {
        self.opened = now;
        self.is_streaming_list = false;
        match self.version.clone() {
            Some(version) => {
                let (left, short) = (self.cycle_ends.saturating_duration_since(now), SHORT_WATCH.min(self.silence));
                self.is_short |= left < short;
                let limit = if self.is_short { short } else { left };
                // Servers read whole seconds.
                self.limit = Duration::from_secs(limit.as_secs() + u64::from(limit.subsec_nanos() > 0));
                self.over_at = now + self.limit + GRACE;
                Step::Watch(Some(version), self.limit)
            }
            None if self.is_streaming_refused || std::mem::take(&mut self.is_paged) => Step::List,
            None => {
                self.is_streaming_list = true;
                self.limit = STREAMING_LIST;
                Step::Watch(None, STREAMING_LIST)
            }
        }
    }

    fn ask(&mut self, now: Instant) -> Step {
        self.proof = Proof::Asked(self.number());
        self.ask_at = self.cycle_ends.checked_sub(lead(self.silence)).filter(|ask_at| *ask_at > now);
        Step::Ask
    }

    fn asked(&mut self, theirs: Option<u64>, now: Instant) -> Step {
        match (theirs, self.number()) {
            // After a restore of a backup, a watch from a higher version would receive nothing.
            (Some(theirs), Some(ours)) if matches!(self.proof, Proof::Asked(before) if Some(theirs) < before) => {
                self.failed(Failure::went_back(ours, theirs), now)
            }
            (Some(theirs), Some(ours)) if theirs > ours => {
                self.proof = Proof::Behind(theirs);
                if (ours + 1..=theirs).contains(&self.wanted) {
                    self.is_short = true;
                    return pause(Duration::ZERO, Cause::Done);
                }
                Step::Stay
            }
            // Versions that are not numbers cannot be compared.
            _ => {
                self.proof = Proof::Shown;
                Step::Current
            }
        }
    }

    fn watch_is_over(&mut self, is_clean: bool, now: Instant) -> Step {
        let (is_cycle_over, is_dead) = (now >= self.cycle_ends, !is_clean && now >= self.opened + self.limit);
        let was_short = std::mem::take(&mut self.is_short);
        match &mut self.proof {
            Proof::Checking(kept) => match kept.take_if(|(complete, _)| now >= *complete + GRACE) {
                Some((_, list)) => {
                    self.new_cycle(now);
                    if self.number() < Some(list.version.parse().unwrap_or(u64::MAX)) {
                        return Step::TakeList { is_stuck: self.number() < list.newest(), list };
                    }
                }
                None => self.is_short = true,
            },
            Proof::Asked(_) | Proof::Behind(_) if is_cycle_over || was_short => {
                self.proof = Proof::Checking(None);
                (self.is_short, self.ask_at) = (true, Some(now));
                if !is_dead {
                    return pause(Duration::ZERO, Cause::Behind);
                }
                return self.failed(Failure::silent(DEAD, self.limit), now);
            }
            _ if is_dead => return self.failed(Failure::silent(DEAD, self.limit), now),
            Proof::Shown if is_cycle_over => self.new_cycle(now),
            _ => {}
        }
        if now - self.opened < SHORTEST_WATCH {
            return pause(self.back_off.pause(None), Cause::Done);
        }
        self.back_off.reset();
        pause(Duration::ZERO, Cause::Done)
    }

    fn failed(&mut self, failure: Failure, now: Instant) -> Step {
        let was_streaming_list = std::mem::take(&mut self.is_streaming_list);
        if failure.code == Some(StatusCode::NOT_FOUND) && self.kind == ObjectKind::ServiceCidr {
            let pause = ABSENT_PAUSE.mul_f64(0.8 + 0.2 * self.back_off.rng.f64());
            return Step::Pause {
                pause,
                cause: Cause::Absent,
                is_empty: !std::mem::replace(&mut self.is_listed, true),
            };
        }
        if failure.code == Some(StatusCode::BAD_REQUEST) && self.selectors()[1].is_some() {
            self.is_selector_refused = true;
            let what =
                "the server refuses the field selector, as Kubernetes before 1.31 does; the watch continues without it";
            return pause(Duration::ZERO, Cause::Lacks(failure, what));
        }
        if was_streaming_list && failure.refuses_streaming() {
            self.is_streaming_refused = true;
            let what = "the server has no streaming lists; lists are read by pages";
            return pause(Duration::ZERO, Cause::Lacks(failure, what));
        }
        self.is_paged |= was_streaming_list;
        self.breaks += u32::from(failure.is_fault_of_server() && self.resumes());
        if failure.needs_list || self.breaks >= BREAKS_BEFORE_LIST {
            (self.version, self.proof) = (None, Proof::Due);
        }
        if let Proof::Checking(kept) = &mut self.proof {
            *kept = None;
        }
        // After a break, the server may be another one, or may have been restored from a backup.
        self.ask_at = Some(now);
        let is_retried_at_once = was_streaming_list && failure.retry_after.is_none();
        let pause = if is_retried_at_once { Duration::ZERO } else { self.back_off.pause(failure.retry_after) };
        if failure.reason == "connection_failed" {
            self.unreached_at = now;
        }
        // Without the right to read an optional kind, the replica serves all the same. After other
        // failures it waits for some time: without the pods that wait for the gate, it would take
        // their endpoints from the nodes.
        let is_lasting = failure.code == Some(StatusCode::FORBIDDEN) || now >= self.unreached_at + OPTIONAL_FOR;
        let gives_up = !self.kind.is_essential() && !was_streaming_list && !self.is_listed && is_lasting;
        self.is_listed |= gives_up;
        Step::Pause { pause, cause: Cause::Failed(failure), is_empty: gives_up }
    }

    fn new_cycle(&mut self, now: Instant) {
        // Replicas that started together soon ask apart. Limits are whole seconds.
        let jitter = Duration::from_secs(self.back_off.rng.u64(0..=self.silence.as_secs() / 30));
        self.cycle_ends = now + self.silence + jitter;
        self.ask_at = Some(self.cycle_ends - lead(self.silence));
        (self.proof, self.is_short) = (Proof::Due, false);
    }

    fn number(&self) -> Option<u64> {
        self.version.as_ref()?.parse().ok()
    }
}

fn pause(pause: Duration, cause: Cause) -> Step {
    Step::Pause { pause, cause, is_empty: false }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod plan_tests;
