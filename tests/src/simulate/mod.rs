//! The whole fleet in simulated time: real replicas and real agents in one thread, with a network,
//! a clock, disks, kernels and an API server that are simulated. A seed decides everything that
//! happens.
//!
//! Each process is a tokio runtime with a paused clock ([`process`]). The driver ([`run`]) gives
//! each process a turn of simulated time, one after the other, and delivers between the turns what
//! they have sent ([`net`]). The clocks of the standard library, and the random keys of its maps,
//! follow the simulation as well ([`clock`]), so that equal seeds give equal stories.
//!
//! The programs are asked what all nodes have programmed while processes die, freeze and lose
//! connections ([`faults`]). Each answer is compared with what the kernels forward ([`ask`]).
//!
//! TLS, threads and the netlink of a real kernel are left out. An agent's sync takes no time, and
//! neither does work that blocks.

pub mod api;
pub mod ask;
pub mod clock;
pub mod disk;
pub mod faults;
pub mod net;
pub mod process;
pub mod source;
pub mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Result, ensure};
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use self::{
    ask::{Asker, Question},
    faults::Fault,
    source::{LOCAL, NODES, Phase, size},
    world::{World, lock},
};
use crate::apiserver::Order;

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;
/// The longest turn of a process. A turn ends when bytes arrive.
const LONGEST_TURN_MS: u64 = 100;
/// How long the programs may take until all is well after all faults have ended.
const LONGEST_HEALING: u64 = 60 * SECOND;
/// Longer than the time after which some worlds take a Node for one that never had an agent.
const SHORT: Duration = Duration::from_secs(46);
/// How long a fleet is watched in which nothing happens, in seconds.
const QUIET: u64 = 10;
/// By then, what the faults have caused has ended: the first pause before a Service in quarantine
/// is tried again, and the moves between replicas.
const CALM: u64 = 60;
const LONG_QUIET: u64 = 200;
/// What a fleet in which nothing happens may send, and how often its processes may wake up, in a
/// minute. Each bound is multiplied by the number of nodes plus the square of the number of places
/// for replicas.
const MOST_QUIET_BYTES: u64 = 1_250;
const MOST_QUIET_MESSAGES: u64 = 60;
const MOST_QUIET_WAKEUPS: u64 = 1_750;
/// How many requests a replica may send to the API server in a minute meanwhile. Every ten seconds,
/// the replica asks for each kind that is silent. So within ten seconds, it may ask twice for each
/// of the five kinds.
const MOST_QUIET_REQUESTS: u64 = 60;

/// What happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// A fault begins.
    Fault(Fault),
    /// A question is asked.
    Ask(Question),
    /// Some endpoints are added, and others removed.
    Churn,
    /// Processes start again, and connections open.
    Recover,
}

/// An act, its time in milliseconds after all processes have started, and the seed of its choices.
#[derive(Debug, Clone, Copy)]
pub struct Planned {
    /// The time.
    pub at_ms: u64,
    /// The act.
    pub act: Act,
    seed: u64,
}

/// What a seed showed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The claims that differ from the kernels, and what did not heal.
    pub defects: Vec<String>,
    /// A hash of everything that happened.
    pub hash: u64,
    /// What happened, line by line.
    #[serde(skip)]
    pub story: Vec<String>,
    /// The number of answers by question and outcome.
    pub answers: BTreeMap<String, u64>,
    /// The simulated time.
    pub simulated_ms: u64,
    /// The most memory that the world held, in bytes. 0 until the program that counts it sets it.
    pub peak_bytes: u64,
}

/// Draws what happens for a seed.
#[must_use]
pub fn plan(seed: u64) -> Vec<Planned> {
    let mut rng = Rng::with_seed(seed);
    // Few kinds of faults and questions in a seed meet each other more often than all kinds.
    let (kinds, asked) = (rng.usize(1..8), rng.usize(1..6));
    let faults: Vec<Fault> = (0..kinds).map(|_| Fault::ALL[rng.usize(0..Fault::ALL.len())]).collect();
    let mut questions: Vec<Question> = (0..asked).map(|_| Question::ALL[rng.usize(0..Question::ALL.len())]).collect();
    // In some seeds no endpoint changes, so that the faults alone say what is true.
    let is_calm = rng.u8(0..8) == 0;
    if is_calm {
        questions.fill(Question::Agents);
    }
    let mut acts: Vec<Act> = (0..rng.usize(1..9)).map(|_| Act::Fault(faults[rng.usize(0..kinds)])).collect();
    acts.extend((0..rng.usize(4..10)).map(|_| Act::Ask(questions[rng.usize(0..asked)])));
    acts.extend((0..if is_calm { 0 } else { rng.usize(2..6) }).map(|_| Act::Churn));
    acts.extend((0..rng.usize(0..2)).map(|_| Act::Recover));
    let longest_pause_ms = rng.u64(200..1600);
    rng.shuffle(&mut acts);
    let mut at_ms = 0;
    let next = |act| {
        at_ms += rng.u64(0..longest_pause_ms);
        Planned { at_ms, act, seed: rng.u64(..) }
    };
    let mut planned: Vec<Planned> = acts.into_iter().map(next).collect();
    // A verification repairs what it finds, so most seeds ask for none. What a fault has broken is
    // soon repaired anyway.
    if rng.u8(0..4) == 0 {
        let count = rng.usize(2..7);
        let faults = planned.iter().filter(|planned| matches!(planned.act, Act::Fault(_)));
        let faults: Vec<u64> = faults.map(|fault| fault.at_ms).collect();
        let verify = |_| Planned {
            at_ms: faults[rng.usize(0..faults.len())] + rng.u64(0..3000),
            act: Act::Ask(Question::Verify),
            seed: rng.u64(..),
        };
        planned.extend((0..count).map(verify));
        planned.sort_by_key(|planned| planned.at_ms);
    }
    planned
}

