//! `warm-restart`: an agent restarts while its rules are in place, after SIGTERM, after SIGKILL,
//! and while no control plane answers. The bench fails if the agent writes to the kernel or a
//! connection fails. During the restarts, two clients continually open new connections, one to the
//! first Service and one to the last Service. One older connection to each of these Services stays
//! open. The bench compares the time until the agent has verified the rules with the time of the
//! first sync. The bench runs real programs: a control plane with a folder of manifests, and an
//! agent.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use socket2::SockRef;

use super::{clock::wall_ms, memory, report::Figure, workload};
use crate::{
    cases::WriteLog,
    testbed::{
        netns::Namespace,
        process::{Process, program},
    },
};

const ENDPOINTS: u32 = 10;
const SERVERS: &str = "0.0.0.0:8080";
/// The time limit of each wait for the agent's metrics or log. A wait usually ends after a few
/// seconds.
const LONGEST_SYNC: Duration = Duration::from_secs(240);
const LONGEST_ANSWER: Duration = Duration::from_secs(5);
/// The pause between two connections of a client.
const PAUSE: Duration = Duration::from_millis(5);
/// A part of the message that the agent logs when it keeps the rules of the last run until a
/// control plane answers.
const LEFT_ALONE: &str = "stay as they are until a control plane answers";

/// Runs the bench in both variants.
///
/// # Errors
/// A warm restart writes to the kernel, a connection fails, or a program does not start.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(10_000);
    let mut figures = Vec::new();
    for variant in ["legacy", "nft"] {
        figures.extend(measure(variant, services).with_context(|| format!("{variant}, {services} Services"))?);
    }
    Ok(figures)
}

/// How the previous agent ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Sigterm,
    Sigkill,
    /// SIGKILL ends the agent and the control plane. The control plane starts again after the next
    /// agent has checked the rules.
    Alone,
}

const ENDS: [(&str, End); 3] = [("sigterm", End::Sigterm), ("sigkill", End::Sigkill), ("alone", End::Alone)];

/// The machine: a namespace that holds the addresses of the first and the last Service's endpoints.
struct Machine {
    namespace: Namespace,
    folder: tempfile::TempDir,
    writes: WriteLog,
    variant: &'static str,
}

/// The programs that run on the machine.
struct Programs<'a> {
    machine: &'a Machine,
    control_plane: Option<Process>,
    agent: Option<Process>,
}

