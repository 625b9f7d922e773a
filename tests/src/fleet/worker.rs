//! The thread that runs all agents: one loop over ready sockets and due timers.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    net::SocketAddr,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use headgate_core::digest::Digests;
use headgate_proto::v1::AgentMessage;
use mio::{Events, Poll, Token, Waker};
use prost::Message as _;

use super::{
    Break, Client, Member, Settings,
    agent::Reference,
    certificates::Authority,
    client::{Counts, Gauge, Lost, Outcome, Scratch},
    latency::{Histogram, Timetable},
    tracker::{Mode, Received},
};
use crate::bench::clock::thread_cpu;

/// A function that the thread runs between two rounds.
pub(super) type Job = Box<dyn FnOnce(&mut Worker) + Send>;

const WAKE: Token = Token(usize::MAX);
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time of a handshake. After this time the agent connects again.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(20);
const MOST_BACKOFF: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Ack(usize),
    Connect(usize),
    Move(usize, u64),
    Sweep,
}

/// All agents of the fleet, and the loop that runs them. Jobs of [`super::Fleet::ask`] receive this
/// value.
pub struct Worker {
    settings: Settings,
    authority: Arc<Authority>,
    poll: Poll,
    clients: Vec<Client>,
    due: BinaryHeap<Reverse<(Instant, Due)>>,
    /// The agents that wait until they may connect.
    waiting: VecDeque<usize>,
    handshaking: usize,
    scratch: Scratch,
    gauge: Gauge,
    reference: Option<Arc<Reference>>,
    ends: BTreeMap<String, u64>,
}

/// Sums over agents.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// The number of agents.
    pub agents: usize,
    /// The number of agents that follow a stream.
    pub following: usize,
    /// The number of following agents that resumed from the log.
    pub by_log: usize,
    /// The number of following agents that resumed with digests.
    pub by_digests: usize,
    /// The number of following agents that resumed with a full snapshot.
    pub by_full: usize,
    /// Counts of the messages on the present streams.
    pub present: Received,
    /// Counts of the messages on all streams.
    pub received: Received,
    /// Counts for all connections, including ended connections.
    pub counts: Counts,
}

