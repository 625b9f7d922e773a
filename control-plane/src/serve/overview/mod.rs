//! The fleet as people watch it (`Inspect.WatchAgents`): a row for each node of all replicas, and
//! the times of changes until they are everywhere (discovery.proto, section 21).
//!
//! One task computes this for all watchers, once a second. It does nothing while nobody watches,
//! except that one of the replicas follows the changes and records their times. While somebody
//! watches, it compares a few numbers of each own agent, and the rest of its work is proportional
//! to what has changed. `rows.rs` remembers the rows.

mod rows;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use headgate_core::{
    check_subdomain,
    node_state::{NodeState, SETTLED},
};
use headgate_proto::v1;
use prost::Message as _;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::AbortHandle,
    time::{MissedTickBehavior, interval},
};
use tonic::Status;

use self::rows::{Place, RowLog, TooSlow};
use super::{
    context::{Lifecycle, milliseconds, unix_ms},
    everywhere::{Everywhere, Link, NO_AGENT, Verdict},
    fleet::{Agent, Fleet, LocalChange, LocalOutcome},
};
use crate::{
    objects::SourceKind,
    store::{positions_from_wire, positions_to_wire},
};

const TICK: Duration = Duration::from_secs(1);

/// The maximum number of watchers of this replica, and of all replicas.
const MAX_WATCHERS: usize = 64;

/// The number of changes that are remembered, and that a watcher of all replicas gets in a second.
const MAX_CHANGES: usize = 256;
const MAX_SHOWN: usize = 8;

/// A change that takes longer is shown before it has ended.
const LONG: Duration = Duration::from_secs(1);

/// The longest wait for the rows of other replicas before the first rows are sent.
const FIRST_WAIT: Duration = Duration::from_secs(2);

/// The longest time between two looks at which Nodes have no agent.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The maximum number of changes of another replica that are remembered.
const MAX_TOLD: usize = 1_024;

/// The maximum size of the rows of another replica in memory.
const MAX_ROW_BYTES: usize = 256 << 20;

/// The maximum size of what another replica says about one change.
const MAX_CHANGE_BYTES: usize = 16 << 10;

const DONE: &str = "done";
const RUNNING: &str = "running";
const INCOMPLETE: &str = "incomplete";

/// The rows and changes of this replica alone, and of all replicas.
pub(crate) struct Overview {
    fleet: Arc<Fleet>,
    everywhere: Arc<Everywhere>,
    here: Shared,
    all: Shared,
    wake: Notify,
}

#[derive(Default)]
struct Shared {
    log: Mutex<RowLog>,
    /// The number of the log, and whether it is complete.
    number: watch::Sender<(u64, bool)>,
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, RowLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        let log = self.log();
        let now = (log.number(), log.is_complete);
        self.number.send_if_modified(|number| std::mem::replace(number, now) != now);
    }
}

/// A caller of `WatchAgents`.
pub(crate) struct AgentsWatcher {
    overview: Arc<Overview>,
    place: Place,
    request: v1::WatchAgentsRequest,
    number: watch::Receiver<(u64, bool)>,
    lifecycle: watch::Receiver<Lifecycle>,
}

impl AgentsWatcher {
    /// Returns the next message; `None` after an error.
    pub(crate) async fn next(&mut self) -> Option<Result<v1::AgentsChange, Status>> {
        loop {
            self.number.borrow_and_update();
            if *self.lifecycle.borrow_and_update() != Lifecycle::Serving {
                return Some(Err(Status::unavailable("this replica stops")));
            }
            let page = self.overview.shared(&self.request).log().page(&mut self.place);
            match page {
                Ok(Some(message)) => return Some(Ok(message)),
                Ok(None) => {}
                Err(TooSlow) => return Some(Err(Status::data_loss("the watch fell behind: watch again"))),
            }
            tokio::select! {
                changed = self.number.changed() => changed.ok()?,
                changed = self.lifecycle.changed() => changed.ok()?,
            }
        }
    }
}

