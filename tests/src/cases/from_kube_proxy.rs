//! A node moves from kube-proxy to Headgate and back, while clients hold and open connections. With
//! a real kube-proxy if there is one, else with rules as kube-proxy writes them.

use std::cell::OnceCell;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::symlink;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::changes::eventually;
use super::ipvs::upgrade;
use super::live::while_asking;
use super::recorded;
use super::run::shares;
use super::takeover::{CLIENTS, answers, check, open};
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::kube_proxy::{self, Mode, RealKubeProxies};
use crate::testbed::manifests::{Service, ServiceType, Via};
use crate::testbed::process::Process;
use crate::testbed::{AgentSetup, Backend, Family, Manifests, Namespace, Testbed, page, written};
use crate::uml;

/// The Services of this module's scenario. A real API server uses the first address itself.
pub fn services() -> Result<Manifests> {
    let mut manifests = Manifests::default();
    manifests.add(Service { service_type: ServiceType::ExternalName, ..Service::new("first", &[]) })?;
    manifests.add(Service::new("steady", &["a1", "b1"]))?;
    Ok(manifests)
}

/// kube-proxy of node-a.
struct KubeProxy<'a> {
    bed: &'a Testbed,
    mode: Mode,
    source: Source,
}

/// Where the rules of kube-proxy come from.
enum Source {
    Real { server: Box<RealKubeProxies>, process: Option<Process> },
    Recorded(Option<(Process, ModePage)>),
}

impl<'a> KubeProxy<'a> {
    fn start(bed: &'a Testbed, mode: Mode) -> Result<Self> {
        let source = match kube_proxy::assets() {
            Some(assets) => {
                let server = RealKubeProxies::start(bed.machines(), &assets, &services()?)?;
                Source::Real { server: Box::new(server), process: None }
            }
            None => Source::Recorded(None),
        };
        let mut kube_proxy = Self { bed, mode, source };
        kube_proxy.start_again()?;
        Ok(kube_proxy)
    }

    /// Starts kube-proxy, and waits until its rules are in the kernel.
    fn start_again(&mut self) -> Result<()> {
        match &mut self.source {
            Source::Real { server, process } => {
                *process = Some(server.run(self.bed.machines(), "node-a", self.mode)?);
            }
            Source::Recorded(stand_in) => {
                let process = idle_kube_proxy(self.bed)?;
                load(self.bed, self.mode)?;
                *stand_in = Some((process, ModePage::serve(self.bed, self.mode)?));
            }
        }
        Ok(())
    }

    /// In mode ipvs, Headgate and kube-proxy share chains. A real kube-proxy writes its rules again
    /// within 30 s; recorded ones have to be loaded again after the last write of the agent.
    fn write_again(&self) -> Result<()> {
        match self.source {
            Source::Recorded(_) if self.mode == Mode::Ipvs => load(self.bed, self.mode),
            _ => Ok(()),
        }
    }

    /// Ends kube-proxy. Its rules stay.
    fn stop(&mut self) -> Result<()> {
        match &mut self.source {
            Source::Real { process, .. } => process.take().context("kube-proxy does not run")?.terminate().map(drop),
            Source::Recorded(stand_in) => stand_in.take().context("kube-proxy does not run")?.0.terminate().map(drop),
        }
    }
}

fn load(bed: &Testbed, mode: Mode) -> Result<()> {
    match mode {
        Mode::IptablesLegacy => recorded::load_iptables(bed, Variant::Legacy),
        Mode::Iptables => recorded::load_iptables(bed, Variant::Nft),
        Mode::Ipvs => recorded::load_ipvs(bed),
        Mode::Nftables => recorded::load_nftables(bed),
    }
}

/// Starts a process of node-a that is called kube-proxy and does nothing.
fn idle_kube_proxy(bed: &Testbed) -> Result<Process> {
    let folder = bed.machines().folder();
    let program = folder.join("kube-proxy");
    if !program.exists() {
        symlink("/bin/sleep", &program)?;
    }
    let mut command = Command::new(program);
    command.arg("3600");
    Process::start("kube-proxy", bed.machines().machine("node-a")?, command, &folder.join("kube-proxy.log"))
}