/// Runs the acts of a plan in a world that follows from `seed`. The calling thread must have begun
/// to simulate ([`clock::begin`]), and must do nothing else afterwards.
///
/// # Errors
/// The simulation itself fails.
pub fn run(seed: u64, plan: &[Planned]) -> Result<Outcome> {
    let (rng, world) = (Rng::with_seed(seed), World::new(&mut Rng::with_seed(seed))?);
    let pods = || vec![BTreeSet::new(); NODES.len()];
    let (seen, forwarded, dropped) = (vec![0; NODES.len()], pods(), pods());
    let mut driver =
        Driver { rng, world, hash: DefaultHasher::new(), reached: BTreeSet::new(), seen, forwarded, dropped };
    let result = driver.everything(plan);
    let shared = Arc::clone(&driver.world.shared);
    let mut defects = std::mem::take(&mut *lock(&shared.false_claims));
    defects.extend(result.err().map(|error| format!("{error:#}")));
    let story = std::mem::take(&mut *lock(&shared.story));
    story.hash(&mut driver.hash);
    let answers = std::mem::take(&mut *lock(&shared.answers));
    Ok(Outcome {
        defects,
        hash: driver.hash.finish(),
        story,
        answers,
        simulated_ms: clock::now() / MILLISECOND,
        peak_bytes: 0,
    })
}

struct Driver {
    rng: Rng,
    world: World,
    hash: DefaultHasher,
    /// The hosts that got something at the end of the last turn.
    reached: BTreeSet<IpAddr>,
    /// The number of changes of each kernel that the driver has looked at.
    seen: Vec<usize>,
    /// The pods to which each kernel forwards.
    forwarded: Vec<BTreeSet<Ipv4Addr>>,
    /// The pods that have gone, and to which a kernel did not forward any more.
    dropped: Vec<BTreeSet<Ipv4Addr>>,
}

impl Driver {
    fn everything(&mut self, plan: &[Planned]) -> Result<()> {
        (0..size().replicas).try_for_each(|place| self.world.start_replica(place))?;
        (0..NODES.len()).try_for_each(|node| self.world.start_agent(node))?;
        self.world.shared.change(source::Source::stock);
        self.settle("at the start")?;
        if self.world.uncovered_after < SHORT {
            // From now on, a Node without an agent may be one that never had an agent.
            self.until(clock::now() + SHORT.as_nanos() as u64);
        }
        let began = clock::now();
        for planned in plan {
            self.until(began + planned.at_ms * MILLISECOND);
            self.act(planned)?;
        }
        let calm = self.rng.u64(0..6000) * MILLISECOND;
        self.until(clock::now() + calm);
        self.world.heal()?;
        self.until_answered();
        self.world.shared.change(source::Source::stock);
        self.settle("after all faults ended")?;
        self.stay_quiet();
        Ok(())
    }

    fn act(&mut self, planned: &Planned) -> Result<()> {
        let mut rng = Rng::with_seed(planned.seed);
        match planned.act {
            Act::Fault(fault) => self.world.inject(fault, &mut rng)?,
            Act::Recover => self.world.recover()?,
            Act::Churn => self.world.shared.change(|source, api| {
                let (node, service) = (rng.usize(0..NODES.len()), rng.usize(0..=LOCAL));
                source.add(api, node, &[service], Phase::Ready);
                let free = source.free();
                if free.len() > 6 {
                    source.set(api, free[rng.usize(0..free.len())], Phase::Gone);
                }
            }),
            Act::Ask(question) => {
                let asker = Asker { shared: Arc::clone(&self.world.shared), rng };
                self.world.shared.open_questions.fetch_add(1, Ordering::Relaxed);
                self.world.client.spawn(asker.ask(question));
            }
        }
        Ok(())
    }

    /// Lets time pass.
    fn until(&mut self, end: u64) {
        while clock::now() < end {
            self.turn(end);
        }
    }

    /// Lets time pass until no question waits for an answer.
    fn until_answered(&mut self) {
        while self.world.shared.open_questions.load(Ordering::Relaxed) > 0 {
            self.until(clock::now() + SECOND / 4);
        }
    }

