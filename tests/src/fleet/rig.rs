//! What a fleet runs on: two machines, made of network namespaces, with the replicas on the one and
//! the agents on the other; and what is measured of them.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::Pid,
};

use super::certificates::ServerFiles;
use crate::testbed::{
    netns::{Namespace, check_prerequisites, sweep_stale, unique_prefix},
    process::{Process, program},
};

/// Address of the replicas' machine.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Address of the agents' machine.
const AGENTS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// A second address of the agents' machine, which can be taken away.
const VANISHING: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);
/// Hosts that agents are spread over, as addresses of their machine: a replica shares its time out
/// by address.
const HOSTS: u8 = 64;
/// The core of the replicas, and of everything else.
pub const SERVER_CORE: usize = 0;
/// See [`SERVER_CORE`].
pub const LOAD_CORE: usize = 1;
/// How long a replica may take until it serves.
const START_LIMIT: Duration = Duration::from_secs(60);

/// What is between replicas and agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Wire {
    /// Two machines joined by a pair of links, each of which takes in packets on its own core.
    Veth,
    /// The same, where the sender's core does the receiver's work as well, as it is by default
    /// between namespaces.
    VethUnsteered,
    /// One machine, and its loopback interface, where it is so too.
    Loopback,
}

/// The machines.
#[derive(Debug)]
pub struct Machines {
    server: Namespace,
    agents: Option<Namespace>,
}

impl Machines {
    /// Makes them. Packets are steered to cores only where there are two.
    ///
    /// # Errors
    /// When that needs rights or programs that are not there.
    pub fn create(wire: Wire) -> Result<Self> {
        check_prerequisites()?;
        sweep_stale()?;
        let prefix = unique_prefix();
        let server = Namespace::create(format!("{prefix}-replicas"))?;
        server.ip_batch("link set lo up\n")?;
        if wire == Wire::Loopback {
            return Ok(Self { server, agents: None });
        }
        let agents = Namespace::create(format!("{prefix}-agents"))?;
        agents.ip_batch("link set lo up\n")?;
        agents.set_sysctls(&[("ipv4/ip_local_port_range", "1024 65000")])?;
        server.ip_batch(&format!(
            "link add veth0 type veth peer name veth0 netns {}\naddr add {SERVER}/24 dev veth0\nlink set veth0 up\n",
            agents.name()
        ))?;
        let hosts: String = (0..HOSTS).map(|host| format!("addr add {}/24 dev veth0\n", host_address(host))).collect();
        agents.ip_batch(&format!(
            "addr add {AGENTS}/24 dev veth0\naddr add {VANISHING}/24 dev veth0\n{hosts}link set veth0 up\n"
        ))?;
        if wire == Wire::Veth && cores()? >= 2 {
            steer(&server, SERVER_CORE)?;
            steer(&agents, LOAD_CORE)?;
        }
        Ok(Self { server, agents: Some(agents) })
    }

    /// The replicas' machine.
    #[must_use]
    pub fn server(&self) -> &Namespace {
        &self.server
    }

    /// The agents' machine.
    #[must_use]
    pub fn agents(&self) -> &Namespace {
        self.agents.as_ref().unwrap_or(&self.server)
    }

    /// Where replicas listen.
    #[must_use]
    pub fn server_address(&self) -> IpAddr {
        if self.agents.is_some() { SERVER.into() } else { Ipv4Addr::LOCALHOST.into() }
    }

    /// The address of an agent's host.
    #[must_use]
    pub fn host(&self, agent: usize) -> IpAddr {
        // The remainder is below 64 and fits.
        let host = u8::try_from(agent % usize::from(HOSTS)).unwrap_or_default();
        if self.agents.is_some() { host_address(host).into() } else { Ipv4Addr::new(127, 0, 0, 2 + host).into() }
    }

    /// An address for agents that are to vanish; none on the loopback interface.
    #[must_use]
    pub fn vanishing_address(&self) -> Option<IpAddr> {
        self.agents.as_ref().map(|_| VANISHING.into())
    }

