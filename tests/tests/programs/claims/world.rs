//! The replicas and agents as processes, the network between them, and their faults.
//!
//! ```text
//!   control: API server 127.0.0.1, replicas 198.19.0.1-3, relays in 198.18.0.0/16
//!      └── br0 192.0.2.1 ── node-a 192.0.2.11, node-b 192.0.2.12, node-c 192.0.2.13
//! ```
//!
//! Each pair of an agent and a replica, or of two replicas, or of a replica and the API server, has
//! a relay of its own. Each replica has a file of hosts of its own, with the names of the replicas.

use std::{
    fs,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use headgate_tests::{
    apiserver::ApiServer,
    failover::{Edit, Gate, Mode},
    testbed::{
        Namespace, netns,
        process::{Process, program},
    },
};
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::{io::AsyncWriteExt as _, net::TcpListener, runtime::Handle, sync::oneshot};

use super::{
    kernel::Backend,
    source::{BAIT, CROWD_PORT, Forwarding, NODES, Source, cluster_ip, service_name},
};

/// The number of places for replicas.
pub(super) const PLACES: usize = 3;

/// What questions and faults share.
pub(super) struct Shared {
    pub(super) api: ApiServer,
    source: Mutex<Source>,
    pub(super) control: Arc<Namespace>,
    nodes: Vec<Namespace>,
    pub(super) backend: Backend,
    /// For each node: true while its agent knows that it cannot repair the bait.
    pub(super) is_broken: [AtomicBool; NODES.len()],
    /// When each node lost the bait last.
    lost_bait: Mutex<[Option<Instant>; NODES.len()]>,
    /// The places whose replica runs.
    running: Mutex<Vec<usize>>,
    pub(super) story: Mutex<Vec<String>>,
    started: Instant,
}

impl Shared {
    pub(super) fn source(&self) -> MutexGuard<'_, Source> {
        lock(&self.source)
    }

    /// Calls `change` with the source and its API server.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Source, &ApiServer) -> T) -> T {
        change(&mut self.source(), &self.api)
    }

    pub(super) fn read(&self, node: usize) -> Result<Forwarding> {
        self.backend.read(&self.nodes[node])
    }

    pub(super) fn node(&self, node: usize) -> &Namespace {
        &self.nodes[node]
    }

    /// Makes a node drop what its agent programmed for the bait, as another program might.
    pub(super) fn forget_bait(&self, node: usize) {
        lock(&self.lost_bait)[node] = Some(Instant::now());
        let forgotten = self.backend.forget(&self.nodes[node], cluster_ip(BAIT));
        self.tell(format!("{} forgets {}: {forgotten:?}", NODES[node], service_name(BAIT)));
    }

    /// Whether the node has lost the bait since then.
    pub(super) fn has_lost_bait(&self, node: usize, since: Instant) -> bool {
        lock(&self.lost_bait)[node].is_some_and(|lost| lost >= since)
    }

    pub(super) fn running(&self) -> Vec<usize> {
        lock(&self.running).clone()
    }

    pub(super) fn tell(&self, text: impl AsRef<str>) {
        let line = format!("{:8.3} {}", self.started.elapsed().as_secs_f64(), text.as_ref());
        lock(&self.story).push(line);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The URL of the replica at a place, for headgatectl.
pub(super) fn url(place: usize) -> String {
    format!("http://{}", replica_address(place, 7444))
}

fn host(place: usize) -> u8 {
    u8::try_from(place + 1).unwrap()
}

fn replica_address(place: usize, port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(198, 19, 0, host(place)), port))
}

/// Who connects through a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// A node's agent to the replica at a place.
    Agent(usize, usize),
    Peer(usize, usize),
    /// The replica at a place to the API server.
    Source(usize),
}

impl Link {
    fn all() -> impl Iterator<Item = Self> {
        let pairs = |count: usize, link: fn(usize, usize) -> Self| {
            (0..count).flat_map(move |from| (0..PLACES).map(move |to| link(from, to)))
        };
        pairs(NODES.len(), Self::Agent).chain(pairs(PLACES, Self::Peer)).chain((0..PLACES).map(Self::Source))
    }

