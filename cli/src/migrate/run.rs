//! `headgatectl migrate run`: moves nodes in batches from kube-proxy to Headgate, and back. The
//! labels of nodes and the affinity of kube-proxy's DaemonSet are the whole state of a move.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

use headgate_proto::v1::{
    AgentInfo, ProbeQuery, VerifyNodesRequest, node_answer::Kind as Part, node_query::Kind as Query,
};
use headgate_settings::{ProxyMode, migration};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::plan;
use crate::answer::{Failure, Session};
use crate::args::{Args, Output, PauseOn, RunArgs};
use crate::cluster::Cluster;
use crate::render::{Style, plain, thousands};
use crate::units::{self, milliseconds};
use crate::{agents, node};

/// The pause between two looks at the nodes of a batch.
const PAUSE: Duration = Duration::from_secs(1);
/// How often each node is asked to probe, before and after its move.
const PROBES: usize = 3;
/// The Service that every cluster has.
const API: &str = "default/kubernetes";

/// The answers and the probes of each Service.
type Answers = BTreeMap<String, (u32, u32)>;
type Rows = BTreeMap<String, AgentInfo>;

struct Move<'a> {
    session: Session<'a>,
    cluster: Cluster,
    wanted: &'a RunArgs,
    /// The paths of kube-proxy's DaemonSet and of its pods, and their labels.
    proxy: String,
    pods: String,
    labels: String,
    /// True if agents run only on moved nodes.
    agents_follow_labels: bool,
    /// Nodes at which an earlier run stopped.
    unconfirmed: BTreeSet<String>,
}

pub(crate) async fn run(args: &Args, wanted: &RunArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    if args.output == Output::Json {
        return Err(Failure::Usage("migrate run prints a line for each node, and no JSON".to_owned()));
    }
    let Some((namespace, name)) = wanted.kube_proxy.split_once('/') else {
        return Err(Failure::Usage("--kube-proxy: write NAMESPACE/NAME".to_owned()));
    };
    let proxy = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}");
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let cluster = Cluster::open(&wanted.cluster).await?;
    let nodes = selected(&cluster, wanted).await?;
    let daemon_set = cluster.get(&proxy).await?;
    let others = if daemon_set.is_none() { cluster.list(&pods, "", "").await? } else { Vec::new() };
    let by_hand = plan::by_hand(daemon_set.as_ref(), &nodes, &others);
    let daemon_set = daemon_set.filter(|_| by_hand.is_none() || wanted.unmanaged);
    if let (None, Some(text)) = (&daemon_set, by_hand) {
        writeln!(out, "{text}")?;
    }
    let session = cluster.session(args, &wanted.cluster, style, out).await?;
    let names: Vec<String> = nodes.iter().map(|node| name_of(node).to_owned()).collect();
    let Some(daemon_set) = daemon_set else { return moved_by_hand(session, wanted, &names).await };
    let labels = daemon_set["spec"]["selector"]["matchLabels"].as_object().into_iter().flatten();
    let labels = labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
    let labels = labels.collect::<Vec<_>>().join(",");
    let mut run = Move {
        session,
        cluster,
        wanted,
        proxy,
        pods,
        labels,
        agents_follow_labels: false,
        unconfirmed: BTreeSet::new(),
    };
    run.check_agents().await?;
    let moved: BTreeSet<&str> = nodes.iter().filter(|node| plan::is_moved(node)).map(name_of).collect();
    run.all(&names, &moved, &daemon_set).await
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The Linux nodes to move, in order of name.
async fn selected(cluster: &Cluster, wanted: &RunArgs) -> Result<Vec<Value>, Failure> {
    let mut nodes = cluster.list("/api/v1/nodes", &wanted.selector, "").await?;
    nodes.retain(|node| {
        let os = &node["metadata"]["labels"]["kubernetes.io/os"];
        (os.is_null() || os == "linux")
            && (wanted.nodes.is_empty() || wanted.nodes.iter().any(|name| name == name_of(node)))
    });
    let missing = wanted.nodes.iter().find(|name| !nodes.iter().any(|node| name_of(node) == *name));
    match missing {
        Some(name) => Err(Failure::NotFound(format!("no Linux node {name}: `kubectl get nodes` lists the nodes"))),
        None if nodes.is_empty() => Err(Failure::NotFound("no Linux node is selected".to_owned())),
        None => Ok(nodes),
    }
}