impl Drop for AgentsWatcher {
    fn drop(&mut self) {
        let mut log = self.overview.shared(&self.request).log();
        log.watchers -= 1;
        log.row_watchers -= usize::from(!self.request.only_changes);
    }
}

impl Overview {
    pub(crate) fn new(fleet: Arc<Fleet>, everywhere: Arc<Everywhere>) -> Arc<Self> {
        let (here, all, wake) = (Shared::default(), Shared::default(), Notify::new());
        Arc::new(Self { fleet, everywhere, here, all, wake })
    }

    fn shared(&self, request: &v1::WatchAgentsRequest) -> &Shared {
        if request.only_this_replica { &self.here } else { &self.all }
    }

    /// Begins to watch.
    ///
    /// # Errors
    ///
    /// `RESOURCE_EXHAUSTED`: there are too many watchers.
    pub(crate) fn watch(self: &Arc<Self>, mut request: v1::WatchAgentsRequest) -> Result<AgentsWatcher, Status> {
        request.only_changes &= request.only_this_replica;
        let shared = self.shared(&request);
        let mut log = shared.log();
        if log.watchers >= MAX_WATCHERS {
            let text = format!("{MAX_WATCHERS} callers watch the agents of this replica already: end some of them");
            return Err(Status::resource_exhausted(text));
        }
        log.watchers += 1;
        log.row_watchers += usize::from(!request.only_changes);
        let (place, number) = (log.place(request.only_changes), shared.number.subscribe());
        drop(log);
        self.wake.notify_one();
        let lifecycle = self.fleet.context.lifecycle.subscribe();
        Ok(AgentsWatcher { overview: Arc::clone(self), place, request, number, lifecycle })
    }

    /// Computes rows and changes until its task is aborted.
    pub(crate) async fn run(self: Arc<Self>) {
        let (messages, mut received) = mpsc::channel(64);
        let mut work = OverviewWork::new(&self, messages);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.wake.notified() => {}
                Some((epoch, message)) = received.recv() => {
                    let completes = work.take_in(epoch, message);
                    // The first rows do not wait for the next second.
                    if !completes || self.all.log().is_complete {
                        continue;
                    }
                }
            }
            work.step(&self);
        }
    }

    /// The agent of this replica that holds up what is running, and why.
    fn holding(&self) -> Option<(String, String)> {
        let agents = self.fleet.all();
        let member = |agent: &Arc<Agent>| Some((agent.member_version()?, Arc::clone(agent)));
        let (version, agent) = agents.iter().filter_map(member).min_by_key(|(version, _)| *version)?;
        let reason = agent.laggard(&self.fleet.context, version + 1, &BTreeSet::new()).reason;
        let reason = if reason.is_empty() { format!("its kernel has version {version}") } else { reason };
        Some((agent.node.to_string(), reason))
    }

    /// The last changes as this replica alone knows them, the newest first.
    pub(crate) fn changes_here(&self, limit: usize) -> Vec<v1::ChangeTime> {
        let (now, holding) = (Instant::now(), self.holding());
        let changes = self.fleet.progress().last_changes(limit.min(MAX_CHANGES));
        changes.iter().rev().map(|local| change_here(local, holding.as_ref(), now)).collect()
    }

    /// The last changes as all replicas know them, the newest first. `others` have told theirs.
    pub(crate) fn changes_everywhere(&self, limit: usize, others: &[(&str, &Told)], all: u64) -> Vec<v1::ChangeTime> {
        let (now, holding) = (Instant::now(), self.holding());
        let changes = self.fleet.progress().last_changes(limit.min(MAX_CHANGES));
        let everywhere = |local| change_everywhere(local, holding.as_ref(), others, all, now).change;
        changes.iter().rev().map(everywhere).collect()
    }
}

/// What decides whether the row of an agent has changed: its stream, the number of its reports, its
/// state, the step of its lag, and whether another agent throws it out.
type Look = (usize, u64, NodeState, u64, bool);