    fn listen(self) -> SocketAddr {
        let (kind, from, to) = match self {
            Self::Agent(node, place) => (100, node, host(place)),
            Self::Peer(from, to) => (0, from, host(to)),
            Self::Source(place) => (200, place, 1),
        };
        SocketAddr::from((Ipv4Addr::new(198, 18, kind + u8::try_from(from).unwrap(), to), 7443))
    }
}

/// All relays, on a thread in the namespace of the replicas.
pub(super) struct Relays {
    gates: Vec<(Link, Gate)>,
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Relays {
    fn start(control: Arc<Namespace>, api: SocketAddr, rejecting: Vec<Arc<AtomicBool>>) -> Result<Self> {
        let ((sender, receiver), (stop, stopped)) = (mpsc::channel(), oneshot::channel());
        let serve = async move {
            let mut gates = Vec::new();
            for link in Link::all() {
                let server = match link {
                    Link::Agent(_, place) => replica_address(place, 7443),
                    Link::Peer(_, place) => replica_address(place, 7444),
                    Link::Source(_) => api,
                };
                let edit = if let Link::Agent(node, _) = link { Some(edit(&rejecting[node])) } else { None };
                gates.push((link, Gate::start_at(link.listen(), server, Mode::Open, edit).await?));
            }
            answer_as_endpoints().await?;
            sender.send((gates, Handle::current()))?;
            // An error means that the handle is dropped.
            let _ = stopped.await;
            Ok(())
        };
        let run = || tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve);
        let thread = std::thread::spawn(move || control.run(run));
        let (gates, runtime) = receiver.recv().context("starting the relays")?;
        Ok(Self { gates, runtime, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn set(&self, links: impl Fn(Link) -> bool, mode: Mode) {
        let chosen = self.gates.iter().filter(|(link, _)| links(*link));
        chosen.for_each(|(_, gate)| self.runtime.block_on(gate.set(mode)));
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        self.gates.clear();
        drop(self.stop.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("warning: the relays ended: {error:#}");
        }
    }
}

/// Answers connections to all endpoints with the address of the endpoint.
async fn answer_as_endpoints() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8080)).await?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let address = stream.local_addr().map(|address| address.ip().to_string()).unwrap_or_default();
            // The client may have gone.
            let _ = stream.write_all(address.as_bytes()).await;
        }
    });
    Ok(())
}

/// Makes ports of the crowd unusable while the switch is on: their number becomes 0, as if a newer
/// replica sent something that the agent does not know. `headgate.v1.EndpointPort` has the name in
/// field 1 and the number in field 3; field 2 is absent for TCP.
fn edit(switch: &Arc<AtomicBool>) -> Edit {
    let switch = Arc::clone(switch);
    let (name, number) = CROWD_PORT;
    let mut pattern = vec![0x0a, u8::try_from(name.len()).unwrap()];
    pattern.extend(name.as_bytes());
    pattern.extend([0x18, number.to_le_bytes()[0] | 0x80, u8::try_from(number >> 7).unwrap()]);
    Arc::new(move |bytes: &mut [u8]| {
        if !switch.load(Ordering::Relaxed) || bytes.len() < pattern.len() {
            return;
        }
        for at in 0..=bytes.len() - pattern.len() {
            if bytes[at..].starts_with(&pattern) {
                bytes[at + pattern.len() - 2..][..2].copy_from_slice(&[0x80, 0]);
            }
        }
    })
}

/// A process with a file of faults (`faults.c`).
pub(super) struct Member {
    name: String,
    log: PathBuf,
    faults: fs::File,
    faults_path: PathBuf,
    process: Option<Process>,
    is_frozen: bool,
}

impl Member {
    fn new(folder: &Path, name: String) -> Result<Self> {
        let faults_path = folder.join(format!("{name}.faults"));
        let mut faults = fs::File::options().create(true).truncate(true).write(true).open(&faults_path)?;
        faults.write_all(&[0; 16])?;
        let log = folder.join(format!("{name}.log"));
        Ok(Self { name, log, faults, faults_path, process: None, is_frozen: false })
    }