impl Worker {
    pub(super) fn new(
        settings: Settings,
        authority: Arc<Authority>,
        timetable: Arc<Timetable>,
    ) -> Result<(Self, Arc<Waker>)> {
        let poll = Poll::new().context("creating an epoll instance")?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE).context("creating a waker")?);
        let worker = Self {
            settings,
            authority,
            poll,
            clients: Vec::new(),
            due: BinaryHeap::from([Reverse((Instant::now() + SWEEP_INTERVAL, Due::Sweep))]),
            waiting: VecDeque::new(),
            handshaking: 0,
            scratch: Scratch::new(),
            gauge: Gauge { timetable, is_recording: false, latency: Histogram::default(), moments: 0 },
            reference: None,
            ends: BTreeMap::new(),
        };
        Ok((worker, waker))
    }

    /// Runs until the channel of jobs is closed.
    pub(super) fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        let mut events = Events::with_capacity(1024);
        loop {
            self.connect_waiting();
            let pause = self.due.peek().map(|Reverse((at, _))| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, pause)
                && error.kind() != std::io::ErrorKind::Interrupted
            {
                eprintln!("warning: the fleet ends, because epoll fails: {error}");
                return;
            }
            for event in &events {
                if event.token() == WAKE {
                    loop {
                        match jobs.try_recv() {
                            Ok(job) => job(&mut self),
                            Err(mpsc::TryRecvError::Empty) => break,
                            Err(mpsc::TryRecvError::Disconnected) => return,
                        }
                    }
                    continue;
                }
                let Token(index) = event.token();
                if event.is_writable() {
                    let written = self.clients[index].on_writable();
                    self.after(index, written.map(|()| Outcome::default()));
                }
                if event.is_readable() || event.is_read_closed() {
                    self.read(index, event.is_read_closed());
                }
            }
            self.run_due_timers();
        }
    }

    fn read(&mut self, index: usize, is_closed: bool) {
        let client = &mut self.clients[index];
        if is_closed {
            client.on_closed();
        }
        if client.member.never_reads && client.is_connected() && !client.is_handshaking() {
            // This event is the only sign that the connection has ended.
            if is_closed {
                self.after(index, Err(Lost::Ended("connection: closed".to_owned())));
            }
            return;
        }
        self.read_all(index);
    }

    fn read_all(&mut self, index: usize) {
        let was_handshaking = self.clients[index].is_handshaking();
        let (interval, reference) = (self.settings.ack_interval, self.reference.as_deref());
        let client = &mut self.clients[index];
        let read = client.on_readable(&mut self.scratch, &mut self.gauge, interval, reference);
        if was_handshaking && client.is_connected() && !client.is_handshaking() {
            self.handshaking -= 1;
        }
        self.after(index, read);
    }

    /// Schedules the ACK and the move in an outcome, or handles the loss of the connection.
    fn after(&mut self, index: usize, outcome: Result<Outcome, Lost>) {
        match outcome {
            Ok(Outcome { ack_at, move_at }) => {
                let ack = ack_at.map(|at| (at, Due::Ack(index)));
                let leave = move_at.map(|(at, connection)| (at, Due::Move(index, connection)));
                self.due.extend(ack.into_iter().chain(leave).map(Reverse));
                if self.clients[index].is_following() {
                    self.clients[index].failures = 0;
                }
            }
            Err(Lost::Ended(reason)) => {
                *self.ends.entry(reason).or_default() += 1;
                self.disconnect(index, Break::Close);
                let bound = self.settings.backoff.saturating_mul(1 << self.clients[index].failures.min(16));
                self.clients[index].failures += 1;
                let pause = bound.min(MOST_BACKOFF).mul_f64(fastrand::f64());
                self.due.push(Reverse((Instant::now() + pause, Due::Connect(index))));
            }
            Err(Lost::Violation(violation)) => {
                *self.ends.entry(format!("violation: {violation}")).or_default() += 1;
                self.clients[index].violation = Some(violation);
                self.disconnect(index, Break::Close);
            }
        }
    }

    fn disconnect(&mut self, index: usize, how: Break) {
        let client = &mut self.clients[index];
        if client.is_handshaking() {
            self.handshaking -= 1;
        }
        client.disconnect(how);
    }

    fn connect_waiting(&mut self) {
        while self.handshaking < self.settings.handshakes
            && let Some(index) = self.waiting.pop_front()
        {
            let client = &self.clients[index];
            if client.is_connected() || client.is_suspended || client.violation.is_some() {
                continue;
            }
            match self.clients[index].connect(self.poll.registry(), Token(index)) {
                Ok(()) => self.handshaking += 1,
                Err(error) => self.after(index, Err(Lost::Ended(format!("connecting: {error:#}")))),
            }
        }
    }

    fn run_due_timers(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((_, due))) = self.due.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.due.pop();
            match due {
                Due::Ack(index) => {
                    if self.clients[index].ack_is_scheduled {
                        let sent = self.clients[index].acknowledge(&mut self.scratch, self.settings.ack_interval);
                        self.after(index, sent.map(|()| Outcome::default()));
                    }
                }
                Due::Connect(index) => self.waiting.push_back(index),
                Due::Move(index, connection) => {
                    if self.clients[index].leaves(connection) {
                        self.disconnect(index, Break::Close);
                        self.waiting.push_back(index);
                    }
                }
                Due::Sweep => self.sweep(now),
            }
        }
    }

    /// Checks that no handshake takes too long, and that every agent that reads receives messages
    /// from its server. A real agent reconnects after silence (discovery.proto,
    /// section 9). In the fleet, silence is a violation, because the replica must send heartbeats.
    fn sweep(&mut self, now: Instant) {
        self.due.push(Reverse((now + SWEEP_INTERVAL, Due::Sweep)));
        for index in 0..self.clients.len() {
            let client = &self.clients[index];
            if !client.member.never_reads || client.is_handshaking() {
                let checked = client.check_silence(now, HANDSHAKE_LIMIT);
                if checked.is_err() {
                    self.after(index, checked.map(|()| Outcome::default()));
                }
            }
        }
    }
}

/// Methods for jobs.
impl Worker {
    /// Adds agents. The agents connect in parallel, within the limit of simultaneous handshakes.
    ///
    /// # Errors
    /// A certificate cannot be created.
    pub fn join(&mut self, members: Vec<Member>) -> Result<()> {
        for member in members {
            let config = self.authority.client_config(&member.node);
            let config = config.with_context(|| format!("creating a certificate for {}", member.node))?;
            self.waiting.push_back(self.clients.len());
            self.clients.push(Client::new(member, config));
        }
        Ok(())
    }

    /// The agents, in the order in which they joined.
    #[must_use]
    pub fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// Closes the connections of the agents for which `chooses` returns true, and connects these
    /// agents to `replicas` at once. Returns the number of these agents.
    pub fn reconnect(&mut self, how: Break, replicas: &[SocketAddr], chooses: impl Fn(&Client) -> bool) -> usize {
        let chosen: Vec<usize> = (0..self.clients.len()).filter(|index| chooses(&self.clients[*index])).collect();
        for index in &chosen {
            self.disconnect(*index, how);
            self.set_replicas(*index, replicas);
            self.waiting.push_back(*index);
        }
        chosen.len()
    }

    /// Closes the connections of the agents for which `chooses` returns true, and keeps these
    /// agents disconnected until [`Self::resume`].
    pub fn suspend(&mut self, how: Break, chooses: impl Fn(&Client) -> bool) {
        for index in 0..self.clients.len() {
            if chooses(&self.clients[index]) {
                self.clients[index].is_suspended = true;
                self.disconnect(index, how);
            }
        }
    }