fn measure(variant: &'static str, services: u32) -> Result<Vec<Figure>> {
    let machine = Machine::make(variant, services)?;
    let mut programs = Programs { machine: &machine, control_plane: None, agent: None };
    programs.start_control_plane()?;
    let (first_sync_ms, synced) = wall_ms(|| {
        programs.start_agent()?;
        programs.until("the first sync", |page| value(page, "headgate_agent_version_programmed") > 0.0)
    });
    synced?;
    // The next agent starts with the saved state.
    programs.until("the state to be saved", |page| value(page, "headgate_agent_state_bytes") > 0.0)?;
    let last = services - 1;
    let mut held = [0, last].map(|service| machine.namespace.run(|| connect(service)));
    let (stop, mut figures) = (AtomicBool::new(false), Vec::new());
    let name = |what: &str| format!("warm-restart/{variant}/{what}/{services}x{ENDPOINTS}");
    let opened = thread::scope(|scope| {
        let clients = [0, last].map(|service| {
            let (namespace, stop) = (&machine.namespace, &stop);
            scope.spawn(move || namespace.run(|| keep_connecting(service, stop)))
        });
        let restarted = ENDS.into_iter().try_for_each(|(label, end)| {
            let (ms, restarted) = wall_ms(|| programs.restart(end));
            restarted.with_context(|| format!("restarting the agent after {label}"))?;
            for held in &mut held {
                let stream = held.as_mut().map_err(|error| anyhow!("{error:#}"))?;
                exchange(stream).with_context(|| format!("a connection that was open during {label}"))?;
            }
            figures.push(Figure::against(
                name(&format!("until-verified-after-{label}")),
                ms,
                "ms",
                "the first sync",
                first_sync_ms,
            ));
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let opened: Result<u32> = clients
            .into_iter()
            .map(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .sum();
        restarted.and(opened)
    })?;
    ensure!(opened > 100, "only {opened} connections were opened during the restarts, too few for a result");
    figures.push(Figure::alone(name("connections-opened-none-failed"), f64::from(opened), "connections"));
    Ok(figures)
}

impl Machine {
    fn make(variant: &'static str, services: u32) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a folder")?;
        let manifests = folder.path().join("manifests");
        fs::create_dir(&manifests)?;
        memory::write_manifests(&manifests, services, memory::ENDPOINTS)?;
        let namespace = Namespace::create(format!("hg{}-bench-restart", std::process::id()))?;
        let mut commands = String::from("link set lo up\nroute add 10.96.0.0/12 dev lo\n");
        for service in [0, services - 1] {
            for endpoint in 0..ENDPOINTS {
                commands.push_str(&format!("addr add {}/32 dev lo\n", workload::endpoint_ip(service, endpoint)));
            }
        }
        namespace.ip_batch(&commands)?;
        let listener = namespace.run(|| TcpListener::bind(SERVERS).context("listening"))?;
        thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(thread::spawn(|| echo(stream)))));
        let writes = WriteLog::create(folder.path())?;
        Ok(Self { namespace, folder, writes, variant })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The agent's metrics.
    fn page(&self) -> Result<String> {
        self.namespace.run(|| {
            let mut stream = TcpStream::connect("127.0.0.1:10249")?;
            stream.set_read_timeout(Some(LONGEST_ANSWER))?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: agent\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })
    }
}

impl Programs<'_> {
    fn start_control_plane(&mut self) -> Result<()> {
        let mut command = Command::new(program("headgate-control-plane")?);
        command.arg("--source").arg(format!("files:{}", self.machine.path("manifests").display()));
        command.args(["--listen", "127.0.0.1:7443", "--insecure-loopback", "--log", "warn"]);
        let log = self.machine.path("control-plane.log");
        self.control_plane = Some(Process::start("control plane", &self.machine.namespace, command, &log)?);
        Ok(())
    }

    fn start_agent(&mut self) -> Result<()> {
        let Machine { namespace, writes, variant, .. } = self.machine;
        let mut command = Command::new(program("headgate-node-agent")?);
        command.args(["--node-name", "node-000", "--control-plane", "http://127.0.0.1:7443", "--insecure-loopback"]);
        command.args(["--proxy-mode", "iptables", "--iptables-variant", variant]);
        command.args(["--cluster-cidr", "11.0.0.0/8", "--state-save-period", "1s"]);
        command.arg("--state-dir").arg(self.machine.path("state"));
        let path = std::env::var("PATH").context("PATH is not set")?;
        command.env("PATH", format!("{}:{path}", writes.tools.display()));
        command.env("XTABLES_LOCKFILE", self.machine.path("xtables.lock"));
        self.agent = Some(Process::start("agent", namespace, command, &self.machine.path("agent.log"))?);
        Ok(())
    }

    /// Ends the agent, starts a new agent, and waits until the new agent has verified the rules.
    /// Checks that the new agent has written nothing to the kernel.
    fn restart(&mut self, end: End) -> Result<()> {
        let before = self.machine.writes.count()?;
        let agent = self.agent.take().context("no agent runs")?;
        match end {
            End::Sigterm => drop(agent.terminate()?),
            End::Sigkill | End::Alone => agent.kill()?,
        }
        if let (End::Alone, Some(control_plane)) = (end, self.control_plane.take_if(|_| end == End::Alone)) {
            control_plane.kill()?;
        }
        fs::write(self.machine.path("agent.log"), "").context("emptying the agent's log")?;
        self.start_agent()?;
        if end == End::Alone {
            wait_for("the agent to check the rules", || {
                Ok(fs::read_to_string(self.machine.path("agent.log"))?.contains(LEFT_ALONE))
            })?;
            self.start_control_plane()?;
        }
        self.until("the rules to be verified", |page| value(page, "headgate_agent_version_programmed") > 0.0)?;
        let (page, written) = (self.machine.page()?, self.machine.writes.count()? - before);
        ensure!(
            value(&page, "headgate_agent_state_restored") == 1.0,
            "the agent did not start with the state from disk"
        );
        let objects = value(&page, "headgate_agent_objects_written_total");
        ensure!(written == 0 && objects == 0.0, "the agent wrote {objects} chains to the kernel, with {written} calls");
        Ok(())
    }

    /// Waits until `is_so` accepts the agent's metrics page. `what` completes the error "timed out
    /// waiting for …".
    fn until(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
        let agent = self.agent.as_mut().context("no agent runs")?;
        let machine = self.machine;
        wait_for(what, || {
            agent.check_running()?;
            // The agent may not serve its page yet.
            Ok(machine.page().is_ok_and(|page| is_so(&page)))
        })
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !is_so()? {
        ensure!(started.elapsed() < LONGEST_SYNC, "timed out waiting for {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The value of a metric without labels, or 0 if the page does not contain the metric.
fn value(page: &str, name: &str) -> f64 {
    let values = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok());
    values.sum()
}

/// Sends all bytes back until the client disconnects.
fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
}

fn connect(service: u32) -> Result<TcpStream> {
    let to = SocketAddr::new(workload::cluster_ip(service), 80);
    let stream = TcpStream::connect_timeout(&to, LONGEST_ANSWER).with_context(|| format!("connecting to {to}"))?;
    stream.set_read_timeout(Some(LONGEST_ANSWER))?;
    // A reset at the end releases the port at once.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream) -> Result<()> {
    let mut byte = [b'?'];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte).context("no answer")
}

/// Opens one connection after the other until `stop` is set. Returns the number of connections.
///
/// # Errors
/// A connection fails.
fn keep_connecting(service: u32, stop: &AtomicBool) -> Result<u32> {
    let mut opened = 0;
    while !stop.load(Ordering::Relaxed) {
        exchange(&mut connect(service)?).with_context(|| format!("connection {opened} to service {service}"))?;
        opened += 1;
        thread::sleep(PAUSE);
    }
    Ok(opened)
}
