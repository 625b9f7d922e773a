//! What may go wrong. Each fault ends when the world heals.

use std::{net::IpAddr, sync::Arc, time::Duration};

use anyhow::Result;
use fastrand::Rng;
use tokio::time::sleep;

use super::{
    net::{ORDINARY_DELAYS_MS, Route},
    source::{AGAIN, BAIT, LOCAL, NAMESPACE, NODES, Source, cluster_ip, crowd, service_name},
    world::{Shared, World, lock, node_host, places, replica_host},
};
use crate::apiserver::{Cut, Kind, Order, RequestFault, RequestFilter, Restart, Verb};

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A replica gets SIGKILL, and starts again later, with the same name.
    KillReplica,
    /// A replica starts again, and its source does not answer for some time.
    SlowLists,
    /// A replica stops for some time, as with SIGSTOP.
    FreezeReplica,
    /// A replica gets SIGKILL, or its machine loses its power, and others do not look for it any
    /// more.
    Vanish,
    /// A replica gets SIGTERM, and others do not look for it any more.
    Leave,
    /// A replica starts at another place.
    Join,
    /// An agent gets SIGKILL.
    KillAgent,
    /// An agent gets SIGTERM.
    StopAgent,
    /// An agent starts again, its first look at the kernel fails, and no replica answers it.
    BlindRestart,
    /// An agent stops for some time.
    FreezeAgent,
    /// A node loses its power and boots again.
    Reboot,
    /// The connections of a node or of a replica are reset. New ones can be opened at once.
    Reset,
    /// The connections of an agent to a replica, or to all replicas, are cut.
    CutAgents,
    /// One direction of the connections between an agent and a replica is cut.
    CutOneWay,
    /// The connections of a replica to the others are cut.
    CutPeers,
    /// The connections of a replica to the API server are cut.
    CutSource,
    /// All connections are slow.
    Delay,
    /// Lists and watches fail, break or expire.
    FailLists,
    /// The API server has lost its history, and its versions are higher than before. Sometimes its
    /// objects are older.
    Restore,
    /// A watch is stuck.
    StuckWatch,
    /// A Node is deleted and created again, while its agent is dead or alive.
    NodeAgain,
    /// There is a Node that never had an agent.
    BareNode,
    /// A Service is deleted, and perhaps created again.
    ServiceAgain,
    /// The kernel of a node hangs.
    HangKernel,
    /// The kernel of a node fails to execute what the agent writes, and may lose rules. Later the
    /// node's connections break.
    FailKernel,
    /// The kernel of a node rejects the rules of some Services, sometimes of more than a replica
    /// shows.
    Reject,
    /// A calendar goes back or forth by an hour.
    StepClock,
    /// A clock is too fast or too slow.
    Drift,
    /// The disk of a node is full.
    DiskFull,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 29] = [
        Self::KillReplica,
        Self::SlowLists,
        Self::FreezeReplica,
        Self::Vanish,
        Self::Leave,
        Self::Join,
        Self::KillAgent,
        Self::StopAgent,
        Self::BlindRestart,
        Self::FreezeAgent,
        Self::Reboot,
        Self::Reset,
        Self::CutAgents,
        Self::CutOneWay,
        Self::CutPeers,
        Self::CutSource,
        Self::Delay,
        Self::FailLists,
        Self::Restore,
        Self::StuckWatch,
        Self::NodeAgain,
        Self::BareNode,
        Self::ServiceAgain,
        Self::HangKernel,
        Self::FailKernel,
        Self::Reject,
        Self::StepClock,
        Self::Drift,
        Self::DiskFull,
    ];
}

impl Shared {
    /// Makes a node drop what its agent programmed for the bait, as another program might. The
    /// agent's checks find it if it `is_seen`, and else only its verifications.
    fn forget_bait(&self, node: usize, is_seen: bool) {
        let bait = format!("{}/{}", NAMESPACE, service_name(BAIT));
        match is_seen {
            true => self.kernels[node].flush(Some(&bait)),
            false => self.kernels[node].forget(&bait),
        }
        self.tell(format!("{} forgets {} ({})", NODES[node], service_name(BAIT), cluster_ip(BAIT)));
    }
}