/// Another replica.
struct OtherReplica {
    name: String,
    link: Arc<Link>,
    rows: HashMap<Arc<str>, v1::AgentInfo>,
    row_bytes: usize,
    told: Told,
    is_complete: bool,
    has_rows: bool,
    task: AbortHandle,
}

impl Drop for OtherReplica {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl OtherReplica {
    fn has_agents(&self) -> bool {
        self.link.look(|replica| replica.is_ok_and(|replica| replica.nodes.values().any(|(_, gone)| gone.is_none())))
    }
}

/// The memory of a row: its fields, and what they point to.
fn bytes_of(row: &v1::AgentInfo) -> usize {
    size_of::<v1::AgentInfo>() + row.encoded_len()
}

/// The changes up to this version have ended, and the last one that was shown while it was running,
/// with the node that held it up.
#[derive(Default)]
struct Shown {
    ended: u64,
    running: (u64, String),
}

/// The state of the task.
struct OverviewWork {
    messages: mpsc::Sender<(u64, v1::AgentsChange)>,
    looks: HashMap<Arc<str>, Look>,
    /// The other replicas by epoch.
    peers: HashMap<u64, OtherReplica>,
    /// The nodes whose row of all replicas may have changed.
    dirty: BTreeSet<Arc<str>>,
    verdict: Verdict,
    looked_at: Option<Instant>,
    /// What changes the verdict.
    rosters: watch::Receiver<u64>,
    members: watch::Receiver<()>,
    replicas: Option<watch::Receiver<u64>>,
    /// Since when somebody has watched all replicas.
    began: Option<Instant>,
    shown_here: Option<Shown>,
    shown_all: Option<Shown>,
}

impl OverviewWork {
    fn new(overview: &Overview, messages: mpsc::Sender<(u64, v1::AgentsChange)>) -> Self {
        Self {
            messages,
            looks: HashMap::new(),
            peers: HashMap::new(),
            dirty: BTreeSet::new(),
            verdict: Verdict::default(),
            looked_at: None,
            rosters: overview.fleet.rosters(),
            members: overview.fleet.progress().members(),
            replicas: overview.everywhere.replicas().map(|replicas| replicas.changes()),
            began: None,
            shown_here: None,
            shown_all: None,
        }
    }

    /// Takes in what another replica says. Returns true if its rows are complete with it.
    fn take_in(&mut self, epoch: u64, message: v1::AgentsChange) -> bool {
        let Some(peer) = self.peers.get_mut(&epoch) else { return false };
        let now = Instant::now();
        for row in message.agents.into_iter().map(rows::row).filter(|row| check_subdomain(&row.node).is_ok()) {
            let node: Arc<str> = row.node.as_str().into();
            self.dirty.insert(Arc::clone(&node));
            peer.row_bytes += bytes_of(&row);
            peer.row_bytes -= peer.rows.insert(node, row).as_ref().map_or(0, bytes_of);
        }
        for node in message.removed {
            if let Some((node, row)) = peer.rows.remove_entry(node.as_str()) {
                peer.row_bytes -= bytes_of(&row);
                self.dirty.insert(node);
            }
        }
        if peer.row_bytes > MAX_ROW_BYTES {
            tracing::warn!(
                replica = peer.name,
                "the rows of another replica's agents take more than {MAX_ROW_BYTES} bytes; asking it anew"
            );
            self.dirty.extend(peer.rows.keys().cloned());
            self.peers.remove(&epoch);
            return false;
        }
        let changes = message.changes.into_iter().filter(|change| change.encoded_len() <= MAX_CHANGE_BYTES);
        changes.for_each(|change| peer.told.add(change, now));
        peer.is_complete |= message.is_complete;
        message.is_complete
    }