    fn start(&mut self, namespace: &Namespace, shim: &Path, mut wrapper: Command, program: &Command) -> Result<()> {
        wrapper.args(["env", &format!("LD_PRELOAD={}", shim.display())]);
        wrapper.arg(format!("HEADGATE_CLAIMS_FAULTS={}", self.faults_path.display())).arg(program.get_program());
        wrapper.args(program.get_args()).env("NO_COLOR", "1");
        self.process = Some(Process::start(&self.name, namespace, wrapper, &self.log)?);
        Ok(())
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        self.is_frozen = false;
        self.process.take().map_or(Ok(()), Process::kill)
    }

    pub(super) fn freeze(&mut self, is_frozen: bool) -> Result<()> {
        if self.is_frozen == is_frozen {
            return Ok(());
        }
        let Some(process) = &mut self.process else { return Ok(()) };
        if process.exit()?.is_some() {
            return Ok(());
        }
        self.is_frozen = is_frozen;
        process.signal(if is_frozen { Signal::SIGSTOP } else { Signal::SIGCONT })
    }

    pub(super) fn step_clock(&self, milliseconds: i64) -> Result<()> {
        Ok(self.faults.write_all_at(&milliseconds.to_ne_bytes(), 0)?)
    }

    pub(super) fn fail_syncs(&self, do_fail: bool) -> Result<()> {
        Ok(self.faults.write_all_at(&i64::from(do_fail).to_ne_bytes(), 8)?)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("warning: {}: {error:#}", self.name);
        }
    }
}

/// Everything. The fields are dropped in order.
pub(super) struct World {
    pub(super) replicas: Vec<Member>,
    pub(super) agents: Vec<Member>,
    /// The places that the names of the replicas include.
    pub(super) named: Vec<usize>,
    /// How often each place got a new replica, which is part of the replica's name.
    pub(super) generations: [u32; PLACES],
    uncovered_after_seconds: usize,
    pub(super) relays: Relays,
    pub(super) rejecting: Vec<Arc<AtomicBool>>,
    pub(super) shared: Arc<Shared>,
    folder: TempDir,
}

