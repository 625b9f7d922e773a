//! A simulated fleet: thousands of light agents that speak the true protocol, each over a TLS
//! connection of its own.
//!
//! One thread carries all of them. There is no task, channel or HTTP library per agent: bytes are
//! read into one large buffer, decrypted, and looked at where they lie ([`http2`], [`wire`]), so
//! that one core takes in some hundred thousand messages a second. Each agent checks what it is
//! sent against the contract ([`tracker`]); some of them decode everything into the state of a real
//! agent, whose digests can be compared with the source's ([`agent`]).
//!
//! What agents do wrong on purpose is a switch ([`Fault`]). [`rig`] starts what they need: an API
//! server, replicas, and two network namespaces.

pub mod agent;
pub mod bare;
pub mod certificates;
mod client;
mod hpack;
mod http2;
pub mod latency;
pub mod phase;
pub mod relay;
pub mod rig;
mod send;
pub mod source;
pub mod stage;
mod tls;
pub mod tracker;
mod wire;
pub mod worker;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use mio::Waker;

use self::{certificates::Authority, latency::Timetable, worker::Job};
pub use self::{client::Client, worker::Worker};
use crate::testbed::netns::Namespace;

/// What an agent does wrong, from the moment it has said `Hello`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// It reads nothing.
    NeverRead,
    /// It reads so many bytes a second, of what is on the wire.
    SlowRead {
        /// Bytes a second.
        bytes_per_second: u32,
    },
    /// It rejects a resource of every batch.
    Nack,
    /// It sends what is no message.
    Garbage(Garbage),
}

/// The layer at which an agent sends garbage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Garbage {
    /// Bytes that are no TLS record.
    Tls,
    /// TLS records that hold no HTTP/2 frame.
    Http2,
    /// DATA frames that hold no gRPC message.
    Grpc,
    /// gRPC messages that are no `AgentMessage`.
    Message,
}

/// How agents give up their connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// As a program that ends: the kernel sends FIN.
    Close,
    /// With a TCP reset.
    Reset,
}

/// What the agents of a fleet have in common.
#[derive(Debug, Clone)]
pub struct Settings {
    /// An agent that has sent an ACK waits so long before the next one, less or more by up to two
    /// fifths, as the real one does.
    pub ack_interval: Duration,
    /// TLS handshakes at the same time; further agents wait for their turn.
    pub handshakes: usize,
    /// The longest first pause before a new connection; it doubles with each failure. The real
    /// agent's is 200 ms.
    pub backoff: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ack_interval: Duration::from_millis(250), handshakes: 64, backoff: Duration::from_millis(200) }
    }
}

/// An agent that joins the fleet.
#[derive(Debug, Clone, Default)]
pub struct Member {
    /// Name of its node.
    pub node: String,
    /// Where its replicas listen; it begins with the first and goes on with the next when a stream
    /// ends.
    pub replicas: Vec<SocketAddr>,
    /// The address that it connects from; any, unless given.
    pub source: Option<IpAddr>,
    /// What it does wrong.
    pub fault: Fault,
    /// Whether it decodes everything into the state of a real agent.
    pub is_full: bool,
    /// Whether the time until changes reach it is measured.
    pub is_measured: bool,
}

/// A running fleet. Dropping it ends the thread and closes every connection.
pub struct Fleet {
    jobs: Option<mpsc::Sender<Job>>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts the thread in `namespace`, on `core` if one is given. There are no agents at first.
    ///
    /// # Errors
    /// When the system refuses the thread, the namespace or the core.
    pub fn start(
        settings: Settings,
        authority: Arc<Authority>,
        timetable: Arc<Timetable>,
        namespace: &Namespace,
        core: Option<usize>,
    ) -> Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let (worker, waker) = namespace.run(|| Worker::new(settings, authority, timetable))?;
        let doorway = namespace.doorway()?;
        let (ready, is_ready) = mpsc::channel();
        let work = move || {
            let entered = doorway.enter().and_then(|()| core.map_or(Ok(()), rig::pin_this_thread));
            let may_run = entered.is_ok();
            // Whoever started the thread waits for this.
            let _ = ready.send(entered);
            if may_run {
                worker.run(&queue);
            }
        };
        let thread = std::thread::Builder::new().name("fleet".to_owned()).spawn(work).context("starting a thread")?;
        is_ready.recv().context("the fleet's thread ended at once")??;
        Ok(Self { jobs: Some(jobs), waker, thread: Some(thread) })
    }

    /// Runs `job` between two rounds of the fleet's thread, and gives back what it returns.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn ask<T: Send + 'static>(&self, job: impl FnOnce(&mut Worker) -> T + Send + 'static) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        let boxed: Job = Box::new(move |worker| {
            // The asker waits; if it has gone, nobody wants the answer.
            let _ = reply.send(job(worker));
        });
        let jobs = self.jobs.as_ref().context("the fleet has been stopped")?;
        jobs.send(boxed).map_err(|_| anyhow!("the fleet's thread has ended"))?;
        self.waker.wake().context("waking the fleet's thread")?;
        answer.recv().context("the fleet's thread ended before it answered")
    }

    /// Adds agents, which connect at once, as far as [`Settings::handshakes`] lets them.
    ///
    /// # Errors
    /// When a certificate cannot be made, or the thread has ended.
    pub fn join(&self, members: Vec<Member>) -> Result<()> {
        self.ask(move |worker| worker.join(members))?
    }

    /// Waits until `condition` holds, looking every few milliseconds. `what` ends the sentence
    /// "gave up waiting until …".
    ///
    /// # Errors
    /// When that takes longer than `limit`, an agent has met a violation of the contract, or the
    /// thread has ended.
    pub fn wait_until(
        &self,
        what: &str,
        limit: Duration,
        condition: impl Fn(&Worker) -> bool + Send + Sync + 'static,
    ) -> Result<()> {
        let condition = Arc::new(condition);
        let until = Instant::now() + limit;
        loop {
            let condition = Arc::clone(&condition);
            let (holds, violation) = self.ask(move |worker| (condition(worker), worker.violations().next()))?;
            if let Some(violation) = violation {
                bail!("while waiting until {what}: {violation}");
            }
            if holds {
                return Ok(());
            }
            if Instant::now() > until {
                let (shown, ends) = self.ask(|worker| (worker.summary(), worker.ends()))?;
                bail!("gave up waiting until {what}, after {} s: {shown:?}, ends {ends:?}", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.jobs.take();
        // The thread looks whether anybody can still ask it; if it cannot be woken it has ended.
        let _ = self.waker.wake();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("warning: the fleet's thread panicked");
        }
    }
}