/// Says how far a person has come who moves the nodes.
async fn moved_by_hand(mut session: Session<'_>, wanted: &RunArgs, names: &[String]) -> Result<(), Failure> {
    let rows = rows(&mut session).await?;
    let is_done = |name: &&String| is_settled(rows.get(*name), wanted.back, false).is_ok();
    let (done, all) = (names.iter().filter(is_done).count(), names.len());
    let text = format!("{} of {} nodes {}", thousands(done as u64), thousands(all as u64), ends(wanted.back));
    match done == all {
        true => session.write(&format!("{text}\n")),
        false => Err(Failure::ByHand(format!("{text}. Go on by hand, and run this command to look again"))),
    }
}

/// How the nodes are at the end.
const fn ends(back: bool) -> &'static str {
    if back { "are back at kube-proxy" } else { "run Headgate" }
}

async fn rows(session: &mut Session<'_>) -> Result<Rows, Failure> {
    Ok(agents::list(session, "").await?.into_iter().map(|row| (row.node.clone(), row)).collect())
}

/// Whether the agent of a node has taken over, or has yielded; otherwise what is missing.
fn is_settled(row: Option<&AgentInfo>, back: bool, without_agent: bool) -> Result<(), String> {
    let state = row.map_or("no_agent", |row| row.state.as_str());
    if state == if back { "standby" } else { "up_to_date" } || (back && without_agent && state == "no_agent") {
        return Ok(());
    }
    let reason = row.map(|row| if row.last_error.is_empty() { &row.reason } else { &row.last_error });
    let reason = reason.filter(|reason| !reason.is_empty()).map(|reason| format!(": {}", plain(reason)));
    let what = match state {
        "no_agent" => "it has no agent".to_owned(),
        state => format!("its agent is {}", state.replace('_', " ")),
    };
    Err(what + &reason.unwrap_or_default())
}

/// Why kube-proxy cannot start beside the rules of this backend without a pause for connections.
fn unfit(mode: Option<ProxyMode>, backend: &str) -> Option<&'static str> {
    match mode? {
        ProxyMode::Iptables | ProxyMode::Auto if backend.starts_with("ipvs") => Some(
            "the agents run mode ipvs: let them change to mode nftables first, and wait until `headgatectl agents` reports no connections of mode ipvs",
        ),
        ProxyMode::Nftables if backend.contains("iptables") || backend.starts_with("ipvs") => Some(
            "kube-proxy in mode nftables removes the rules of iptables and ipvs when it starts: let the agents change to mode nftables first",
        ),
        _ => None,
    }
}