/// The page `/proxyMode` of a kube-proxy on node-a. Dropping it closes its port.
struct ModePage {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ModePage {
    fn serve(bed: &Testbed, mode: Mode) -> Result<Self> {
        // An agent that programs the node has the port until it yields.
        let bound = OnceCell::new();
        eventually(|| {
            let listen = || Ok(TcpListener::bind("127.0.0.1:10249")?);
            let listener = bed.machines().machine("node-a")?.run(listen)?;
            ensure!(bound.set(listener).is_ok(), "the port is bound");
            Ok(())
        })?;
        let listener = bound.into_inner().context("the port is not bound")?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                };
                let answer = format!("HTTP/1.0 200 OK\r\n\r\n{}", mode.name());
                // If this fails, the client fails, too.
                let _ = stream.set_nonblocking(false);
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for ModePage {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("warning: the page /proxyMode has panicked");
        }
    }
}

/// The addresses that clients use. All packets pass through node-a. With mode ipvs, node-a itself
/// opens no connections: while it has the address of a Service, it also uses this address as the
/// source, and such a connection ends with the address.
pub(super) fn targets(bed: &Testbed, with_ipvs: bool) -> Result<Vec<(&'static str, SocketAddr)>> {
    let mut targets = Vec::new();
    for family in Family::BOTH {
        for client in CLIENTS.into_iter().filter(|client| !(with_ipvs && *client == "node-a")) {
            targets.push((client, bed.address("steady", Via::ClusterIp, family, "tcp")?));
        }
        targets.push(("outside-1", bed.address("steady", Via::NodePort("node-a"), family, "tcp")?));
    }
    Ok(targets)
}

/// Whether this kernel has only the legacy variant of iptables, and no nftables.
fn is_in_uml() -> bool {
    uml::guest::is_here()
}

/// Whether this kernel has IPVS. Otherwise prints why a test does not run. Panics instead if
/// `HEADGATE_NEEDS_IPVS` is set.
pub fn has_ipvs() -> bool {
    let has_ipvs = Command::new("modprobe").arg("ip_vs").output().is_ok_and(|output| output.status.success());
    if !has_ipvs {
        assert!(std::env::var_os("HEADGATE_NEEDS_IPVS").is_none(), "modprobe ip_vs fails");
        println!("this kernel has no IPVS: run this test with `make kernels`");
    }
    has_ipvs
}

/// The mode that agents change to before kube-proxy starts in the mode `from`, if any.
fn before_going_back(from: Mode, to: Backend) -> Option<Backend> {
    match from {
        Mode::Iptables | Mode::IptablesLegacy => (to == Backend::Ipvs).then_some(Backend::IptablesLegacy),
        Mode::Ipvs => None,
        Mode::Nftables => (!to.uses_nftables()).then_some(Backend::Nftables),
    }
}