impl World {
    /// Starts two replicas and all agents. `uncovered_after_seconds` is an option of replicas.
    pub(super) fn start(backend: Backend, uncovered_after_seconds: usize) -> Result<Self> {
        netns::check_prerequisites()?;
        netns::sweep_stale()?;
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let prefix = format!("hg{}-claims{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir()?;
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(folder.path().join("faults.so"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/claims/faults.c");
        ensure!(compiler.arg(source).status().context("running cc")?.success(), "cc cannot compile faults.c");

        let control = Arc::new(Namespace::create(format!("{prefix}-control"))?);
        control.ip_batch(
            "link set lo up\nlink add br0 type bridge\naddr add 192.0.2.1/24 dev br0\nlink set br0 up\n\
             route add local 198.18.0.0/15 dev lo\nroute add local 10.127.0.0/16 dev lo\nroute add local 10.128.0.0/9 dev lo\n",
        )?;
        let mut nodes = Vec::new();
        for (index, name) in NODES.iter().enumerate() {
            let node = Namespace::create(format!("{prefix}-{name}"))?;
            control.ip_batch(&format!(
                "link add {name} type veth peer name eth0 netns {}\nlink set {name} master br0 up\n",
                node.name()
            ))?;
            node.ip_batch(&format!(
                "link set lo up\naddr add 192.0.2.{}/24 dev eth0\nlink set eth0 up\nroute add default via 192.0.2.1\n",
                11 + index
            ))?;
            nodes.push(node);
        }
        let api = control.run(|| Ok(ApiServer::start()?))?;
        let rejecting: Vec<Arc<AtomicBool>> = NODES.iter().map(|_| Arc::default()).collect();
        let relays = Relays::start(Arc::clone(&control), api.address(), rejecting.clone())?;
        let source = Mutex::new(Source::new(&api));
        for place in 0..PLACES {
            let relay = format!("http://{}", Link::Source(place).listen());
            fs::write(folder.path().join(format!("kubeconfig-{place}")), api.kubeconfig().replace(&api.url(), &relay))?;
        }
        let member = |name: String| Member::new(folder.path(), name);
        let replicas = (0..PLACES).map(|place| member(format!("replica-{place}"))).collect::<Result<_>>()?;
        let agents = NODES.iter().map(|node| member(format!("agent-{node}"))).collect::<Result<_>>()?;
        let (running, story) = (Mutex::default(), Mutex::default());
        let (is_broken, lost_bait) = (Default::default(), Mutex::default());
        let shared = Shared {
            api,
            source,
            control,
            nodes,
            backend,
            is_broken,
            lost_bait,
            running,
            story,
            started: Instant::now(),
        };
        let shared = Arc::new(shared);
        let (named, generations) = (vec![0, 1], [0; PLACES]);
        let mut world =
            Self { replicas, agents, named, generations, uncovered_after_seconds, relays, rejecting, shared, folder };
        world.write_names()?;
        (0..2).try_for_each(|place| world.start_replica(place))?;
        (0..NODES.len()).try_for_each(|node| world.start_agent(node))?;
        Ok(world)
    }

    /// Keeps the logs, and returns their folder.
    pub(super) fn keep_logs(&mut self) -> PathBuf {
        self.folder.disable_cleanup(true);
        self.folder.path().to_owned()
    }

    pub(super) fn write_names(&self) -> Result<()> {
        for place in 0..PLACES {
            let lines = self.named.iter().map(|to| format!("{} replicas.test\n", Link::Peer(place, *to).listen().ip()));
            // A mount shows this file to the replica, so it is not replaced.
            fs::write(self.folder.path().join(format!("hosts-{place}")), lines.collect::<String>())?;
        }
        Ok(())
    }

    pub(super) fn start_replica(&mut self, place: usize) -> Result<()> {
        if self.replicas[place].process.is_some() {
            return Ok(());
        }
        self.shared.tell(format!("start replica-{place}"));
        let path = |name: &str| self.folder.path().join(format!("{name}-{place}"));
        let mut wrapper = Command::new("unshare");
        wrapper.args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]).arg(path("hosts"));
        let mut command = Command::new(program("headgate-control-plane")?);
        command.args(["--source=kubernetes", "--insecure-loopback", "--heartbeat-seconds=1", "--drain-grace-ms=500"]);
        command.args(["--behind-wait-seconds=5", "--peers=replicas.test:7443", "--ready-everywhere"]);
        command.arg(format!("--uncovered-after-seconds={}", self.uncovered_after_seconds));
        command.arg(format!("--kubeconfig={}", path("kubeconfig").display()));
        command.arg(format!("--listen={}", replica_address(place, 7443)));
        command.arg(format!("--metrics-listen={}", replica_address(place, 7480)));
        command.arg(format!("--replica-name=replica-{place}-{}", self.generations[place]));
        let shim = self.folder.path().join("faults.so");
        self.replicas[place].start(&self.shared.control, &shim, wrapper, &command)?;
        lock(&self.shared.running).push(place);
        Ok(())
    }

    pub(super) fn start_agent(&mut self, node: usize) -> Result<()> {
        // An agent ends if it starts while its kernel refuses everything. A DaemonSet starts it
        // again.
        if let Some(process) = &mut self.agents[node].process
            && process.exit()?.is_none()
        {
            return Ok(());
        }
        self.shared.tell(format!("start the agent of {}", NODES[node]));
        let mut command = Command::new(program("headgate-node-agent")?);
        command.args([&format!("--node-name={}", NODES[node]), "--insecure-loopback", "--state-save-period=500ms"]);
        let state = self.folder.path().join(format!("state-{}", NODES[node]));
        command.arg(format!("--state-dir={}", state.display())).arg("--drain-address=127.0.0.1:10261");
        command.args((0..PLACES).map(|place| format!("--control-plane=http://{}", Link::Agent(node, place).listen())));
        command.args(self.shared.backend.options());
        // Questions change the table.
        command.arg("--own-nftables-tables=false");
        let wrapper = Command::new("env");
        let shim = self.folder.path().join("faults.so");
        self.agents[node].start(&self.shared.nodes[node], &shim, wrapper, &command)
    }

    pub(super) fn stop_replica(&mut self, place: usize, signal: Signal) -> Result<()> {
        lock(&self.shared.running).retain(|running| *running != place);
        self.replicas[place].freeze(false)?;
        match self.replicas[place].process.take() {
            Some(process) if signal == Signal::SIGTERM => process.terminate().map(drop),
            Some(process) => process.kill(),
            None => Ok(()),
        }
    }
}