    fn step(&mut self, overview: &Overview) {
        let Overview { fleet, everywhere, here, all, .. } = overview;
        let demand = |shared: &Shared| {
            let log = shared.log();
            (log.watchers > 0, log.row_watchers > 0)
        };
        let ((wants_here, wants_own_rows), (wants_all, _)) = (demand(here), demand(all));
        if wants_own_rows || wants_all {
            self.look_at_own(fleet, here);
        } else {
            here.log().clear();
            self.looks.clear();
        }
        let is_recorder = everywhere.rank() == 0;
        self.follow(everywhere, wants_all || is_recorder, wants_all);
        if wants_all {
            if self.began.is_none() {
                self.dirty.extend(self.looks.keys().cloned());
            }
            let began = *self.began.get_or_insert_with(Instant::now);
            if self.peers.values().all(|peer| peer.is_complete) || began.elapsed() >= FIRST_WAIT {
                self.look_at_all(overview);
            }
        } else {
            all.log().clear();
            (self.began, self.looked_at, self.verdict) = (None, None, Verdict::default());
            self.dirty.clear();
        }
        self.show_here(overview, wants_here);
        self.show_all(overview, wants_all, is_recorder);
        here.announce();
        all.announce();
    }

    /// Updates the rows of the agents of this replica.
    fn look_at_own(&mut self, fleet: &Fleet, here: &Shared) {
        let store = &fleet.context.store;
        let (source, settled) = (store.source_state(), store.version_before(SETTLED));
        let mut gone = std::mem::take(&mut self.looks);
        let mut log = here.log();
        for agent in fleet.all() {
            let (revision, reported, programmed) = {
                let record = agent.record();
                (record.revision, record.reported(settled), record.programmed_version)
            };
            let state = NodeState::of(source, reported);
            let is_late = matches!(state, NodeState::Behind | NodeState::Failing);
            let lag = if is_late { rows::lag_step(agent.lag_ms(store, programmed)) } else { 0 };
            let look = (Arc::as_ptr(&agent).addr(), revision, state, lag, agent.has_rivals());
            if gone.remove(&agent.node) != Some(look) {
                log.set(&agent.node, Some(rows::row(agent.info(&fleet.context))));
                self.dirty.insert(Arc::clone(&agent.node));
            }
            self.looks.insert(Arc::clone(&agent.node), look);
        }
        for node in gone.into_keys() {
            log.set(&node, None);
            self.dirty.insert(node);
        }
        log.is_complete = true;
    }

    /// Follows the joined replicas, if that is wanted, with or without their rows.
    fn follow(&mut self, everywhere: &Everywhere, is_wanted: bool, with_rows: bool) {
        let links = if is_wanted { everywhere.links() } else { Vec::new() };
        let identity = |link: Arc<Link>| {
            let found = link.look(|replica| replica.ok().map(|replica| replica.identity.clone()))?;
            Some((found.epoch, (found.replica, link)))
        };
        let joined: BTreeMap<u64, (String, Arc<Link>)> = links.into_iter().filter_map(identity).collect();
        let dirty = &mut self.dirty;
        self.peers.retain(|epoch, peer| {
            let is_kept = joined.contains_key(epoch) && peer.has_rows == with_rows && !peer.task.is_finished();
            if !is_kept {
                dirty.extend(peer.rows.keys().cloned());
            }
            is_kept
        });
        for (epoch, (name, link)) in joined {
            self.peers.entry(epoch).or_insert_with(|| {
                let task = tokio::spawn(listen(Arc::clone(&link), epoch, with_rows, self.messages.clone()));
                let (rows, row_bytes, told, task) = (HashMap::new(), 0, Told::default(), task.abort_handle());
                OtherReplica { name, link, rows, row_bytes, told, is_complete: false, has_rows: with_rows, task }
            });
        }
    }

