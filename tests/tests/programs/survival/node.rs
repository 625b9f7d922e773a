//! The node under test, and a recorder of the rules that its agent writes.

use std::{
    cell::Cell,
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use headgate_tests::{
    cases::{WriteLog, lifecycle, live},
    testbed::{
        AgentSetup, Backend, Family, Outcome, Request, Testbed, Transport,
        iptables::{self, Variant},
        manifests::Via,
        page,
    },
};

/// The node under test. The connections of its pods and of outside-1 pass this node.
pub(crate) const NODE: &str = "node-a";
/// The longest wait for an expected state. Only a failing test waits this long.
const GUARD: Duration = Duration::from_secs(60);

/// Runs a scenario on machines without programs, with the manifests of
/// [`lifecycle::some_services`].
pub(crate) fn on_machines(backend: Backend, scenario: impl FnOnce(&Testbed) -> Result<()>) {
    let bed = lifecycle::some_services().and_then(|manifests| Testbed::machines_only(backend, manifests));
    // Panic while the testbed still exists, so that the testbed keeps its logs.
    match bed.as_ref().map(scenario) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => panic!("{error:?}"),
        Err(error) => panic!("{error:?}"),
    }
}

/// Clients, and the addresses at which they reach a Service. Only the rules of [`NODE`] forward
/// these connections.
pub(crate) fn targets(bed: &Testbed, service: &str) -> Result<Vec<(&'static str, SocketAddr)>> {
    let mut targets = Vec::new();
    for family in Family::BOTH {
        targets.push(("a3", bed.address(service, Via::ClusterIp, family, "tcp")?));
        targets.push(("outside-1", bed.address(service, Via::NodePort(NODE), family, "tcp")?));
    }
    Ok(targets)
}

/// Checks that exactly the servers in `servers` answer.
pub(crate) fn expect_servers(bed: &Testbed, service: &str, servers: &[&str]) -> Result<()> {
    live::expect_servers_at(bed, &targets(bed, service)?, servers)
}

/// Waits until all clients of a Service get an answer.
pub(crate) fn wait_for_answers(bed: &Testbed, service: &str) -> Result<()> {
    wait_until("the service to be answered", || {
        for (from, to) in targets(bed, service)? {
            let outcome = bed.machines().ask(from, &Request::new(Transport::Tcp, to).expecting_silence())?;
            if !matches!(outcome, Outcome::Answered(_)) {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Runs `work` while clients send requests without a pause. Fails if a request fails.
pub(crate) fn while_asking(bed: &Testbed, service: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    live::while_asking(bed, &targets(bed, service)?, work).map(drop)
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + GUARD;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "no success within {GUARD:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Removes all rules from the node's kernel, as a reboot does.
pub(crate) fn forget_rules(bed: &Testbed) -> Result<()> {
    let (node, lock) = (bed.machines().machine(NODE)?, bed.machines().xtables_lock(NODE));
    for variant in Variant::BOTH {
        for family in Family::BOTH {
            for table in ["nat", "filter", "mangle"] {
                iptables::run(node, variant, family, &lock, &["-t", table, "-F"])?;
                iptables::run(node, variant, family, &lock, &["-t", table, "-X"])?;
            }
        }
    }
    ensure!(!rules(bed)?.contains("KUBE-"), "rules are left after a reboot:\n{}", rules(bed)?);
    Ok(())
}

/// All rules of the node. Chains are sorted by name, and the rules of each chain keep their order.
pub(crate) fn rules(bed: &Testbed) -> Result<String> {
    let saved = iptables::save_all(bed.machines().machine(NODE)?, &bed.machines().xtables_lock(NODE))?;
    let (mut sorted, mut table): (Vec<String>, Vec<&str>) = (Vec::new(), Vec::new());
    for line in saved.lines() {
        let is_border = line.starts_with('*') || line.starts_with("==") || line == "COMMIT";
        if is_border {
            // The sort is stable, so the rules of one chain keep their order.
            table.sort_by_key(|line| (line.split(' ').take(2).collect::<Vec<_>>().join(" "), 0));
            sorted.extend(table.drain(..).map(str::to_owned));
            sorted.push(line.to_owned());
        } else {
            table.push(line);
        }
    }
    Ok(sorted.join("\n"))
}

/// A dump of all rules of the node, as `iptables-save` writes it.
pub(crate) struct Dump(Vec<(Variant, Family, String)>);

impl Dump {
    /// Saves the rules.
    pub(crate) fn save(bed: &Testbed) -> Result<Self> {
        let (node, lock) = (bed.machines().machine(NODE)?, bed.machines().xtables_lock(NODE));
        let all = Variant::BOTH.into_iter().flat_map(|variant| Family::BOTH.map(|family| (variant, family)));
        let saved = all.map(|(variant, family)| Ok((variant, family, iptables::save(node, variant, family, &lock)?)));
        saved.collect::<Result<_>>().map(Self)
    }

    /// Replaces the rules of the node by the saved ones.
    pub(crate) fn restore(&self, bed: &Testbed) -> Result<()> {
        forget_rules(bed)?;
        let (node, lock) = (bed.machines().machine(NODE)?, bed.machines().xtables_lock(NODE));
        let script = bed.machines().folder().join("dump");
        for (variant, family, dump) in &self.0 {
            fs::write(&script, dump).context("writing the dump")?;
            iptables::restore(node, *variant, *family, &lock, &script)?;
        }
        Ok(())
    }
}

/// The log of the agent on the node.
pub(crate) fn agent_log(bed: &Testbed) -> Result<String> {
    fs::read_to_string(bed.machines().folder().join(format!("agent-{NODE}.log"))).context("reading the agent's log")
}

/// The file with the last good state.
pub(crate) fn state_file(bed: &Testbed) -> PathBuf {
    bed.machines().folder().join(format!("state-{NODE}")).join("state")
}

/// The agent's metrics, as Prometheus reads them.
pub(crate) fn metrics(bed: &Testbed) -> Result<String> {
    page::of_agent(bed.machines().machine(NODE)?, "/metrics")
}

/// Records what the agent writes.
pub(crate) struct Writes {
    log: WriteLog,
    /// The length of the scripts that [`Self::take_input`] has returned.
    taken: Cell<usize>,
}

impl Writes {
    pub(crate) fn watch(bed: &Testbed) -> Result<Self> {
        Ok(Self { log: WriteLog::create(bed.machines().folder())?, taken: Cell::new(0) })
    }

    /// The setup for an agent that uses the wrapped programs.
    pub(crate) fn setup(&self) -> AgentSetup {
        AgentSetup { tools: Some(self.log.tools.clone()), ..AgentSetup::default() }
    }

    /// The number of writes so far.
    pub(crate) fn count(&self) -> Result<usize> {
        self.log.count()
    }

    /// The input of all writes since the last call.
    pub(crate) fn take_input(&self) -> Result<String> {
        let scripts = self.log.scripts()?;
        let from = self.taken.replace(scripts.len());
        Ok(scripts[from..].to_owned())
    }
}
