//! A simulated clock and server drive the plan: hours take milliseconds.

use super::*;
use crate::{
    model,
    objects::{Metadata, Object, Service},
    source::kubernetes::FAILING_LIMIT,
};

const SILENCE: Duration = Duration::from_secs(60);
const BOUND: Duration = Duration::from_secs(90);
const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// How the server behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// It sends a bookmark 2 s before a watch ends.
    Good,
    /// Its watches bring nothing. Lists work.
    Stuck,
    /// Like `Stuck`, and watches do not end either.
    Dead,
    /// Like `Stuck`, and lists are not answered. Requests for the version are answered.
    StuckWithoutLists,
    /// Like `Dead`, and lists are not answered. Requests for the version are answered.
    DeadWithoutLists,
}

impl Server {
    fn brings_nothing(self) -> bool {
        self != Self::Good
    }

    fn never_ends(self) -> bool {
        matches!(self, Self::Dead | Self::DeadWithoutLists)
    }
}

/// A list at a version. Its newest object has the version `newest`.
fn list_of(version: u64, newest: Option<u64>) -> Listed {
    let metadata = |version: u64| Metadata { resource_version: version.to_string(), ..Metadata::default() };
    let service = |version| Object::Service(Service { metadata: metadata(version), ..Service::default() });
    let events = newest.map(|version| model::Event::Apply(Box::new(service(version))));
    Listed { events: events.into_iter().collect(), version: version.to_string() }
}

struct World {
    start: Instant,
    now: Instant,
    plan: Plan,
    server: Server,
    /// Changes of other kinds in a second.
    others: u64,
    changes: u64,
    /// Changes of the kind: the versions that the watch has not brought.
    waiting: Vec<u64>,
    /// The time limit of the open watch, and when the server has sent a bookmark.
    watch: Option<(Instant, Duration, bool)>,
    answer: Option<Instant>,
    /// When the list that is compared with the watch is complete.
    checked: Option<Instant>,
    /// When small lists and watches were sent.
    small: Vec<Instant>,
    lists: u32,
    failures: u32,
    failing_since: Option<Instant>,
    cut_off: Option<Instant>,
    brought: Option<Instant>,
}

impl World {
    fn new(server: Server, seed: u64) -> Self {
        let now = Instant::now();
        let plan = Plan::new(ObjectKind::Service, SILENCE, fastrand::Rng::with_seed(seed), now);
        let mut world = Self {
            start: now,
            now,
            plan,
            server,
            others: 10,
            changes: 0,
            waiting: Vec::new(),
            watch: None,
            answer: None,
            checked: None,
            small: Vec::new(),
            lists: 0,
            failures: 0,
            failing_since: None,
            cut_off: None,
            brought: None,
        };
        world.happen(PlanEvent::Paused);
        world
    }

    /// The version of the server.
    fn version(&self) -> u64 {
        1_000 + self.changes + self.others * (self.now - self.start).as_secs()
    }

    fn change(&mut self) {
        self.changes += 1;
        self.waiting.push(self.version());
        if self.watch.is_some() && !self.server.brings_nothing() {
            self.bring();
        }
    }

    fn bring(&mut self) {
        if let Some(version) = self.waiting.pop() {
            self.waiting.clear();
            self.brought = Some(self.now);
            self.failing_since = None;
            self.happen(PlanEvent::Line(version.to_string()));
        }
    }

    fn happen(&mut self, event: PlanEvent) {
        let step = self.plan.next(event, self.now);
        match step {
            Step::Stay | Step::Current => {}
            Step::Ask => {
                self.small.push(self.now);
                let takes = if self.server.brings_nothing() { seconds(3) } else { Duration::from_millis(10) };
                self.answer = Some(self.now + takes);
            }
            Step::Check => {
                self.lists += 1;
                let is_answered = !matches!(self.server, Server::StuckWithoutLists | Server::DeadWithoutLists);
                self.checked = is_answered.then(|| self.now + Duration::from_millis(100));
            }
            Step::TakeList { list, is_stuck } => {
                self.listed(list.version.parse().unwrap());
                if is_stuck {
                    self.cut_off.get_or_insert(self.now);
                }
            }
            Step::Pause { pause, cause, .. } => {
                self.watch = None;
                if !self.plan.is_checking() {
                    (self.answer, self.checked) = (None, None);
                }
                match cause {
                    Cause::Failed(_) | Cause::Behind => {
                        self.failures += u32::from(matches!(cause, Cause::Failed(_)));
                        self.failing_since.get_or_insert(self.now);
                    }
                    Cause::Done | Cause::Absent | Cause::Lacks(..) => {}
                }
                self.now += pause;
                self.happen(PlanEvent::Paused);
            }
            Step::Watch(Some(_), limit) => {
                self.small.push(self.now);
                self.watch = Some((self.now, limit, false));
                if !self.plan.is_checking() {
                    self.failing_since = None;
                }
                if !self.server.brings_nothing() {
                    self.bring();
                }
            }
            Step::List | Step::Watch(..) => {
                self.lists += 1;
                self.now += Duration::from_millis(100);
                self.watch = matches!(step, Step::Watch(..)).then_some((self.now, STREAMING_LIST, false));
                self.listed(self.version());
            }
        }
    }

    /// A list replaces what is known.
    fn listed(&mut self, version: u64) {
        if self.waiting.iter().any(|change| *change <= version) {
            self.brought = Some(self.now);
            self.waiting.retain(|change| *change > version);
        }
        self.failing_since = None;
        self.happen(PlanEvent::Listed(version.to_string()));
    }

