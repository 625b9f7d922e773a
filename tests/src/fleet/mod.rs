//! A simulated fleet: thousands of light agents that speak the real protocol, each over its own TLS
//! connection.
//!
//! One thread runs all agents. The agents have no separate tasks or channels, and use no HTTP
//! library. The thread reads bytes into one large buffer, decrypts them, and parses them in place
//! ([`http2`], [`wire`]). One core can therefore receive about a hundred thousand messages a
//! second. Each agent checks all messages against the contract ([`tracker`]). Some agents also
//! decode all messages into the state of a real agent ([`agent`]). Tests compare the digests of
//! this state with the digests of the source.
//!
//! Agents can be slow ([`Member::never_reads`]). [`rig`] creates the network namespaces and starts
//! the replicas. [`source`] starts the API server.

pub mod agent;
pub mod bare;
pub mod certificates;
mod client;
mod hpack;
pub(crate) mod http2;
pub mod latency;
pub mod phase;
pub mod rig;
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

/// How agents close their connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// The agent sends FIN, as the kernel does for a program that ends.
    Close,
    /// The agent sends a TCP reset.
    Reset,
}

/// The settings of all agents of a fleet.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The average time between two ACKs of an agent. The actual time differs by up to 40 %, like
    /// the time between ACKs of a real agent.
    pub ack_interval: Duration,
    /// The largest number of simultaneous TLS handshakes. Further agents wait.
    pub handshakes: usize,
    /// The longest pause before an agent connects again. The pause doubles with each failure. The
    /// real agent's first pause is at most 200 ms.
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
    /// The name of the agent's node.
    pub node: String,
    /// The addresses of the replicas. The agent begins with the first replica, and connects to the
    /// next replica when a stream ends.
    pub replicas: Vec<SocketAddr>,
    /// The agent's source address; `None` if the kernel chooses the address.
    pub source: Option<IpAddr>,
    /// Whether the agent reads nothing once it has its connection.
    pub never_reads: bool,
    /// Whether the agent reads everything and acknowledges nothing.
    pub is_mute: bool,
    /// Whether the agent decodes all messages into the state of a real agent.
    pub is_full: bool,
    /// Whether the latency of changes to this agent is measured.
    pub is_measured: bool,
}

/// A running fleet. Dropping it ends the thread and closes all connections.
pub struct Fleet {
    jobs: Option<mpsc::Sender<Job>>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts the thread in `namespace`, and pins the thread to `core` if a core is given. The
    /// fleet has no agents at first.
    ///
    /// # Errors
    /// The thread cannot be started, enter the namespace or use the core.
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
            // The thread that starts the fleet waits for this result, so sending cannot fail.
            let _ = ready.send(entered);
            if may_run {
                worker.run(&queue);
            }
        };
        let thread = std::thread::Builder::new().name("fleet".to_owned()).spawn(work).context("starting a thread")?;
        is_ready.recv().context("the fleet's thread ended at once")??;
        Ok(Self { jobs: Some(jobs), waker, thread: Some(thread) })
    }

    /// Runs `job` on the fleet's thread between two rounds, and returns its result.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn ask<T: Send + 'static>(&self, job: impl FnOnce(&mut Worker) -> T + Send + 'static) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        let boxed: Job = Box::new(move |worker| {
            // Sending fails only if the caller no longer waits.
            let _ = reply.send(job(worker));
        });
        let jobs = self.jobs.as_ref().context("the fleet has been stopped")?;
        jobs.send(boxed).map_err(|_| anyhow!("the fleet's thread has ended"))?;
        self.waker.wake().context("waking the fleet's thread")?;
        answer.recv().context("the fleet's thread ended before it answered")
    }

    /// Adds agents. The agents connect in parallel, within the limit of [`Settings::handshakes`].
    ///
    /// # Errors
    /// A certificate cannot be created, or the thread has ended.
    pub fn join(&self, members: Vec<Member>) -> Result<()> {
        self.ask(move |worker| worker.join(members))?
    }

    /// Waits until `condition` holds, and checks it every few milliseconds. `what` completes the
    /// error message "gave up waiting until …".
    ///
    /// # Errors
    /// The condition does not hold after `limit`, an agent has found a violation of the contract,
    /// or the thread has ended.
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
        // The woken thread sees that the channel is closed, and ends. If `wake` fails, the thread
        // has already ended.
        let _ = self.waker.wake();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("warning: the fleet's thread panicked");
        }
    }
}