    /// Lets the agents for which `chooses` returns true acknowledge nothing more.
    pub fn mute(&mut self, chooses: impl Fn(&Client) -> bool) {
        for client in self.clients.iter_mut().filter(|client| chooses(client)) {
            client.member.is_mute = true;
            client.ack_is_scheduled = false;
        }
    }

    /// Sends a message in the name of the agents for which `chooses` returns true.
    pub fn tell(&mut self, message: &AgentMessage, chooses: impl Fn(&Client) -> bool) {
        let message = message.encode_to_vec();
        for index in 0..self.clients.len() {
            if chooses(&self.clients[index]) {
                let sent = self.clients[index].send(&message, &mut self.scratch);
                self.after(index, sent.map(|_| Outcome::default()));
            }
        }
    }

    /// Connects suspended agents to `replicas`, if `chooses` returns true for them.
    pub fn resume(&mut self, replicas: &[SocketAddr], chooses: impl Fn(&Client) -> bool) {
        for index in 0..self.clients.len() {
            if chooses(&self.clients[index]) && std::mem::take(&mut self.clients[index].is_suspended) {
                self.set_replicas(index, replicas);
                self.waiting.push_back(index);
            }
        }
    }

    /// Replaces the replicas of all agents. Present connections stay.
    pub fn redirect(&mut self, replicas: &[SocketAddr]) {
        (0..self.clients.len()).for_each(|index| self.set_replicas(index, replicas));
    }

    fn set_replicas(&mut self, index: usize, replicas: &[SocketAddr]) {
        self.clients[index].set_replicas(replicas);
    }

    /// Lets all agents read.
    pub fn read_again(&mut self) {
        for index in 0..self.clients.len() {
            if std::mem::take(&mut self.clients[index].member.never_reads) {
                self.read_all(index);
            }
        }
    }

    /// Sets the largest number of simultaneous handshakes.
    pub fn set_handshakes(&mut self, handshakes: usize) {
        self.settings.handshakes = handshakes;
    }

    /// Copies the digests of the first agent that holds a state. Agents without a state send the
    /// copied digests in `Hello` if they have the epoch and version of the copy. Returns false if
    /// no agent holds a state.
    pub fn refresh_reference(&mut self) -> bool {
        self.reference = self.clients.iter().find_map(|client| client.agent().reference()).map(Arc::new);
        self.reference.is_some()
    }

    /// Turns the measurement of latencies on or off. Returns the latencies since the last call.
    pub fn record(&mut self, is_recording: bool) -> Histogram {
        self.gauge.is_recording = is_recording;
        std::mem::take(&mut self.gauge.latency)
    }

    /// The digests of the agents that hold a state.
    #[must_use]
    pub fn digests(&self) -> Vec<Digests> {
        self.clients.iter().filter_map(|client| client.agent().digests().cloned()).collect()
    }

    /// The number of healthy agents, which read and are not suspended.
    #[must_use]
    pub fn healthy(&self) -> usize {
        self.clients.iter().filter(|client| client.is_healthy()).count()
    }

    /// The number of healthy agents that follow a stream and have reached the position `slices` of
    /// EndpointSlices.
    #[must_use]
    pub fn having(&self, slices: u64) -> usize {
        self.clients.iter().filter(|client| client.is_healthy() && client.has(slices)).count()
    }

    /// Sums over all agents.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.summary_of(|_| true)
    }

    /// Sums over the agents for which `chooses` returns true.
    #[must_use]
    pub fn summary_of(&self, chooses: impl Fn(&Client) -> bool) -> Summary {
        let mut summary = Summary::default();
        for client in self.clients.iter().filter(|client| chooses(client)) {
            summary.agents += 1;
            if client.is_following() {
                summary.following += 1;
                match client.mode() {
                    Some(Mode::Log) => summary.by_log += 1,
                    Some(Mode::Digests) => summary.by_digests += 1,
                    Some(Mode::Full) => summary.by_full += 1,
                    None => {}
                }
            }
            summary.present += *client.agent().tracker().received();
            summary.received += client.received();
            let counts = client.counts();
            summary.counts.full_handshakes += counts.full_handshakes;
            summary.counts.resumed_handshakes += counts.resumed_handshakes;
            summary.counts.acks += counts.acks;
            summary.counts.connections += counts.connections;
            summary.counts.wire_bytes += counts.wire_bytes;
        }
        summary
    }

    /// The violations of the contract that agents have found. An agent that finds a violation
    /// disconnects and does not reconnect.
    pub fn violations(&self) -> impl Iterator<Item = String> + '_ {
        let broken = |client: &Client| Some(format!("{}: {}", client.member.node, client.violation.as_ref()?));
        self.clients.iter().filter_map(broken)
    }

    /// The reasons why connections ended, each with the number of connections.
    #[must_use]
    pub fn ends(&self) -> BTreeMap<String, u64> {
        self.ends.clone()
    }

    /// The CPU time of the thread so far.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        thread_cpu()
    }
}