    /// Updates the rows of the nodes of all replicas.
    fn look_at_all(&mut self, overview: &Overview) {
        let Overview { everywhere, here, all, .. } = overview;
        let has_changed = self.rosters.has_changed().unwrap_or(false)
            || self.members.has_changed().unwrap_or(false)
            || self.replicas.as_ref().is_some_and(|replicas| replicas.has_changed().unwrap_or(false));
        if has_changed || self.looked_at.is_none_or(|at| at.elapsed() >= LOOK_AGAIN) {
            self.rosters.mark_unchanged();
            self.members.mark_unchanged();
            self.replicas.iter_mut().for_each(watch::Receiver::mark_unchanged);
            self.looked_at = Some(Instant::now());
            let old = std::mem::replace(&mut self.verdict, everywhere.look());
            let (absent, silent) = ([&old.absent, &self.verdict.absent], [&old.unconfirmed, &self.verdict.unconfirmed]);
            let is_new = |node: &str| silent[0].contains_key(node) != silent[1].contains_key(node);
            // The Nodes themselves may have changed, too.
            let absent = absent.iter().flat_map(|absent| absent.keys());
            let silent = silent.iter().flat_map(|agents| agents.keys().filter(|node| is_new(node)));
            self.dirty.extend(absent.chain(silent).map(|node| Arc::from(node.as_str())));
        }
        let (here, mut all) = (here.log(), all.log());
        for node in std::mem::take(&mut self.dirty) {
            let others = self.peers.values().filter_map(|peer| peer.rows.get(&node));
            let row = choose(others.chain(here.row(&node)), || everywhere.without_agent(&self.verdict, &node));
            let row = row.map(Cow::into_owned);
            all.set(&node, row);
        }
        all.is_complete = true;
    }

    /// Shows the changes of this replica alone.
    fn show_here(&mut self, overview: &Overview, is_wanted: bool) {
        let Some(shown) = wanted(&mut self.shown_here, is_wanted, 0) else { return };
        let now = Instant::now();
        let (ended, running) = news(overview, shown, |local, holding| ChangeEverywhere {
            change: change_here(local, holding, now),
            time: None,
        });
        let changes = ended.into_iter().chain(running).map(|found| found.change).collect();
        overview.here.log().add(changes, 0);
    }

