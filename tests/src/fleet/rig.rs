//! The machines and replicas of a fleet, and measurements of processes and cores. One network
//! namespace is the machine of the replicas, and another namespace is the machine of the agents.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::resource::{Resource, setrlimit},
    unistd::Pid,
};

use super::certificates::ServerFiles;
use crate::testbed::{
    netns::{Namespace, check_prerequisites, sweep_stale, unique_prefix},
    page,
    process::{Process, program},
};

/// The address of the replicas' machine.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The address of the agents' machine.
const AGENTS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The number of source addresses of agents. Agents use several addresses, because a replica limits
/// the simultaneous TLS handshakes of each source address.
const HOSTS: u8 = 64;
/// The core of the replicas.
pub const SERVER_CORE: usize = 0;
/// The core of all other programs.
pub const LOAD_CORE: usize = 1;
/// How long a replica may take until it serves.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The machines.
#[derive(Debug)]
pub struct Machines {
    server: Namespace,
    agents: Namespace,
}

impl Machines {
    /// Creates the machines, which a veth pair connects. With `is_pinned`, each machine receives
    /// packets on its own core, if there are two; otherwise the sender's core receives them, which
    /// is the default for veth pairs.
    ///
    /// # Errors
    /// The process is not root, or `ip` is missing or fails.
    pub fn create(is_pinned: bool) -> Result<Self> {
        check_prerequisites()?;
        sweep_stale()?;
        let prefix = unique_prefix();
        let server = Namespace::create(format!("{prefix}-replicas"))?;
        server.ip_batch("link set lo up\n")?;
        let agents = Namespace::create(format!("{prefix}-agents"))?;
        agents.ip_batch("link set lo up\n")?;
        agents.set_sysctls(&[("ipv4/ip_local_port_range", "1024 65000")])?;
        server.ip_batch(&format!(
            "link add veth0 type veth peer name veth0 netns {}\naddr add {SERVER}/24 dev veth0\nlink set veth0 up\n",
            agents.name()
        ))?;
        let hosts: String = (0..HOSTS).map(|host| format!("addr add {}/24 dev veth0\n", host_address(host))).collect();
        agents.ip_batch(&format!("addr add {AGENTS}/24 dev veth0\n{hosts}link set veth0 up\n"))?;
        if is_pinned && cores()? >= 2 {
            steer(&server, SERVER_CORE)?;
            steer(&agents, LOAD_CORE)?;
        }
        Ok(Self { server, agents })
    }

    /// The replicas' machine.
    #[must_use]
    pub fn server(&self) -> &Namespace {
        &self.server
    }

    /// The agents' machine.
    #[must_use]
    pub fn agents(&self) -> &Namespace {
        &self.agents
    }

    /// The address at which replicas listen.
    #[must_use]
    pub fn server_address(&self) -> IpAddr {
        SERVER.into()
    }

    /// The source address of the agent with this number.
    #[must_use]
    pub fn host(&self, agent: usize) -> IpAddr {
        // The remainder is below 64, so it fits.
        let host = u8::try_from(agent % usize::from(HOSTS)).unwrap_or_default();
        host_address(host).into()
    }
}

fn host_address(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 16 + host)
}

/// The number of cores that this process may use.
fn cores() -> Result<usize> {
    Ok(std::thread::available_parallelism().context("counting cores")?.get())
}

/// Makes a core receive the packets of a machine's link (receive packet steering). The setting is
/// in sysfs, which `ip netns exec` mounts for the namespace.
fn steer(namespace: &Namespace, core: usize) -> Result<()> {
    let file = "/sys/class/net/veth0/queues/rx-0/rps_cpus";
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace.name(), "sh", "-c", &format!("echo {:x} > {file}", 1_u32 << core)]);
    let output = command.output().context("running `ip`")?;
    if !output.status.success() {
        bail!("{file} in {}: {}", namespace.name(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Pins the calling thread, and all threads that it starts later, to a core.
///
/// # Errors
/// The core does not exist.
pub fn pin_this_thread(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("pinning a thread to core {core}"))
}

/// Sets the limit of open files for this process, and for processes that it starts later.
///
/// # Errors
/// The system does not allow this limit.
pub fn allow_open_files(count: u64) -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, count, count).with_context(|| format!("allowing {count} open files"))
}