    /// Runs the server and the plan for `time`.
    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            let ended = self.watch.filter(|_| !self.server.never_ends()).map(|(opened, limit, _)| opened + limit);
            let has_bookmarks = self.server == Server::Good;
            let bookmark = self.watch.filter(|(_, _, sent)| has_bookmarks && !sent).map(|(opened, limit, _)| {
                // A server sends the first bookmark of a watch after a minute at the latest.
                opened + (limit - seconds(2)).min(seconds(60))
            });
            let wakes = self.watch.map(|_| self.plan.wakes_at());
            let gives_up = self.failing_since.map(|since| since + FAILING_LIMIT).filter(|_| self.cut_off.is_none());
            let times = [self.checked, self.answer, bookmark, ended, wakes, gives_up, Some(until)];
            let Some(next) = times.into_iter().flatten().min() else { return };
            self.now = self.now.max(next);
            if self.checked == Some(next) {
                self.checked = None;
                self.failing_since = None;
                self.happen(PlanEvent::Checked(list_of(self.version(), self.waiting.last().copied())));
            } else if self.answer == Some(next) {
                self.answer = None;
                self.happen(PlanEvent::Asked(self.version().to_string()));
            } else if bookmark == Some(next) {
                if let Some((_, _, sent)) = &mut self.watch {
                    *sent = true;
                }
                self.happen(PlanEvent::Line(self.version().to_string()));
            } else if ended == Some(next) {
                self.happen(PlanEvent::Ended);
            } else if wakes == Some(next) {
                self.happen(PlanEvent::Time);
            } else if gives_up == Some(next) {
                self.cut_off = Some(self.now);
            }
        }
    }

    /// The largest number of small requests in a minute.
    fn small_in_a_minute(&self) -> usize {
        let within =
            |from: &Instant| self.small.iter().filter(|at| **at >= *from && **at < *from + seconds(60)).count();
        self.small.iter().map(within).max().unwrap_or(0)
    }
}

#[test]
fn a_quiet_kind_is_never_cut_off_and_costs_two_small_requests_a_minute() {
    for seed in 0..20 {
        let mut world = World::new(Server::Good, seed);
        // The first cycle may end with a short watch, because its watch continues a streaming list.
        world.run(seconds(120));
        world.small.clear();
        world.run(seconds(6 * 3_600));
        assert_eq!((world.lists, world.failures, world.cut_off), (1, 0, None));
        assert!(world.small_in_a_minute() <= 2, "{} requests", world.small_in_a_minute());
        assert!(world.small.len() >= 2 * 6 * 3_600 / 63, "the server was asked in each cycle");
    }
}

/// The server fails at any moment of a cycle, and the change comes right after that.
#[test]
fn a_change_that_does_not_arrive_cuts_the_source_off_within_90_seconds() {
    let mut longest = Duration::ZERO;
    let servers = [Server::Stuck, Server::StuckWithoutLists, Server::Dead, Server::DeadWithoutLists];
    for (server, others) in servers.into_iter().flat_map(|server| [(server, 10), (server, 0)]) {
        for tenths in 0..1_500_u64 {
            let mut world = World::new(Server::Good, tenths);
            world.others = others;
            world.run(seconds(300) + Duration::from_millis(100 * tenths));
            assert_eq!(world.cut_off, None);
            world.server = server;
            world.change();
            let changed = world.now;
            world.run(seconds(300));
            let known = world.cut_off.into_iter().chain(world.brought).min();
            let took = known.map(|at| at - changed);
            assert!(took.is_some_and(|took| took <= BOUND), "{server:?} at {tenths}: {took:?}");
            longest = longest.max(took.unwrap_or_default());
        }
    }
    // The bound is not an accident of the simulation.
    assert!(longest > seconds(78), "{longest:?}");
}

#[test]
fn questions_for_a_position_do_not_interrupt_the_watch_that_will_reach_it() {
    let start = Instant::now();
    let mut plan = Plan::new(ObjectKind::Service, SILENCE, fastrand::Rng::with_seed(1), start);
    let _ = plan.next(PlanEvent::Paused, start);
    let _ = plan.next(PlanEvent::Listed("100".into()), start);
    let (mut now, mut asked) = (start, 0);
    while now < start + seconds(2) {
        now += Duration::from_millis(100);
        if matches!(plan.next(PlanEvent::Wanted(200), now), Step::Ask) {
            asked += 1;
            if matches!(plan.next(PlanEvent::Asked("200".into()), now), Step::Pause { .. }) {
                let _ = plan.next(PlanEvent::Paused, now);
            }
        }
    }
    assert_eq!(asked, 1);
}

#[test]
fn a_replica_serves_without_an_optional_kind_only_if_it_may_not_read_it_or_after_some_time() {
    let start = Instant::now();
    let gives_up = |failures: &[(Failure, u64)]| {
        let mut plan = Plan::new(ObjectKind::Pod, SILENCE, fastrand::Rng::with_seed(1), start);
        let steps = failures.iter().map(|(failure, at)| {
            let failure = Failure { code: failure.code, ..Failure::new(failure.reason, "") };
            matches!(plan.failed(failure, start + seconds(*at)), Step::Pause { is_empty: true, .. })
        });
        steps.collect::<Vec<_>>()
    };
    let unreached = || Failure::new("connection_failed", "");
    let answered = |code| Failure::answer(ObjectKind::Pod, "list", code, None);
    assert_eq!(gives_up(&[(answered(StatusCode::FORBIDDEN), 0)]), [true]);
    let broken = || answered(StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(gives_up(&[(broken(), 0), (broken(), 29), (broken(), 30), (broken(), 31)]), [false, false, true, false]);
    assert_eq!(gives_up(&[(unreached(), 0), (unreached(), 60), (broken(), 61)]), [false; 3]);
}