/// Waits until the kernel of node-a has the rules of this mode of kube-proxy only if `has_theirs`,
/// tables, gates and sets of Headgate only if `has_ours`, and nothing of other modes.
fn check_rules(bed: &Testbed, mode: Mode, has_theirs: bool, has_ours: bool) -> Result<()> {
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let with_ipvs = is_in_uml() || mode == Mode::Ipvs;
    eventually(|| {
        let tables = if is_in_uml() { String::new() } else { node.tool("nft", &["list", "tables"])? };
        let servers = if with_ipvs { node.tool("ipvsadm", &["-S", "-n"])? } else { String::new() };
        let sets = node.tool("ipset", &["list", "-name"])?;
        let [legacy, nft] = [Variant::Legacy, Variant::Nft].map(|variant| {
            let of = |family| iptables::save(node, variant, family, &lock);
            anyhow::Ok(of(Family::V4)? + &of(Family::V6)?)
        });
        let (legacy, nft) = (legacy?, nft?);
        let has_table = |end: &str| tables.lines().any(|line| line.ends_with(end));
        let has_gate = [&legacy, &nft, &sets].into_iter().any(|text| text.contains("-GATE"));
        ensure!((has_table(" headgate") || has_gate) == has_ours, "{tables}\n{sets}\n{legacy}\n{nft}");
        let has_servers = servers.lines().any(|line| line.ends_with(" -w 1"));
        let found = [
            (Mode::Iptables, nft.contains("-j KUBE-SVC-")),
            (Mode::IptablesLegacy, legacy.contains("-j KUBE-SVC-")),
            (Mode::Ipvs, has_servers),
            (Mode::Nftables, has_table(" kube-proxy")),
        ];
        let found: Vec<Mode> = found.into_iter().filter(|(_, is_there)| *is_there).map(|(mode, _)| mode).collect();
        ensure!(found.iter().all(|found| *found == mode) && found.is_empty() != has_theirs, "rules of {found:?}");
        ensure!(!has_theirs || !sets.contains("NO-ENDPOINTS"), "sets of Headgate are left:\n{sets}");
        Ok(())
    })
}

/// Waits until the agent of node-a reports no connections of another mode. Its limit for them
/// passes.
fn wait_until_drained(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    eventually(|| {
        let status = page::of_agent(node, "/status")?;
        ensure!(!status.contains("open connections"), "the page /status says {status}");
        Ok(())
    })
}

/// If the agent of this mode carried the connections, ensures that they have ended with the agent,
/// and removes them.
pub(super) fn end_of_carried(mode: Backend, connections: &mut Vec<HeldConnection>) -> Result<()> {
    if mode.carries_tcp() {
        let left = connections.iter_mut().filter_map(|connection| connection.check().ok()).count();
        ensure!(left == 0, "{left} connections of mode userspace survive: docs/migration.md says otherwise");
        connections.clear();
    }
    Ok(())
}

/// A node moves from kube-proxy to Headgate and back, as docs/migration.md says. Every new
/// connection succeeds. Connections that kube-proxy's rules established survive both moves.
/// Connections that Headgate established survive the way back, with two exceptions. Those that mode
/// userspace carries end with the agent. Those of mode ipvs survive the change to another mode, and
/// end at the limit.
///
/// Needs machines with [`services`] and no running programs.
pub fn there_and_back(bed: &Testbed, from: Mode, to: Backend) -> Result<()> {
    let mut kube_proxy = KubeProxy::start(bed, from)?;
    bed.start_control_plane()?;
    let mut held = open(bed).context("through the rules of kube-proxy")?;
    let before_going_back = before_going_back(from, to);
    // The limit for connections of mode ipvs passes only on the way to another mode of kube-proxy.
    let limit = if to == Backend::Ipvs && before_going_back.is_some() { "30s" } else { "600s" };
    let arguments = ["--userspace-drain-limit=3s", "--takeover-limit", limit];
    let setup = |backend| AgentSetup { backend: Some(backend), ..AgentSetup::with(&arguments) };
    let targets = targets(bed, from == Mode::Ipvs || to == Backend::Ipvs)?;
    let asked = while_asking(bed, &targets, || {
        kube_proxy.stop()?;
        bed.start_programmed("node-a", &setup(to))?;
        // Otherwise, both use the same names.
        if to.uses_nftables() {
            check_rules(bed, from, false, true)?;
        }
        check(&mut held).context("after the move to Headgate")?;
        // While connections of IPVS remain, the node has the addresses of their Services. Mode
        // userspace, behind rules of nftables, does not carry datagrams to addresses of the node.
        if (from, to) != (Mode::Ipvs, Backend::Userspace) {
            answers(bed)?;
        }
        let mut of_headgate = open(bed).context("through Headgate")?;

        if let Some(mode) = before_going_back {
            upgrade(bed, &setup(mode))?;
            end_of_carried(to, &mut of_headgate)?;
            check(&mut of_headgate).context("connections of Headgate, after the change of the mode")?;
            if to == Backend::Ipvs {
                wait_until_drained(bed)?;
                of_headgate.clear();
            }
        }
        bed.stop_agent("node-a")?;
        kube_proxy.start_again().context("going back to kube-proxy")?;
        bed.clean_up("node-a")?;
        check_rules(bed, from, true, false)?;
        check(&mut held).context("after the way back")?;
        end_of_carried(to, &mut of_headgate)?;
        check(&mut of_headgate).context("connections of Headgate, after the way back")
    })?;
    println!("{} new connections, {} held connections", asked.len(), held.len());
    ensure!(shares(&asked).len() == 2, "{:?} answered", shares(&asked));
    let afterwards = while_asking(bed, &targets, || {
        std::thread::sleep(Duration::from_secs(1));
        Ok(())
    })?;
    ensure!(shares(&afterwards).len() == 2, "{:?} answered at the end", shares(&afterwards));
    Ok(())
}