    /// Takes away the address of agents that are to vanish: from one moment to the next nothing
    /// comes from them, and nothing reaches them.
    ///
    /// # Errors
    /// On the loopback interface, or when it has been taken away before.
    pub fn vanish(&self) -> Result<()> {
        let agents = self.agents.as_ref().context("nobody can vanish on the loopback interface")?;
        agents.ip_batch(&format!("addr del {VANISHING}/24 dev veth0\n"))
    }
}

fn host_address(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 16 + host)
}

/// Number of cores that this process may use.
fn cores() -> Result<usize> {
    Ok(std::thread::available_parallelism().context("counting cores")?.get())
}

/// Makes a core take in what arrives at a machine's link. The setting is in sysfs, which
/// `ip netns exec` shows as the namespace sees it.
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

/// Binds the calling thread, and those that it starts, to a core.
///
/// # Errors
/// When there is no such core.
pub fn pin_this_thread(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("binding a thread to core {core}"))
}

/// Allows this process, and those that it starts, so many open files.
///
/// # Errors
/// When the system does not allow them.
pub fn allow_open_files(count: u64) -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, count, count).with_context(|| format!("allowing {count} open files"))
}

/// How many files this process may allow itself at most.
///
/// # Errors
/// When the system does not tell.
pub fn open_files_allowed() -> Result<u64> {
    let (_, allowed) = getrlimit(Resource::RLIMIT_NOFILE).context("asking how many files may be open")?;
    Ok(allowed)
}

/// How a replica is started.
#[derive(Debug, Clone)]
pub struct ReplicaSetup<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its port; metrics are on the next one.
    pub port: u16,
    /// Kubeconfig of its API server.
    pub kubeconfig: &'a str,
    /// Its TLS files.
    pub files: &'a ServerFiles,
    /// Further options.
    pub options: &'a [&'a str],
    /// The core that it is bound to.
    pub core: Option<usize>,
}

/// A running replica: the real program, as a process of its own.
#[derive(Debug)]
pub struct Replica {
    process: Process,
    address: SocketAddr,
    metrics: SocketAddr,
}

impl Replica {
    /// Starts a replica on the replicas' machine and waits until it has listed its source. Files
    /// are kept in `folder`.
    ///
    /// # Errors
    /// When it does not serve in a minute.
    pub fn start(machines: &Machines, folder: &Path, setup: &ReplicaSetup<'_>) -> Result<Self> {
        let mut replica = Self::spawn(machines, folder, setup)?;
        let until = std::time::Instant::now() + START_LIMIT;
        loop {
            replica.process.check_running()?;
            if replica.page(machines, "/readyz").is_ok_and(|page| page.starts_with("HTTP/1.1 200")) {
                return Ok(replica);
            }
            if std::time::Instant::now() > until {
                bail!("{} does not serve; its log ends with:\n{}", setup.name, replica.process.log_tail());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(machines: &Machines, folder: &Path, setup: &ReplicaSetup<'_>) -> Result<Self> {
        let address = SocketAddr::new(machines.server_address(), setup.port);
        let metrics = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), setup.port + 1);
        let kubeconfig: PathBuf = folder.join(format!("{}.kubeconfig", setup.name));
        fs::write(&kubeconfig, setup.kubeconfig).with_context(|| format!("writing {}", kubeconfig.display()))?;
        let program = program("headgate-control-plane")?;
        let mut command = match setup.core {
            // Before the program starts: its runtime counts the cores that it may use.
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
        command.arg("--tls-client-ca").arg(&setup.files.client_ca).args(setup.options);
        let log = folder.join(format!("{}.log", setup.name));
        let process = Process::start(setup.name, machines.server(), command, &log)?;
        Ok(Self { process, address, metrics })
    }

    /// Where agents connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The process, to end it.
    #[must_use]
    pub fn into_process(self) -> Process {
        self.process
    }

    /// An error, with the end of its log, if it has ended by itself.
    ///
    /// # Errors
    /// See above.
    pub fn check_running(&mut self) -> Result<()> {
        self.process.check_running()
    }

    /// Number of the process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// What it logged last.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    fn page(&self, machines: &Machines, path: &str) -> Result<String> {
        let address = self.metrics;
        machines.server().run(|| {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n")?;
            let mut page = String::new();
            stream.read_to_string(&mut page)?;
            Ok(page)
        })
    }

    /// The sum of a metric's samples, whatever their labels; 0 when there are none.
    ///
    /// # Errors
    /// When the page cannot be read.
    pub fn metric(&self, machines: &Machines, name: &str) -> Result<f64> {
        let page = self.page(machines, "/metrics")?;
        let is_sample = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        Ok(page.lines().filter(is_sample).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// CPU time so far.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn cpu(&self) -> Result<CpuTime> {
        CpuTime::of_process(self.process.id())
    }

    /// Resident memory, in bytes.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn resident_bytes(&self) -> Result<u64> {
        self.memory().resident_bytes()
    }

    /// Its memory, for another thread to look at.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory(self.process.id())
    }