impl Move<'_> {
    /// Agents that never take over would stop the move at its first node.
    async fn check_agents(&mut self) -> Result<(), Failure> {
        let namespace = &self.wanted.cluster.install_namespace;
        let path = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/headgate-node-agent");
        let pod = self.cluster.get(&path).await?.map(|mut found| found["spec"]["template"]["spec"].take());
        let pod = pod.unwrap_or_default();
        self.agents_follow_labels = !pod["nodeSelector"][plan::MOVED].is_null();
        let args = pod["containers"][0]["args"].as_array();
        if !self.wanted.back && args.is_some_and(|args| args.iter().any(|arg| arg == "--standby=always")) {
            return Err(Failure::Faulty(
                "the agents never take over (--standby=always): install them with the value mode=run, or without the component `standby`, first".to_owned(),
            ));
        }
        Ok(())
    }

    /// Moves all nodes that are not moved yet, or not confirmed.
    async fn all(&mut self, names: &[String], moved: &BTreeSet<&str>, daemon_set: &Value) -> Result<(), Failure> {
        let (back, began) = (self.wanted.back, Instant::now());
        let again = match back || self.wanted.dry_run {
            true => BTreeSet::new(),
            false => self.prepare(daemon_set).await?,
        };
        let rows = rows(&mut self.session).await?;
        let is_labelled = |name: &String| moved.contains(name.as_str()) != back && !again.contains(name);
        let pending = |wanted: bool| names.iter().filter(move |name| is_labelled(name) == wanted).cloned();
        for name in pending(true).collect::<Vec<_>>() {
            let is_settled = is_settled(rows.get(&name), back, self.agents_follow_labels).is_ok();
            let is_verified = back || rows.get(&name).is_some_and(|row| row.verified_unix_ms > 0);
            // Nobody knows whether it was verified and answered when an earlier run stopped.
            if !is_settled
                || !is_verified
                || !back && !self.probes(&name).await.is_ok_and(|after| compared(None, &after).is_ok())
            {
                self.unconfirmed.insert(name);
            }
        }
        let pending: Vec<String> = self.unconfirmed.iter().cloned().chain(pending(false)).collect();
        let size = self.wanted.batch.size(names.len());
        if self.wanted.dry_run {
            return self.describe(&pending, size, daemon_set);
        }
        if back {
            self.prepare_back(&rows, &pending).await?;
        }
        let (mut done, all) = (names.len() - pending.len(), names.len());
        for batch in pending.chunks(size) {
            self.batch(batch).await?;
            done += batch.len();
            self.session.write(&format!("{done} of {all} nodes {}\n", ends(back)))?;
            self.session.out.flush()?;
        }
        if self.wanted.nodes.is_empty() && self.wanted.selector.is_empty() {
            self.finish().await?;
        }
        let took = units::duration(milliseconds(began.elapsed()));
        let hint = match (back, self.agents_follow_labels) {
            (false, _) => "headgatectl migrate run --back goes back",
            (true, false) => "the agents stand by",
            (true, true) => "headgatectl cleanup --all --wait removes what the agents have left",
        };
        self.session.write(&format!("Done after {took}: all {all} nodes {}. {hint}.\n", ends(back)))
    }

    fn describe(&mut self, pending: &[String], size: usize, daemon_set: &Value) -> Result<(), Failure> {
        let changes = match (self.wanted.back, plan::avoids(daemon_set), plan::is_stopped(daemon_set)) {
            (false, false, _) => "kube-proxy's DaemonSet gets an affinity, and replaces its pods once\n",
            (true, _, true) => "all nodes get the label, and kube-proxy's DaemonSet loses its node selector\n",
            _ => "",
        };
        let mut text = changes.to_owned();
        for (number, batch) in pending.chunks(size).enumerate() {
            text += &format!("batch {}: {}\n", number + 1, plain(&batch.join(" ")));
        }
        self.session.write(&format!("{text}{} nodes to move. Nothing was changed.\n", pending.len()))
    }

    async fn label(&self, node: &str, is_moved: bool) -> Result<(), Failure> {
        self.cluster.patch(&format!("/api/v1/nodes/{node}"), &plan::labelled(is_moved)).await
    }

    /// Changes kube-proxy's DaemonSet as it is now.
    async fn change_proxy(&self, change: impl Fn(&Value) -> Option<Value>) -> Result<(), Failure> {
        match self.cluster.get(&self.proxy).await?.as_ref().and_then(change) {
            Some(patch) => self.cluster.patch(&self.proxy, &patch).await,
            None => Ok(()),
        }
    }

    /// Keeps kube-proxy away from moved nodes. If somebody has undone this, as `kubeadm upgrade`
    /// does, kube-proxy is back on moved nodes: these lose the label first, and move again in
    /// batches, because kube-proxy would leave all of them at the same time.
    /// Returns these nodes.
    async fn prepare(&mut self, daemon_set: &Value) -> Result<BTreeSet<String>, Failure> {
        let mut again = BTreeSet::new();
        if plan::avoids(daemon_set) {
            return Ok(again);
        }
        if !plan::is_stopped(daemon_set) {
            // Also nodes that are not selected.
            let labelled = self.cluster.list("/api/v1/nodes", plan::MOVED, "").await?;
            for node in labelled.iter().map(name_of) {
                if self.proxy_on(node).await?.is_some() {
                    self.label(node, false).await?;
                    self.session.write(&format!("{node}  kube-proxy has come back: the node has to move again\n"))?;
                    again.insert(node.to_owned());
                }
            }
        }
        self.change_proxy(|daemon_set| Some(plan::avoiding(daemon_set, true))).await?;
        Ok(again)
    }

    /// Lets the labels decide where kube-proxy runs, and not a node selector.
    async fn prepare_back(&mut self, rows: &Rows, pending: &[String]) -> Result<(), Failure> {
        let namespace = self.wanted.kube_proxy.split('/').next().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/kube-proxy");
        let configuration = self.cluster.get(&path).await?;
        let text = configuration.as_ref().and_then(|map| map["data"]["config.conf"].as_str());
        let mode = text.map(|text| migration::check_file("kube-proxy", text)).transpose()?.and_then(|of| of.mode);
        let programming = pending.iter().filter_map(|name| rows.get(name)).filter(|row| row.state != "standby");
        if let Some(reason) = programming.into_iter().find_map(|row| unfit(mode, &row.backend)) {
            return Err(Failure::Faulty(reason.to_owned()));
        }
        if self.cluster.get(&self.proxy).await?.is_some_and(|daemon_set| plan::is_stopped(&daemon_set)) {
            for node in self.cluster.list("/api/v1/nodes", "kubernetes.io/os=linux", "").await? {
                if !plan::is_moved(&node) {
                    self.label(name_of(&node), true).await?;
                }
            }
            self.change_proxy(|of| (!plan::avoids(of)).then(|| plan::avoiding(of, true))).await?;
            self.change_proxy(|of| Some(plan::stopping(of, false))).await?;
        }
        Ok(())
    }

    /// After the whole cluster has moved: kube-proxy is stopped also for nodes that join later, or
    /// its DaemonSet is as it was before the move.
    async fn finish(&mut self) -> Result<(), Failure> {
        if self.wanted.back {
            return self.change_proxy(|of| plan::avoids(of).then(|| plan::avoiding(of, false))).await;
        }
        self.change_proxy(|of| (!plan::is_stopped(of)).then(|| plan::stopping(of, true))).await?;
        self.session.write("kube-proxy is stopped also on nodes that join later\n")
    }

    async fn batch(&mut self, names: &[String]) -> Result<(), Failure> {
        let (back, mut before) = (self.wanted.back, BTreeMap::new());
        let fleet = rows(&mut self.session).await?;
        self.pause(&fleet, names)?;
        for node in names.iter().filter(|node| !self.unconfirmed.contains(*node)).cloned().collect::<Vec<_>>() {
            match self.probes(&node).await {
                Ok(answers) => drop(before.insert(node, answers)),
                Err(Failure::NotFound(_)) if self.agents_follow_labels => {}
                Err(failure) => return Err(self.doubt(&node, &failure.to_string())),
            }
        }
        let began = Instant::now();
        for node in names {
            self.label(node, !back).await?;
        }
        let settled = self.settle(names, began).await?;
        for node in names {
            let mut line = format!("{node}  {}", if back { "back at kube-proxy" } else { "up to date" });
            if !back {
                let services = self.verified(node).await.map_err(|reason| self.doubt(node, &reason))?;
                line += &format!(" and verified ({} Services)", thousands(services));
            }
            line += &format!(" after {}", units::duration(milliseconds(settled[node])));
            // Without an agent, nobody can probe from the node.
            if !(back && self.agents_follow_labels) {
                let after = self.probes(node).await.map_err(|failure| self.doubt(node, &failure.to_string()))?;
                line += &compared(before.get(node), &after).map_err(|reason| self.doubt(node, &reason))?;
            }
            self.session.write(&(line + "\n"))?;
        }
        let fleet = rows(&mut self.session).await?;
        self.pause(&fleet, &[])
    }

    /// Fails if a node other than `except` is in a state that stops the move.
    fn pause(&self, rows: &Rows, except: &[String]) -> Result<(), Failure> {
        let stops = |on| self.wanted.pause_on.contains(&on);
        for row in rows.values().filter(|row| !except.contains(&row.node)) {
            if stops(PauseOn::Drift) && row.drift_count > 0 {
                return Err(self.doubt(&row.node, "its last verification found differences"));
            }
            if stops(PauseOn::Failing) && row.state == "failing" {
                let Err(reason) = is_settled(Some(row), false, false) else { continue };
                return Err(self.doubt(&row.node, &reason));
            }
        }
        Ok(())
    }

    /// Waits until each node has settled. Returns how long each took.
    async fn settle(&mut self, names: &[String], began: Instant) -> Result<BTreeMap<String, Duration>, Failure> {
        let (back, mut settled) = (self.wanted.back, BTreeMap::new());
        loop {
            let fleet = rows(&mut self.session).await?;
            self.pause(&fleet, names)?;
            let mut missing = None;
            for node in names {
                if settled.contains_key(node) {
                    continue;
                }
                let state = is_settled(fleet.get(node), back, self.agents_follow_labels);
                let state = match state {
                    Ok(()) => match (back, self.proxy_on(node).await?) {
                        (false, None) | (true, Some(true)) => Ok(()),
                        (false, Some(_)) => Err("kube-proxy still runs there".to_owned()),
                        (true, _) => Err("kube-proxy is not ready there".to_owned()),
                    },
                    missing => missing,
                };
                match state {
                    Ok(()) => {
                        settled.insert(node.clone(), began.elapsed());
                    }
                    Err(reason) => missing = missing.or(Some((node, reason))),
                }
            }
            match missing {
                None => return Ok(settled),
                Some((node, reason)) if began.elapsed() > self.wanted.timeout => {
                    let waited = units::duration(milliseconds(self.wanted.timeout));
                    return Err(self.doubt(node, &format!("{reason}, after {waited}")));
                }
                Some(_) => sleep(PAUSE).await,
            }
        }
    }

    /// Whether the pod of kube-proxy on a node is ready; `None` if there is none.
    async fn proxy_on(&self, node: &str) -> Result<Option<bool>, Failure> {
        let pods = self.cluster.list(&self.pods, &self.labels, &format!("spec.nodeName={node}")).await?;
        let is_ready = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array();
            pod["metadata"]["deletionTimestamp"].is_null()
                && conditions.into_iter().flatten().any(|of| of["type"] == "Ready" && of["status"] == "True")
        };
        Ok(pods.first().map(|_| pods.iter().any(is_ready)))
    }

    /// How often each Service answers a node.
    async fn probes(&mut self, node: &str) -> Result<Answers, Failure> {
        let mut answers = Answers::new();
        for _ in 0..PROBES {
            let parts = node::ask(&mut self.session, node, Query::Probe(ProbeQuery {})).await?;
            let probes =
                parts.into_iter().filter_map(|part| if let Part::Probes(all) = part { Some(all) } else { None });
            for probe in probes.flat_map(|all| all.probes) {
                let (answered, asked) = answers.entry(probe.service).or_default();
                *answered += u32::from(probe.error.is_empty());
                *asked += 1;
            }
        }
        Ok(answers)
    }

    /// Verifies a node, and returns the number of its Services.
    async fn verified(&mut self, node: &str) -> Result<u64, String> {
        let request = VerifyNodesRequest { node: node.to_owned(), only_this_replica: false };
        let answer = self.session.replica.client.verify_nodes(request).await;
        let answers = self.session.collect(answer).await.map_err(|failure| failure.to_string())?;
        let found = answers.into_iter().find_map(|answer| answer.verification).unwrap_or_default();
        if found.result == "verified" {
            return Ok(found.services);
        }
        let drift = found.drift.first().map(|drift| format!("{} {}", drift.service, drift.difference));
        let reason = drift.or_else(|| found.unverified.first().cloned()).unwrap_or_default();
        Err(format!("its verification ended with \"{}\": {}", found.result, reason.trim()))
    }

    /// Why the move stops, and what to do.
    fn doubt(&self, node: &str, reason: &str) -> Failure {
        let (flag, other) = if self.wanted.back { (" --back", "") } else { ("", " --back") };
        Failure::TimedOut(format!(
            "stopped at {node}: {}\n  the state of the node: headgatectl node {node}, and headgatectl verify {node}\n  \
             to go on when the cause is gone: headgatectl migrate run{flag}\n  \
             to undo the move of this node: headgatectl migrate run{other} --nodes {node}",
            plain(reason)
        ))
    }
}