/// How a replica is started.
#[derive(Debug, Clone)]
pub struct ReplicaSetup<'a> {
    /// The replica's name.
    pub name: &'a str,
    /// The port for agents. The next port serves metrics.
    pub port: u16,
    /// The text of the kubeconfig file for its API server.
    pub kubeconfig: &'a str,
    /// The TLS files.
    pub files: &'a ServerFiles,
    /// The core to which the process is pinned, if any.
    pub core: Option<usize>,
    /// The value of `--peers`, if any.
    pub peers: Option<&'a str>,
}

/// A running replica: a process of the real program.
#[derive(Debug)]
pub struct Replica {
    process: Process,
    address: SocketAddr,
    metrics: SocketAddr,
}

impl Replica {
    /// Waits until the replica is ready.
    ///
    /// # Errors
    /// The replica is not ready within a minute.
    pub fn wait_until_ready(&mut self, machines: &Machines) -> Result<()> {
        let until = std::time::Instant::now() + START_LIMIT;
        loop {
            self.process.check_running()?;
            if self.page(machines, "/readyz").is_ok_and(|page| page.starts_with("HTTP/1.1 200")) {
                return Ok(());
            }
            if std::time::Instant::now() > until {
                bail!("{} does not serve; its log ends with:\n{}", self.address, self.process.log_tail());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts a replica on the replicas' machine, with its files in `folder`, without waiting until
    /// it is ready.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(machines: &Machines, folder: &Path, setup: &ReplicaSetup<'_>) -> Result<Self> {
        let address = SocketAddr::new(machines.server_address(), setup.port);
        let metrics = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), setup.port + 1);
        let kubeconfig: PathBuf = folder.join(format!("{}.kubeconfig", setup.name));
        fs::write(&kubeconfig, setup.kubeconfig).with_context(|| format!("writing {}", kubeconfig.display()))?;
        let program = program("headgate-control-plane")?;
        let mut command = match setup.core {
            // The process is pinned before it starts, because its runtime counts the cores at the
            // start.
            Some(core) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core.to_string()]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(["--source", "kubernetes", "--log", "warn", "--replica-name", setup.name]);
        command.args(["--listen", &address.to_string(), "--metrics-listen", &metrics.to_string()]);
        command.arg("--kubeconfig").arg(&kubeconfig);
        command.arg("--tls-cert").arg(&setup.files.cert).arg("--tls-key").arg(&setup.files.key);
        command.arg("--tls-client-ca").arg(&setup.files.client_ca);
        command.args(setup.peers.map(|peers| format!("--peers={peers}")));
        let log = folder.join(format!("{}.log", setup.name));
        let process = Process::start(setup.name, machines.server(), command, &log)?;
        Ok(Self { process, address, metrics })
    }

    /// The address for agents.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address for Inspect.
    #[must_use]
    pub fn inspect_address(&self) -> SocketAddr {
        SocketAddr::new(self.address.ip(), self.address.port() + 1)
    }

    /// Returns the process, so that the caller can end it.
    #[must_use]
    pub fn into_process(self) -> Process {
        self.process
    }

    /// Checks that the process still runs.
    ///
    /// # Errors
    /// The process has ended. The error includes the end of the process's log.
    pub fn check_running(&mut self) -> Result<()> {
        self.process.check_running()
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The end of the replica's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    fn page(&self, machines: &Machines, path: &str) -> Result<String> {
        machines.server().run(|| Ok(page::get(self.metrics, path)?))
    }