impl World {
    /// Causes a fault. [`Self::heal`] ends it.
    ///
    /// # Errors
    /// A process cannot be started.
    pub fn inject(&mut self, fault: Fault, rng: &mut Rng) -> Result<()> {
        // Faults meet each other if they often hit the same processes.
        let is_usual = rng.u8(0..3) > 0;
        let running = self.shared.running();
        let place = running.iter().copied().find(|place| is_usual && *place == self.usual_place);
        let place = place.or_else(|| rng.choice(running)).unwrap_or_default();
        let node = if is_usual { self.shared.usual_node } else { rng.usize(0..NODES.len()) };
        let route = if rng.bool() { Route::Silent } else { Route::Refused };
        if matches!(fault, Fault::FailKernel | Fault::Reject | Fault::Reboot | Fault::BlindRestart) {
            lock(&self.shared.is_tampered)[node] = true;
        }
        self.shared.tell(format!("fault {fault:?}: replica-{place}, {}, {route:?}", NODES[node]));
        match fault {
            Fault::KillReplica => self.kill_replica(place, false),
            Fault::FreezeReplica => self.replicas[place].freeze(true),
            Fault::SlowLists => {
                self.kill_replica(place, false);
                self.ways[place].set(route);
                self.start_replica(place)?;
            }
            Fault::Vanish | Fault::Leave if lock(&self.shared.named).len() > 1 => {
                if fault == Fault::Leave {
                    self.stop_replica(place);
                } else {
                    self.kill_replica(place, rng.bool());
                }
                lock(&self.shared.named).retain(|named| *named != place);
            }
            Fault::Vanish | Fault::Leave | Fault::Join => self.join()?,
            Fault::KillAgent => self.kill_agent(node, false),
            Fault::StopAgent => self.stop_agent(node),
            Fault::BlindRestart => {
                self.kill_agent(node, false);
                (0..places()).for_each(|to| self.set_routes(node_host(node), replica_host(to), Route::Refused));
                self.fail_kernel(node, 1);
                self.start_agent(node)?;
            }
            Fault::FreezeAgent => self.agents[node].freeze(true),
            Fault::Reboot => {
                self.kill_agent(node, true);
                lock(&self.shared.lost_power)[node] = Some(super::clock::now());
                self.shared.kernels[node].flush(None);
                self.disks[node].lose_power(rng.bool());
            }
            Fault::Reset => {
                let host = if rng.u8(0..3) > 0 { node_host(node) } else { replica_host(place) };
                self.shared.network.reset(host);
            }
            Fault::CutAgents => {
                let all = rng.bool();
                for to in (0..places()).filter(|to| all || *to == place) {
                    self.set_routes(node_host(node), replica_host(to), route);
                }
            }
            Fault::CutOneWay => {
                let mut ends: [IpAddr; 2] = [node_host(node), replica_host(place)];
                rng.shuffle(&mut ends);
                self.shared.network.set_route(ends[0], ends[1], Route::Silent);
            }
            Fault::CutPeers => {
                for to in (0..places()).filter(|to| *to != place) {
                    self.set_routes(replica_host(place), replica_host(to), route);
                }
            }
            Fault::CutSource => self.ways[place].set(route),
            Fault::Delay => self.shared.network.set_delays(2..rng.u64(10..800)),
            Fault::FailLists => {
                let api = &self.shared.api;
                let code = rng.choice([429, 500, 503]).unwrap_or(500);
                api.fail_next(4, RequestFilter::verb(Verb::List), RequestFault::status(code));
                api.fail_next(4, RequestFilter::verb(Verb::Watch), RequestFault::Cut(Cut::Reset));
                api.order(Some(Kind::EndpointSlice), &Order::CutNow(Cut::Close));
                // The other watches and pages of lists expire, so their kinds are listed again.
                api.compact();
                api.order(None, &Order::Expire);
                api.expire_continue_tokens();
            }
            Fault::Restore => {
                if rng.bool() {
                    self.shared.change(|source, api| source.go_back(api, || rng.bool()));
                }
                self.shared.api.reload(&Restart::RaiseVersions(rng.u64(1..1000)));
                self.shared.api.order(None, &Order::Close);
            }
            Fault::StuckWatch => self.shared.api.freeze(Kind::EndpointSlice),
            Fault::NodeAgain => {
                if rng.u8(0..3) > 0 {
                    self.kill_agent(node, false);
                }
                self.shared.change(|source, api| source.delete_node(api, node));
                // Replicas look for nodes to forget once a second.
                self.later(rng.u64(0..2000), move |shared| {
                    shared.change(|source, api| source.put_node(api, node));
                    shared.tell(format!("{} exists again", NODES[node]));
                });
            }
            Fault::BareNode => Source::set_bare_node(&self.shared.api, true),
            Fault::ServiceAgain => {
                self.shared.change(|source, api| source.set_again(api, false));
                self.shared.tell(format!("{} is deleted", service_name(AGAIN)));
                if rng.bool() {
                    self.later(rng.u64(0..2000), |shared| shared.change(|source, api| source.set_again(api, true)));
                }
            }
            Fault::HangKernel => self.hang(node, true),
            Fault::Reject => {
                let crowd = if rng.u8(0..3) == 0 { crowd() } else { 0..0 };
                let some = (0..=LOCAL).filter(|_| rng.bool()).chain(crowd.clone());
                let rejected: Vec<String> =
                    some.map(|service| format!("{NAMESPACE}/{}", service_name(service))).collect();
                self.shared.tell(format!("the kernel of {} rejects {rejected:?}", NODES[node]));
                self.shared.kernels[node].reject(&rejected.iter().map(String::as_str).collect::<Vec<_>>());
                self.shared.change(|source, api| crowd.for_each(|service| source.put_service(api, service)));
            }
            Fault::FailKernel => {
                self.fail_kernel(node, rng.usize(1..40));
                if rng.u8(0..3) > 0 {
                    self.shared.forget_bait(node, rng.bool());
                }
                // A node in trouble often loses its connections as well.
                self.later(rng.u64(2000..8000), move |shared| shared.network.reset(node_host(node)));
            }
            Fault::StepClock => {
                let hour = 3_600_000_000_000_i64;
                let step = if rng.u8(0..3) == 0 { hour } else { -hour };
                let mut processes = self.processes();
                let chosen = rng.usize(0..processes.len());
                processes[chosen].calendar_step = step;
            }
            Fault::Drift => {
                let drift = rng.i64(-200_000..200_000);
                let mut processes = self.processes();
                let chosen = rng.usize(0..processes.len() - 1);
                processes[chosen].drift_ppm = drift;
            }
            Fault::DiskFull => self.disks[node].set_full(true),
        }
        Ok(())
    }

