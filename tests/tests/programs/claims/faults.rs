//! The faults that a round may have.

use std::{
    sync::atomic::Ordering,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Result;
use fastrand::Rng;
use headgate_tests::{
    apiserver::{Cut, Kind, Order, RequestFault, RequestFilter, Verb},
    failover::Mode,
};
use nix::sys::signal::Signal;

use super::{
    source::{CROWD, NODES, Phase, SERVICES},
    world::{Link, PLACES, World},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// A replica gets SIGKILL, and starts again later, with the same name.
    KillReplica,
    FreezeReplica,
    /// A replica starts again, and its source does not answer for some time.
    SlowLists,
    /// A replica gets SIGKILL, and the names of the replicas lose it.
    Vanish,
    /// A replica gets SIGTERM, and the names of the replicas lose it.
    Leave,
    Join,
    KillAgent,
    FreezeAgent,
    CutAgents,
    CutPeers,
    CutSource,
    /// Lists and watches fail, break or expire.
    FailLists,
    /// A Node is deleted and created again, while its agent is dead or alive.
    NodeAgain,
    /// An agent cannot use some endpoints, which are many more than a replica lists.
    Reject,
    /// The kernel of a node fails to execute what the agent writes.
    FailSyncs,
    /// The clock of an agent, of a replica or of all replicas goes back or forth by an hour.
    StepClock,
}

impl Fault {
    pub(super) const ALL: [Self; 16] = [
        Self::KillReplica,
        Self::FreezeReplica,
        Self::SlowLists,
        Self::Vanish,
        Self::Leave,
        Self::Join,
        Self::KillAgent,
        Self::FreezeAgent,
        Self::CutAgents,
        Self::CutPeers,
        Self::CutSource,
        Self::FailLists,
        Self::NodeAgain,
        Self::Reject,
        Self::FailSyncs,
        Self::StepClock,
    ];
}

impl World {
    /// Causes a fault, often of the node and of the replica in `focus`. [`Self::heal`] ends it.
    pub(super) fn inject(&mut self, fault: Fault, focus: (usize, usize), rng: &mut Rng) -> Result<()> {
        let running = self.shared.running();
        let place = if running.contains(&focus.0) && rng.u8(0..4) > 0 {
            focus.0
        } else {
            rng.choice(running).unwrap_or_default()
        };
        let node = if rng.u8(0..4) > 0 { focus.1 } else { rng.usize(0..NODES.len()) };
        let mode = if rng.bool() { Mode::Silent } else { Mode::Refusing };
        self.shared.tell(format!("fault {fault:?}: replica-{place}, {}, {mode:?}", NODES[node]));
        match fault {
            Fault::KillReplica => self.stop_replica(place, Signal::SIGKILL)?,
            Fault::FreezeReplica => self.replicas[place].freeze(true)?,
            Fault::SlowLists => {
                self.stop_replica(place, Signal::SIGKILL)?;
                self.relays.set(|link| link == Link::Source(place), mode);
                self.start_replica(place)?;
            }
            Fault::Vanish | Fault::Leave if self.named.len() > 1 => {
                let signal = if fault == Fault::Leave { Signal::SIGTERM } else { Signal::SIGKILL };
                self.stop_replica(place, signal)?;
                self.named.retain(|named| *named != place);
                self.write_names()?;
            }
            Fault::Vanish | Fault::Leave | Fault::Join => self.join()?,
            Fault::KillAgent => self.agents[node].kill()?,
            Fault::FreezeAgent => self.agents[node].freeze(true)?,
            Fault::CutAgents => {
                let all = rng.bool();
                let is_cut = |link| matches!(link, Link::Agent(of, to) if of == node && (all || to == place));
                self.relays.set(is_cut, mode);
            }
            Fault::CutPeers => {
                self.relays.set(|link| matches!(link, Link::Peer(a, b) if a != b && (a == place || b == place)), mode);
            }
            Fault::CutSource => self.relays.set(|link| link == Link::Source(place), mode),
            Fault::FailLists => {
                let api = &self.shared.api;
                api.fail_next(4, RequestFilter::verb(Verb::List), RequestFault::status(503));
                api.fail_next(4, RequestFilter::verb(Verb::Watch), RequestFault::Cut(Cut::Reset));
                api.order(Some(Kind::EndpointSlice), &Order::CutNow(Cut::Close));
                // The other watches and pages of lists expire, so their kinds are listed again.
                api.compact();
                api.order(None, &Order::Expire);
                api.expire_continue_tokens();
            }
            Fault::NodeAgain => {
                if rng.bool() {
                    self.agents[node].kill()?;
                }
                sleep(Duration::from_millis(rng.u64(0..1500)));
                self.shared.change(|source, api| source.delete_node(api, node));
                sleep(Duration::from_millis(rng.u64(0..1500)));
                self.shared.change(|source, api| source.put_node(api, node));
                self.shared.tell(format!("{} exists again", NODES[node]));
                // Questions count the Node from now on (`Source::counts`).
                sleep(Duration::from_millis(2000));
            }
            Fault::Reject => self.reject(node, rng)?,
            Fault::FailSyncs => {
                self.fail_syncs(node, rng.bool())?;
                if rng.bool() {
                    sleep(Duration::from_millis(rng.u64(0..1500)));
                    self.break_connections(node);
                }
            }
            Fault::StepClock => {
                let step = if rng.u8(0..3) == 0 { 3_600_000 } else { -3_600_000 };
                match rng.u8(0..4) {
                    0 => self.agents[node].step_clock(step)?,
                    1 => self.replicas[place].step_clock(step)?,
                    _ => self.replicas.iter().try_for_each(|replica| replica.step_clock(step))?,
                }
            }
        }
        Ok(())
    }

    /// Lets writes to a kernel fail. If the kernel also lost something, this waits until the agent
    /// reports that it cannot repair it; an agent in mode nftables tries so at once.
    fn fail_syncs(&self, node: usize, loses: bool) -> Result<()> {
        self.agents[node].fail_syncs(true)?;
        if loses {
            self.shared.forget_bait(node);
            let until = Instant::now() + Duration::from_secs(2);
            while Instant::now() < until {
                if super::asking::states(&self.shared)?.get(NODES[node]).is_some_and(|state| state == "failing") {
                    self.shared.tell("the agent knows");
                    self.shared.is_broken[node].store(true, Ordering::Relaxed);
                    break;
                }
            }
        }
        Ok(())
    }

    fn join(&mut self) -> Result<()> {
        let Some(place) = (0..PLACES).find(|place| !self.named.contains(place)) else { return Ok(()) };
        self.named.push(place);
        self.generations[place] += 1;
        self.write_names()?;
        self.start_replica(place)
    }

    /// A node rejects the endpoints of the crowd, which stop while the agent is away. Then some
    /// rejections are withdrawn, because their endpoints are removed.
    fn reject(&mut self, node: usize, rng: &mut Rng) -> Result<()> {
        self.rejecting[node].store(true, Ordering::Relaxed);
        self.relays.set(|link| matches!(link, Link::Agent(of, _) if of == node), Mode::Refusing);
        let all = SERVICES..SERVICES + CROWD;
        self.shared.change(|source, api| source.set_crowd(api, all, Phase::Stopping));
        sleep(Duration::from_millis(rng.u64(100..500)));
        self.relays.set(|link| matches!(link, Link::Agent(of, _) if of == node), Mode::Open);
        sleep(Duration::from_millis(rng.u64(1000..3000)));
        let some = rng.usize(0..CROWD);
        let some = SERVICES + some..SERVICES + some + 1;
        self.shared.tell(format!("endpoints of {} are removed", super::source::service_name(some.start)));
        self.shared.change(|source, api| source.set_crowd(api, some, Phase::Gone));
        Ok(())
    }

    /// Breaks the connections of an agent once.
    pub(super) fn break_connections(&self, node: usize) {
        self.shared.tell(format!("the connections of {} break", NODES[node]));
        let of_node = |link| matches!(link, Link::Agent(of, _) if of == node);
        self.relays.set(of_node, Mode::Refusing);
        self.relays.set(of_node, Mode::Open);
    }

    /// Opens all connections, and starts and thaws all processes.
    pub(super) fn recover(&mut self) -> Result<()> {
        self.shared.tell("recover");
        self.relays.set(|_| true, Mode::Open);
        self.replicas.iter_mut().chain(&mut self.agents).try_for_each(|member| member.freeze(false))?;
        self.named.clone().into_iter().try_for_each(|place| self.start_replica(place))?;
        (0..NODES.len()).try_for_each(|node| self.start_agent(node))
    }

    /// Ends all faults. Afterwards at least two replicas run, and all agents.
    pub(super) fn heal(&mut self) -> Result<()> {
        self.shared.tell("heal");
        self.shared.api.clear_faults();
        self.rejecting.iter().for_each(|switch| switch.store(false, Ordering::Relaxed));
        self.shared.is_broken.iter().for_each(|is_broken| is_broken.store(false, Ordering::Relaxed));
        for member in self.replicas.iter().chain(&self.agents) {
            member.step_clock(0)?;
            member.fail_syncs(false)?;
        }
        self.recover()?;
        if self.named.len() < 2 { self.join() } else { Ok(()) }
    }
}