    /// Shows the changes of all replicas, and records their times.
    fn show_all(&mut self, overview: &Overview, is_wanted: bool, is_recorder: bool) {
        let head = overview.fleet.context.store.version();
        let Some(shown) = wanted(&mut self.shown_all, is_wanted || is_recorder, head) else { return };
        let now = Instant::now();
        let others = self.peers.values().filter(|peer| peer.has_agents());
        let others: Vec<_> = others.map(|peer| (peer.name.as_str(), &peer.told)).collect();
        let all = self.verdict.nodes as u64;
        let look = |local: &LocalChange, holding: Option<&(String, String)>| {
            change_everywhere(local, holding, &others, all, now)
        };
        let (mut ended, running) = news(overview, shown, look);
        if is_recorder {
            for time in ended.iter().filter_map(|found| found.time) {
                overview.fleet.context.metrics.fleet_everywhere.observe(time.as_secs_f64());
            }
        }
        ended.sort_by_key(|found| std::cmp::Reverse(found.change.everywhere_after_ms));
        let left_out = ended.len().saturating_sub(MAX_SHOWN);
        ended.truncate(MAX_SHOWN);
        let changes = ended.into_iter().chain(running).map(|found| found.change).collect();
        if is_wanted {
            overview.all.log().add(changes, left_out);
        }
    }
}

/// Returns what was shown, if something is wanted: at first, everything up to `begin`.
fn wanted(shown: &mut Option<Shown>, is_wanted: bool, begin: u64) -> Option<&mut Shown> {
    if !is_wanted {
        *shown = None;
        return None;
    }
    Some(shown.get_or_insert_with(|| Shown { ended: begin, ..Shown::default() }))
}

/// Returns the changes that have ended since the last call, and the oldest one that has been
/// running for long, if it was not shown before with the node that holds it up now.
fn news(
    overview: &Overview,
    shown: &mut Shown,
    look: impl Fn(&LocalChange, Option<&(String, String)>) -> ChangeEverywhere,
) -> (Vec<ChangeEverywhere>, Option<ChangeEverywhere>) {
    let mut ended = Vec::new();
    loop {
        let page = overview.fleet.progress().changes(shown.ended, MAX_CHANGES);
        if page.is_empty() {
            return (ended, None);
        }
        for local in page {
            let found = look(&local, None);
            if !found.is_running() {
                shown.ended = local.version;
                ended.push(found);
                continue;
            }
            // All later changes wait, too.
            let is_long = local.commit.received.elapsed() >= LONG;
            let found = is_long.then(|| look(&local, overview.holding().as_ref()));
            let running = found.map(|found| ((local.version, found.change.slowest.clone()), found));
            let news = running.filter(|(by, _)| std::mem::replace(&mut shown.running, by.clone()) != *by);
            return (ended, news.map(|(_, found)| found));
        }
    }
}

/// Passes on what another replica says, until its stream ends.
async fn listen(link: Arc<Link>, epoch: u64, with_rows: bool, messages: mpsc::Sender<(u64, v1::AgentsChange)>) {
    let Some(mut client) = link.inspect() else { return };
    let request = v1::WatchAgentsRequest { only_this_replica: true, only_changes: !with_rows };
    let Ok(answer) = client.watch_agents(request).await else { return };
    let mut items = answer.into_inner();
    while let Ok(Some(message)) = items.message().await {
        if messages.send((epoch, message)).await.is_err() {
            return;
        }
    }
}

/// Chooses the row of a node that replicas list. While a node moves, two replicas list it. The
/// worse state counts. `without_agent` has the row of a node without an agent, or that nobody
/// lists.
pub(crate) fn choose<'a>(
    rows: impl Iterator<Item = &'a v1::AgentInfo>,
    without_agent: impl FnOnce() -> Option<v1::AgentInfo>,
) -> Option<Cow<'a, v1::AgentInfo>> {
    let is_good = |row: &v1::AgentInfo| row.state == NodeState::UpToDate.as_str();
    let found = rows.reduce(|known, row| if is_good(known) { row } else { known });
    match without_agent() {
        // The stream of a node may have ended since its replica listed it.
        Some(row) if row.state == NO_AGENT || found.is_none() => Some(Cow::Owned(row)),
        _ => found.map(Cow::Borrowed),
    }
}

/// What another replica has told about its commits, in order of version.
#[derive(Debug, Default)]
pub(crate) struct Told(VecDeque<(BTreeMap<SourceKind, u64>, Instant, v1::ChangeTime)>);

impl Told {
    /// Takes in what arrived at `now`. A change replaces an earlier statement about its version.
    pub(crate) fn add(&mut self, change: v1::ChangeTime, now: Instant) {
        let ago = Duration::from_micros(change.programmed_ago_microseconds);
        let told = (positions_from_wire(&change.positions), now.checked_sub(ago).unwrap_or(now), change);
        match self.0.binary_search_by_key(&told.2.version, |(.., known)| known.version) {
            Ok(index) => self.0[index] = told,
            Err(index) => self.0.insert(index, told),
        }
        self.0.drain(..self.0.len().saturating_sub(MAX_TOLD));
    }

    /// Returns the first change with these positions.
    fn find(&self, wanted: &[(SourceKind, u64)]) -> Option<(Instant, &v1::ChangeTime)> {
        let has = |positions: &BTreeMap<SourceKind, u64>, (kind, wanted): &(SourceKind, u64)| {
            positions.get(kind).is_none_or(|position| position >= wanted)
        };
        let index = self.0.partition_point(|(positions, ..)| !wanted.iter().all(|wanted| has(positions, wanted)));
        self.0.get(index).map(|(_, end, change)| (*end, change))
    }
}