    /// Gives each process a turn that got something or has had none for long, and delivers what
    /// they have sent.
    fn turn(&mut self, end: u64) {
        let network = self.world.shared.network.clone();
        let [shortest, longest] = [1, LONGEST_TURN_MS].map(|milliseconds| clock::now() + milliseconds * MILLISECOND);
        // Whoever got something runs at once.
        let next = if self.reached.is_empty() { network.next_arrival().unwrap_or(longest) } else { shortest };
        let now = next.clamp(shortest, longest).min(end);
        let mut order: Vec<&mut process::Process> = self.world.processes();
        order.retain(|process| now == end || self.reached.contains(&process.host) || process.is_behind(now));
        self.rng.shuffle(&mut order);
        order.into_iter().for_each(|process| process.run(now));
        clock::set(now);
        self.reached = network.deliver();
        self.world.note_failures();
        (now, network.arrived()).hash(&mut self.hash);
        self.look_at_kernels();
    }

    /// Says so if a kernel forwards again to a pod that it had dropped because the pod has gone.
    fn look_at_kernels(&mut self) {
        let shared = Arc::clone(&self.world.shared);
        for (node, name) in NODES.iter().enumerate() {
            if shared.is_dark(node) || shared.kernels[node].is_flushed() {
                // The agent may begin with the state on its disk, which may be old.
                self.forwarded[node].clear();
                self.dropped[node].clear();
                continue;
            }
            let changes = shared.kernels[node].changes();
            if std::mem::replace(&mut self.seen[node], changes) == changes {
                continue;
            }
            let kernel = shared.read(node);
            let now: BTreeSet<Ipv4Addr> = kernel.into_values().flatten().collect();
            let is_gone = |address: &&Ipv4Addr| {
                let source = shared.source();
                source.pods.iter().any(|pod| pod.address == **address && pod.phase == Phase::Gone && !pod.is_back)
            };
            for address in now.intersection(&self.dropped[node]).filter(is_gone) {
                shared.is_false(&format!("{name} goes back: it forwards again to {address}, which is gone"));
            }
            self.dropped[node].extend(self.forwarded[node].difference(&now).filter(is_gone));
            self.forwarded[node] = now;
        }
    }

    /// Checks that a fleet without changes says little, and that all its nodes are up to date and
    /// verified. Often the API server sends no bookmarks, as etcd does not by default for many
    /// minutes.
    fn stay_quiet(&mut self) {
        let shared = Arc::clone(&self.world.shared);
        let seconds = match self.rng.u8(0..32) {
            0 => LONG_QUIET,
            1..8 => QUIET,
            _ => return,
        };
        let has_bookmarks = self.rng.bool();
        shared.api.set_options(|options| options.bookmarks = has_bookmarks);
        shared.api.order(None, &Order::Close);
        self.until(clock::now() + CALM * SECOND);
        let wakeups = |world: &mut World| world.processes().into_iter().map(|process| process.wakeups()).sum::<u64>();
        let requests = || shared.api.recorded().len() as u64;
        let (before, woken, requested) = (shared.network.arrived(), wakeups(&mut self.world), requests());
        self.until(clock::now() + seconds * SECOND);
        let (after, woken) = (shared.network.arrived(), wakeups(&mut self.world) - woken);
        let places = world::places();
        let size = NODES.len() + places.pow(2);
        for (what, count, most, times) in [
            ("bytes", after.0 - before.0, MOST_QUIET_BYTES, size),
            ("messages", after.1 - before.1, MOST_QUIET_MESSAGES, size),
            ("wake-ups", woken, MOST_QUIET_WAKEUPS, size),
            ("requests to the API server", requests() - requested, MOST_QUIET_REQUESTS, places),
        ] {
            let (a_minute, most) = (count * 60 / seconds, most * times as u64);
            shared.tell(format!("{a_minute} {what} a minute while nothing happens"));
            if a_minute > most {
                shared.is_false(&format!("{a_minute} {what} a minute while nothing happens; at most {most}"));
            }
        }
        let asker = Asker { shared: Arc::clone(&shared), rng: self.rng.fork() };
        shared.open_questions.fetch_add(1, Ordering::Relaxed);
        self.world.client.spawn(asker.all_are_well());
        self.until_answered();
    }

    /// Waits until all kernels forward what the source says.
    fn settle(&mut self, when: &str) -> Result<()> {
        let until = clock::now() + LONGEST_HEALING;
        loop {
            self.until(clock::now() + 100 * MILLISECOND);
            let shared = &self.world.shared;
            let difference = (0..NODES.len()).find_map(|node| {
                let kernel = shared.read(node);
                shared.source().compare(node, &kernel, u64::MAX, |_| true)
            });
            let Some(difference) = difference else { break };
            ensure!(clock::now() < until, "{when}: {difference} after {} s", LONGEST_HEALING / SECOND);
        }
        self.world.shared.source().settled();
        Ok(())
    }
}