    /// The sum of a metric's samples over all labels, or 0 without samples.
    ///
    /// # Errors
    /// The page cannot be read.
    pub fn metric(&self, machines: &Machines, name: &str) -> Result<f64> {
        let page = self.page(machines, "/metrics")?;
        let is_sample = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        Ok(page.lines().filter(is_sample).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// The buckets of a histogram without labels: their upper bounds, and the number of values up
    /// to each bound.
    ///
    /// # Errors
    /// The page cannot be read.
    pub fn buckets(&self, machines: &Machines, name: &str) -> Result<Vec<(f64, u64)>> {
        let page = self.page(machines, "/metrics")?;
        let prefix = format!("{name}_bucket{{le=\"");
        let bucket = |line: &str| {
            let (bound, count) = line.strip_prefix(&prefix)?.split_once("\"} ")?;
            Some((bound.parse().ok()?, count.parse().ok()?))
        };
        Ok(page.lines().filter_map(bucket).collect())
    }

    /// The CPU time so far.
    ///
    /// # Errors
    /// The process has ended.
    pub fn cpu(&self) -> Result<CpuTime> {
        CpuTime::of_process(self.process.id())
    }

    /// Resident memory, in bytes.
    ///
    /// # Errors
    /// The process has ended.
    pub fn resident_bytes(&self) -> Result<u64> {
        status_bytes(self.process.id(), "VmRSS")
    }

    /// Peak resident memory, in bytes.
    ///
    /// # Errors
    /// The process has ended.
    pub fn highest_resident_bytes(&self) -> Result<u64> {
        status_bytes(self.process.id(), "VmHWM")
    }
}

fn status_bytes(process: u32, field: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{path} has no {field}"))? * 1024)
}

/// CPU time of a process or a core, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CpuTime {
    /// Time in user mode.
    pub user: f64,
    /// Time in the kernel on behalf of processes.
    pub system: f64,
    /// Time in hardware and software interrupts. This time is 0 for a process.
    pub interrupts: f64,
    /// Idle time. This time is 0 for a process.
    pub idle: f64,
    /// Time that the hypervisor took away. This time is 0 for a process.
    pub stolen: f64,
}

impl CpuTime {
    /// The CPU time of a process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn of_process(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/stat");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        // The name is in parentheses and may contain any text. The third field follows the name.
        // utime and stime are the 14th and 15th fields (proc_pid_stat(5)).
        let after = text.rsplit_once(')').with_context(|| format!("{path} has no name"))?.1;
        let ticks: Vec<f64> = after.split_whitespace().map(|field| field.parse().unwrap_or_default()).collect();
        let at = |index: usize| ticks.get(index).copied().map(seconds).with_context(|| format!("{path} is too short"));
        Ok(Self { user: at(11)?, system: at(12)?, ..Self::default() })
    }

    /// The CPU time of a core.
    ///
    /// # Errors
    /// The core does not exist.
    pub fn of_core(core: usize) -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{core} ")));
        let line = line.with_context(|| format!("/proc/stat has no core {core}"))?;
        let ticks: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok().map(seconds)).collect();
        let [user, nice, system, idle, iowait, hard, soft, stolen, ..] = ticks[..] else { bail!("/proc/stat: {line}") };
        Ok(Self { user: user + nice, system, interrupts: hard + soft, idle: idle + iowait, stolen })
    }

    /// All time except idle and stolen time.
    #[must_use]
    pub fn busy(&self) -> f64 {
        self.user + self.system + self.interrupts
    }

    /// Adds the interrupts of a core to the CPU time of a process that runs on the core. `self` is
    /// the core's time. Without `CONFIG_IRQ_TIME_ACCOUNTING` the kernel may also count an interrupt
    /// as time of the process, so the result is at most the core's busy time. If the core's time is
    /// unknown and therefore zero, the result is the process's time.
    #[must_use]
    pub fn with_interrupts(&self, process_seconds: f64) -> f64 {
        (process_seconds + self.interrupts).min(self.busy()).max(process_seconds)
    }

    /// The sum of two CPU times.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            user: self.user + other.user,
            system: self.system + other.system,
            interrupts: self.interrupts + other.interrupts,
            idle: self.idle + other.idle,
            stolen: self.stolen + other.stolen,
        }
    }

    /// The difference from an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            user: self.user - earlier.user,
            system: self.system - earlier.system,
            interrupts: self.interrupts - earlier.interrupts,
            idle: self.idle - earlier.idle,
            stolen: self.stolen - earlier.stolen,
        }
    }
}

fn seconds(ticks: f64) -> f64 {
    // USER_HZ is 100 on every architecture that Headgate supports.
    ticks / 100.0
}