/// What all replicas know about a change of this replica.
#[derive(Debug)]
pub(crate) struct ChangeEverywhere {
    pub(crate) change: v1::ChangeTime,
    /// The time from the trigger to the last node; `None` while it is running or if it is
    /// incomplete.
    pub(crate) time: Option<Duration>,
}

impl ChangeEverywhere {
    pub(crate) fn is_running(&self) -> bool {
        self.change.state == RUNNING
    }
}

/// Describes a change as this replica alone knows it. `holding` is the node that holds up what is
/// running, and why.
pub(crate) fn change_here(local: &LocalChange, holding: Option<&(String, String)>, now: Instant) -> v1::ChangeTime {
    let LocalChange { version, commit, outcome, nodes } = local;
    let (state, end, slowest, reason) = match outcome {
        LocalOutcome::Done(end, node) => (DONE, *end, node.to_string(), String::new()),
        LocalOutcome::Lost(end, node) => {
            (INCOMPLETE, *end, node.to_string(), "the node lost its stream before it had the change".to_owned())
        }
        LocalOutcome::Running => {
            let (node, reason) = holding.cloned().unwrap_or_default();
            (RUNNING, now, node, reason)
        }
    };
    let (service, address) = commit.subject.clone().unzip();
    let positions = commit.positions.iter().map(|(kind, position, _)| (*kind, *position));
    v1::ChangeTime {
        version: *version,
        unix_ms: unix_ms(SystemTime::now() - commit.received.elapsed()),
        service: service.map(|key| key.to_string()).unwrap_or_default(),
        endpoint: address.flatten().map(|address| address.to_string()).unwrap_or_default(),
        changed: commit.changed as u64,
        trigger: commit.trigger.as_str().into(),
        arrived_after_ms: milliseconds(commit.waited),
        everywhere_after_ms: milliseconds(commit.time_until(end)),
        nodes: *nodes as u64,
        missing: 0,
        state: state.into(),
        slowest,
        reason,
        positions: positions_to_wire(positions),
        programmed_ago_microseconds: u64::try_from(now.saturating_duration_since(end).as_micros()).unwrap_or(u64::MAX),
    }
}