/// Waits until the agent of node-a logs this `count` times.
fn until_logged(bed: &Testbed, text: &str, count: usize) -> Result<()> {
    let log = bed.machines().folder().join("agent-node-a.log");
    eventually(|| {
        let found = fs::read_to_string(&log).context("reading the log of the agent")?.matches(text).count();
        ensure!(found == count, "the agent has logged {text:?} {found} times");
        Ok(())
    })
}

/// Ensures that `work` writes nothing on a node.
fn writes_nothing(node: &Namespace, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = node.run(written::here)?;
    work()?;
    let after = node.run(written::here)?;
    let difference = before.iter().zip(&after).find(|(before, after)| before != after);
    ensure!(before.len() == after.len() && difference.is_none(), "something was written: {difference:?}");
    Ok(())
}

/// An agent begins beside kube-proxy and writes nothing, takes over when kube-proxy ends, and
/// yields when it returns, so that only the rules of kube-proxy are left. The cleanup then succeeds
/// and changes nothing. Every connection succeeds, and those that are open survive.
///
/// Needs machines with [`services`] and no running programs.
pub fn standby_and_back(bed: &Testbed, from: Mode, to: Backend) -> Result<()> {
    let mut kube_proxy = KubeProxy::start(bed, from)?;
    bed.start_control_plane()?;
    let mut held = open(bed).context("through the rules of kube-proxy")?;
    let targets = targets(bed, from == Mode::Ipvs || to == Backend::Ipvs)?;
    let asked = while_asking(bed, &targets, || {
        let node = bed.machines().machine("node-a")?;
        writes_nothing(node, || {
            bed.start_agent_with("node-a", &AgentSetup { backend: Some(to), ..AgentSetup::with(&["--standby=auto"]) })?;
            until_logged(bed, &format!("standby: kube-proxy ({}) runs", from.name()), 1)
        })?;

        kube_proxy.stop()?;
        until_logged(bed, "this agent programs the node", 1)?;
        bed.wait_programmed()?;
        if to.uses_nftables() {
            check_rules(bed, from, false, true)?;
        }
        check(&mut held).context("after the agent has taken over")?;
        held.extend(open(bed).context("through Headgate")?);

        kube_proxy.start_again().context("going back to kube-proxy")?;
        until_logged(bed, "has returned to this node and works", 1)?;
        kube_proxy.write_again()?;
        check_rules(bed, from, true, false).context("after the agent has yielded")?;
        check(&mut held).context("after the agent has yielded")?;
        bed.stop_agent("node-a")?;
        writes_nothing(node, || bed.clean_up("node-a")).context("the cleanup")?;
        check(&mut held).context("after the cleanup")
    })?;
    println!("{} new connections, {} held connections", asked.len(), held.len());
    ensure!(shares(&asked).len() == 2, "{:?} answered", shares(&asked));
    Ok(())
}