    /// Calls `work` after a pause.
    fn later(&self, milliseconds: u64, work: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.client.spawn(async move {
            sleep(Duration::from_millis(milliseconds)).await;
            work(&shared);
        });
    }

    fn join(&mut self) -> Result<()> {
        let free = (0..places()).find(|place| !lock(&self.shared.named).contains(place));
        let Some(place) = free else { return Ok(()) };
        // A replica that was told to leave may still run there.
        self.kill_replica(place, false);
        lock(&self.shared.named).push(place);
        self.generations[place] += 1;
        self.start_replica(place)
    }

    /// Opens all connections, and starts and thaws all processes.
    ///
    /// # Errors
    /// A process cannot be started.
    pub fn recover(&mut self) -> Result<()> {
        self.shared.tell("recover");
        self.shared.network.open_routes();
        self.shared.network.set_delays(ORDINARY_DELAYS_MS);
        self.ways.iter().for_each(|way| way.set(Route::Open));
        self.processes().into_iter().for_each(|process| process.freeze(false));
        let named = lock(&self.shared.named).clone();
        named.into_iter().try_for_each(|place| self.start_replica(place))?;
        (0..NODES.len()).try_for_each(|node| self.start_agent(node))
    }

    /// Ends all faults. Afterwards at least two replicas run, and all agents.
    ///
    /// # Errors
    /// A process cannot be started.
    pub fn heal(&mut self) -> Result<()> {
        self.shared.tell("heal");
        self.shared.api.clear_faults();
        self.shared.change(|source, api| {
            crowd().for_each(|service| source.delete_service(api, service));
            source.set_again(api, true);
            Source::set_bare_node(api, false);
        });
        for node in 0..NODES.len() {
            self.shared.change(|source, api| source.put_node(api, node));
            self.shared.kernels[node].recover();
            self.shared.kernels[node].reject(&[]);
            self.disks[node].set_full(false);
            self.hang(node, false);
        }
        for process in self.processes() {
            (process.calendar_step, process.drift_ppm) = (0, 0);
        }
        self.recover()?;
        let replicas = lock(&self.shared.named).len();
        if replicas < 2 { self.join() } else { Ok(()) }
    }
}