    /// Resident memory at its highest, in bytes.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn highest_resident_bytes(&self) -> Result<u64> {
        status_bytes(self.process.id(), "VmHWM")
    }
}

/// The memory of a process.
#[derive(Debug, Clone, Copy)]
pub struct Memory(u32);

impl Memory {
    /// Resident memory, in bytes.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn resident_bytes(self) -> Result<u64> {
        status_bytes(self.0, "VmRSS")
    }
}

fn status_bytes(process: u32, field: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{path} has no {field}"))? * 1024)
}

/// CPU time, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CpuTime {
    /// In the program.
    pub user: f64,
    /// In the kernel on its behalf.
    pub system: f64,
    /// In interrupts and what follows them, which belong to nobody. Known of cores only.
    pub interrupts: f64,
    /// Doing nothing. Known of cores only.
    pub idle: f64,
    /// Taken away by whoever runs this machine as a virtual one. Known of cores only.
    pub stolen: f64,
}

impl CpuTime {
    /// Of a process.
    ///
    /// # Errors
    /// When it has ended.
    pub fn of_process(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/stat");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        // The name may hold anything; what follows it begins with the third field. utime and stime
        // are the 14th and 15th (proc_pid_stat(5)).
        let after = text.rsplit_once(')').with_context(|| format!("{path} has no name"))?.1;
        let ticks: Vec<f64> = after.split_whitespace().map(|field| field.parse().unwrap_or_default()).collect();
        let at = |index: usize| ticks.get(index).copied().map(seconds).with_context(|| format!("{path} is too short"));
        Ok(Self { user: at(11)?, system: at(12)?, ..Self::default() })
    }

    /// Of a core.
    ///
    /// # Errors
    /// When there is no such core.
    pub fn of_core(core: usize) -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{core} ")));
        let line = line.with_context(|| format!("/proc/stat has no core {core}"))?;
        let ticks: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok().map(seconds)).collect();
        let [user, nice, system, idle, iowait, hard, soft, stolen, ..] = ticks[..] else { bail!("/proc/stat: {line}") };
        Ok(Self { user: user + nice, system, interrupts: hard + soft, idle: idle + iowait, stolen })
    }

    /// All of it but doing nothing.
    #[must_use]
    pub fn busy(&self) -> f64 {
        self.user + self.system + self.interrupts
    }

    /// Of a core: the seconds of what ran there, with those of interrupts. The kernel may count an
    /// interrupt as time of the process that it came to as well (without
    /// `CONFIG_IRQ_TIME_ACCOUNTING`), so the sum is at most what the core did at all. Where nothing
    /// is known of the core, the process alone.
    #[must_use]
    pub fn with_interrupts(&self, process_seconds: f64) -> f64 {
        (process_seconds + self.interrupts).min(self.busy()).max(process_seconds)
    }

    /// What was used since an earlier reading.
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
    // USER_HZ, which is 100 on every architecture that Headgate runs on.
    ticks / 100.0
}