/// Describes a change as all replicas know it. `others` are the joined replicas that have agents,
/// and `all` is the number of nodes that count.
pub(crate) fn change_everywhere(
    local: &LocalChange,
    holding: Option<&(String, String)>,
    others: &[(&str, &Told)],
    all: u64,
    now: Instant,
) -> ChangeEverywhere {
    let mut change = change_here(local, holding, now);
    let moved = local.commit.positions.iter().filter(|(.., has_moved)| *has_moved);
    let moved: Vec<_> = moved.map(|(kind, position, _)| (*kind, *position)).collect();
    let mut end = match &local.outcome {
        LocalOutcome::Done(end, _) | LocalOutcome::Lost(end, _) => *end,
        LocalOutcome::Running => now,
    };
    let rank = |state: &str| [DONE, INCOMPLETE, RUNNING].iter().position(|known| *known == state);
    // Without positions, nobody knows which change of another replica is the same.
    for (replica, told) in others.iter().filter(|_| !moved.is_empty()) {
        let silent = || v1::ChangeTime {
            state: RUNNING.into(),
            reason: format!("replica {replica} has not told when its agents had the change"),
            ..v1::ChangeTime::default()
        };
        let (ended, theirs) = told.find(&moved).map_or_else(|| (now, silent()), |(end, theirs)| (end, theirs.clone()));
        change.nodes += theirs.nodes;
        let is_worse = rank(&theirs.state) > rank(&change.state);
        let is_later = theirs.state == DONE && change.state == DONE && theirs.nodes > 0 && ended > end;
        if is_worse || is_later {
            end = if theirs.state == RUNNING { now } else { ended };
            (change.state, change.slowest, change.reason) = (theirs.state, theirs.slowest, theirs.reason);
        }
    }
    let time = local.commit.time_until(end);
    change.everywhere_after_ms = milliseconds(time);
    change.missing = all.saturating_sub(change.nodes);
    (change.positions, change.programmed_ago_microseconds) = (Vec::new(), 0);
    let is_done = change.state == DONE && change.nodes > 0;
    ChangeEverywhere { change, time: is_done.then_some(time) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Commit;

    const SLICES: SourceKind = SourceKind::EndpointSlices;

    fn local(version: u64, position: u64, received: Instant, outcome: LocalOutcome) -> LocalChange {
        let commit = Commit {
            received,
            trigger: Default::default(),
            waited: Duration::from_millis(100),
            subject: None,
            changed: 1,
            positions: [(SLICES, position, true), (SourceKind::Services, 900, false)].into(),
        };
        LocalChange { version, commit, outcome, nodes: 2 }
    }

    /// What a replica tells about a commit that reached these positions of slices.
    fn told(now: Instant, all: &[(u64, u64, LocalOutcome)]) -> Told {
        let mut told = Told::default();
        for (version, position, outcome) in all {
            told.add(change_here(&local(*version, *position, now, outcome.clone()), None, now), now);
        }
        told
    }

    #[test]
    fn the_last_node_of_all_replicas_ends_a_change() {
        let now = Instant::now() + Duration::from_secs(60);
        let at = |ms: u64| now - Duration::from_millis(1_000 - ms);
        let done = |ms: u64, node: &str| LocalOutcome::Done(at(ms), node.into());
        let own = local(7, 50, at(0), done(30, "a"));
        // The other replica has merged the change with a later one, and numbers it otherwise.
        let other = told(now, &[(1, 49, done(10, "x")), (2, 52, done(80, "b")), (3, 60, done(500, "y"))]);
        let both = change_everywhere(&own, None, &[("cp-2", &other)], 5, now);
        assert_eq!(both.time.map(|time| time.as_millis()), Some(180), "{both:?}");
        assert_eq!((both.change.slowest.as_str(), both.change.nodes, both.change.missing), ("b", 4, 1));
        let alone = change_everywhere(&own, None, &[], 2, now);
        assert_eq!((alone.change.everywhere_after_ms, alone.change.state.as_str()), (130, "done"));
        let faster = told(now, &[(2, 50, done(5, "b"))]);
        assert_eq!(change_everywhere(&own, None, &[("cp-2", &faster)], 4, now).change.slowest, "a");
    }

    #[test]
    fn a_change_runs_until_every_replica_has_told() {
        let now = Instant::now() + Duration::from_secs(60);
        let done = || LocalOutcome::Done(now, "b".into());
        let own = local(7, 50, now, LocalOutcome::Done(now, "a".into()));
        let state = |others: &[(&str, &Told)]| {
            let ChangeEverywhere { change, time } = change_everywhere(&own, None, others, 4, now);
            (change.state, change.slowest, time.is_some())
        };
        let behind = told(now, &[(1, 49, done())]);
        assert_eq!(state(&[("cp-2", &behind)]), ("running".into(), String::new(), false));
        let lost = told(now, &[(1, 50, LocalOutcome::Lost(now, "b".into()))]);
        assert_eq!(state(&[("cp-2", &lost)]), ("incomplete".into(), "b".into(), false));
        assert_eq!(state(&[("cp-2", &lost), ("cp-3", &behind)]).0, "running");
        let mut told = told(now, &[(1, 50, LocalOutcome::Running)]);
        assert_eq!(state(&[("cp-2", &told)]).0, "running");
        told.add(change_here(&local(1, 50, now, done()), None, now), now);
        assert_eq!(state(&[("cp-2", &told)]), ("done".into(), "a".into(), true));
        // A folder of manifests has no positions to compare.
        let commit = Commit { positions: [].into(), ..own.commit.clone() };
        let own = LocalChange { commit, ..own };
        assert!(change_everywhere(&own, None, &[("cp-2", &behind)], 4, now).time.is_some());
    }
}