/// The answers in words, or which Service answers less often than before. Without answers from
/// before, all probes must be answered.
fn compared(before: Option<&Answers>, after: &Answers) -> Result<String, String> {
    if !after.contains_key(API) {
        return Err(format!("its agent does not know the Service {API}, so nothing can be probed"));
    }
    let all = before.into_iter().flat_map(Answers::keys).chain(after.keys());
    for service in all {
        let (answered, asked) = after.get(service).copied().unwrap_or_default();
        let wanted = before.and_then(|before| before.get(service)).map_or(asked, |(answered, _)| *answered);
        if answered < wanted.max(1) {
            return Err(format!("{service} answered {answered} of {asked} probes, and {wanted} are needed as before"));
        }
    }
    let all = after.iter().map(|(service, (answered, asked))| format!("; {service} {answered}/{asked}"));
    Ok(all.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(list: &[(&str, u32, u32)]) -> Answers {
        list.iter().map(|(service, answered, asked)| ((*service).to_owned(), (*answered, *asked))).collect()
    }

    #[test]
    fn fewer_answers_than_before_stop_the_move() {
        let before = answers(&[(API, 3, 3), ("kube-system/kube-dns", 4, 6)]);
        let same = compared(Some(&before), &before);
        assert_eq!(same, Ok("; default/kubernetes 3/3; kube-system/kube-dns 4/6".to_owned()));
        let fewer = answers(&[(API, 3, 3), ("kube-system/kube-dns", 3, 6)]);
        assert!(compared(Some(&before), &fewer).is_err() && compared(None, &fewer).is_err());
        assert!(compared(Some(&before), &answers(&[(API, 3, 3)])).is_err(), "the cluster DNS is not probed any more");
        assert!(compared(None, &Answers::new()).is_err(), "nothing was probed");
        assert!(compared(None, &answers(&[(API, 3, 3)])).is_ok());
    }

    #[test]
    fn modes_that_lose_connections_on_the_way_back_are_refused() {
        for (mode, backend, is_fit) in [
            (Some(ProxyMode::Auto), "ipvs", false),
            (Some(ProxyMode::Iptables), "nftables", true),
            (Some(ProxyMode::Nftables), "iptables-nft", false),
            (Some(ProxyMode::Nftables), "userspace over iptables", false),
            (Some(ProxyMode::Nftables), "nftables", true),
            (Some(ProxyMode::Ipvs), "ipvs", true),
            (None, "ipvs", true),
        ] {
            assert_eq!(unfit(mode, backend).is_none(), is_fit, "{mode:?} {backend}");
        }
    }
}
