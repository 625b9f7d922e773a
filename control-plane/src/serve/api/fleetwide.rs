//! The parts of `Inspect` that ask all replicas (discovery.proto, sections 16 and 18).

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use futures::{
    StreamExt as _,
    future::join_all,
    stream::{self, BoxStream},
};
use headgate_core::node_state::NodeState;
use headgate_proto::v1::{self, inspect_client::InspectClient};
use tonic::{Status, transport::Channel};

use super::inspect::Inspector;
use crate::{
    model::Problem,
    serve::{
        context::milliseconds,
        everywhere::Link,
        fleet::OF_AGENTS,
        overview::{self, Told},
    },
};

/// The maximum number of absent Nodes in an answer.
const MAX_NAMED: usize = 16_384;

/// The maximum number of versions of agents in an answer.
const MAX_VERSIONS: usize = 64;

fn to_wire(versions: BTreeMap<String, u64>) -> Vec<v1::AgentVersion> {
    let version = |(version, agents)| v1::AgentVersion { version, agents };
    versions.into_iter().take(MAX_VERSIONS).map(version).collect()
}

impl Inspector {
    /// The agents that have a stream to this replica; with a name, only this node.
    pub(super) fn agents_here(&self, node: &str) -> Vec<v1::AgentInfo> {
        let agents = self.fleet.all().into_iter().filter(|agent| node.is_empty() || *agent.node == *node);
        agents.map(|agent| agent.info(&self.fleet.context)).collect()
    }

    /// All nodes that count, in order of name; with a name, only this node.
    pub(super) async fn agents(&self, node: &str) -> Vec<v1::AgentInfo> {
        let links = self.everywhere.links();
        let ask = |link: Arc<Link>| async move {
            let request = v1::ListAgentsRequest { node: node.to_owned(), only_this_replica: true };
            let mut items = link.inspect()?.list_agents(request).await.ok()?.into_inner();
            let mut agents = Vec::new();
            while let Some(agent) = items.message().await.ok()? {
                agents.push(agent);
            }
            Some(agents)
        };
        let others = join_all(links.into_iter().map(ask)).await;
        let mut listed: BTreeMap<String, Vec<v1::AgentInfo>> = BTreeMap::new();
        for agent in others.into_iter().flatten().flatten().chain(self.agents_here(node)) {
            listed.entry(agent.node.clone()).or_default().push(agent);
        }
        // The look comes last, so that a node which has moved meanwhile is not called absent.
        let verdict = self.everywhere.look();
        let rest = verdict.absent.keys().chain(verdict.unconfirmed.keys());
        for name in rest.filter(|name| node.is_empty() || *name == node) {
            listed.entry(name.clone()).or_default();
        }
        let choose = |(node, rows): (String, Vec<v1::AgentInfo>)| {
            overview::choose(rows.iter(), || self.everywhere.without_agent(&verdict, &node)).map(Cow::into_owned)
        };
        listed.into_iter().filter_map(choose).collect()
    }

    /// What all other replicas say about themselves, with their last changes if that is wanted.
    pub(super) async fn others(&self, with_changes: bool) -> Vec<(Instant, v1::GetStatusResponse)> {
        let last_changes = if with_changes { u32::MAX } else { 0 };
        let ask = |link: Arc<Link>| async move {
            let request = v1::GetStatusRequest { only_this_replica: true, last_changes };
            let status = link.inspect()?.get_status(request).await.ok()?.into_inner();
            Some((Instant::now(), status))
        };
        join_all(self.everywhere.links().into_iter().map(ask)).await.into_iter().flatten().collect()
    }

    /// The last changes, as all replicas know them.
    pub(super) fn changes_everywhere(
        &self,
        limit: usize,
        others: &[(Instant, v1::GetStatusResponse)],
        all: u64,
    ) -> Vec<v1::ChangeTime> {
        if limit == 0 {
            return Vec::new();
        }
        let told = |info: v1::ReplicaInfo| {
            let mut told = Told::default();
            // A replica that does not answer tells nothing, so the changes are running.
            if let Some((at, status)) = others.iter().find(|(_, status)| status.epoch == info.epoch) {
                let changes = status.fleet.iter().flat_map(|fleet| fleet.last_changes.iter().rev());
                changes.for_each(|change| told.add(change.clone(), *at));
            }
            (info.replica, told)
        };
        let infos = self.everywhere.replica_infos().into_iter();
        let told: Vec<(String, Told)> =
            infos.filter(|info| info.state == "joined" && info.agents > 0).map(told).collect();
        let told: Vec<(&str, &Told)> = told.iter().map(|(replica, told)| (replica.as_str(), told)).collect();
        self.overview.changes_everywhere(limit, &told, all)
    }

    /// The replicas that this replica knows, with what they say about themselves.
    pub(super) fn replica_infos(&self, others: Vec<(Instant, v1::GetStatusResponse)>) -> Vec<v1::ReplicaInfo> {
        let mut infos = self.everywhere.replica_infos();
        for (_, status) in others {
            if let Some(info) = infos.iter_mut().find(|info| info.epoch == status.epoch) {
                info.build = status.build;
                info.source_state = status.source_state;
                info.source_age_ms = status.source_age_ms;
                info.certificate_not_after_unix_ms = status.certificate_not_after_unix_ms;
                info.balance_limit = status.balance_limit;
                info.positions = status.positions;
            }
        }
        infos
    }

    /// The number of nodes in each state, and problems of nodes at other replicas. `others` have
    /// what the other replicas say; `None`: only of this replica.
    pub(super) fn fleet_info(
        &self,
        others: Option<&[(Instant, v1::GetStatusResponse)]>,
    ) -> (v1::FleetInfo, Vec<Problem>) {
        let (mut all, mut problems) = (self.fleet_here(), Vec::new());
        let Some(others) = others else { return (all, problems) };
        let mut versions: BTreeMap<String, u64> = BTreeMap::new();
        let mut count = |counted: &[v1::AgentVersion]| {
            counted.iter().for_each(|counted| *versions.entry(counted.version.clone()).or_default() += counted.agents);
        };
        count(&all.agent_versions);
        for (_, status) in others {
            let is_of_node = |problem: &v1::Problem| problem.object.starts_with("Node ") || problem.origin == OF_AGENTS;
            let of_nodes = status.problems.iter().filter(|problem| is_of_node(problem)).cloned();
            let read = |v1::Problem { object, field, message, origin }| Problem { object, field, message, origin };
            problems.extend(of_nodes.map(read));
            let fleet = status.fleet.clone().unwrap_or_default();
            count(&fleet.agent_versions);
            all.drifting += fleet.drifting;
            all.up_to_date += fleet.up_to_date;
            all.behind += fleet.behind;
            all.failing += fleet.failing;
            all.waiting += fleet.waiting;
            all.cut_off += fleet.cut_off;
            all.standby += fleet.standby;
            // Each replica measures only its own agents, so the longest time counts.
            all.measured_commits = all.measured_commits.max(fleet.measured_commits);
            all.everywhere_p50_ms = all.everywhere_p50_ms.max(fleet.everywhere_p50_ms);
            all.everywhere_p99_ms = all.everywhere_p99_ms.max(fleet.everywhere_p99_ms);
            all.everywhere_max_ms = all.everywhere_max_ms.max(fleet.everywhere_max_ms);
        }
        all.agent_versions = to_wire(versions);
        let verdict = self.everywhere.look();
        all.no_agent = verdict.absent.len() as u64;
        // The agents of a replica that does not answer are not known to be up to date.
        let listed = all.up_to_date + all.behind + all.failing + all.waiting + all.cut_off + all.standby;
        all.waiting += (verdict.unconfirmed.len() as u64).saturating_sub(listed);
        all.nodes = all.no_agent + listed.max(verdict.unconfirmed.len() as u64);
        (all, problems)
    }

    fn fleet_here(&self) -> v1::FleetInfo {
        let (states, recent) = (self.fleet.progress().states(), self.fleet.progress().recent());
        let mut versions: BTreeMap<String, u64> = BTreeMap::new();
        for agent in self.fleet.all() {
            *versions.entry(agent.agent_version.clone()).or_default() += 1;
        }
        let count = |state| states.get(&state).copied().unwrap_or_default() as u64;
        v1::FleetInfo {
            up_to_date: count(NodeState::UpToDate),
            behind: count(NodeState::Behind),
            failing: count(NodeState::Failing),
            waiting: count(NodeState::Waiting),
            cut_off: count(NodeState::CutOff),
            standby: count(NodeState::Standby),
            measured_commits: recent.commits as u64,
            everywhere_p50_ms: milliseconds(recent.p50),
            everywhere_p99_ms: milliseconds(recent.p99),
            everywhere_max_ms: milliseconds(recent.max),
            no_agent: 0,
            nodes: self.fleet.len() as u64,
            last_changes: Vec::new(),
            agent_versions: to_wire(versions),
            drifting: self.fleet.progress().drifting() as u64,
        }
    }

    /// The client of the replica that has the stream of a node; `None` if this replica has it, and
    /// `NOT_FOUND` if no replica has one.
    pub(super) fn elsewhere(&self, node: &str) -> Result<Option<InspectClient<Channel>>, Status> {
        if self.fleet.find(node).is_some() {
            return Ok(None);
        }
        let has = |link: &Arc<Link>| {
            link.look(|replica| replica.is_ok_and(|replica| matches!(replica.nodes.get(node), Some((_, None)))))
        };
        let client = self.everywhere.links().iter().find(|link| has(link)).and_then(|link| link.inspect());
        client.map(Some).ok_or_else(|| {
            let reason = match self.everywhere.look().absent.get(node) {
                Some(absence) => self.everywhere.absent_agent(node, *absence).reason,
                None => "no Node and no agent of this name is known: check the name".to_owned(),
            };
            let text = format!("node {node:?} has no stream to any replica: {reason}; look at the log of its agent");
            Status::not_found(text)
        })
    }

    /// Verifies all nodes of all replicas.
    pub(super) async fn verify_all(&self) -> BoxStream<'static, v1::VerifyNodesResponse> {
        let verdict = self.everywhere.look();
        let absent = verdict.absent.iter().map(|(node, absence)| self.everywhere.absent_agent(node, *absence));
        let absent: Vec<v1::Laggard> = absent.collect();
        // The agents that no answer has named yet, with their replicas.
        let missing: BTreeMap<String, String> =
            verdict.unconfirmed.into_iter().map(|(node, laggard)| (node, laggard.replica)).collect();
        let missing = Arc::new(Mutex::new(missing));
        let ask = |link: Arc<Link>| async move {
            let request = v1::VerifyNodesRequest { node: String::new(), only_this_replica: true };
            let items = link.inspect()?.verify_nodes(request).await.ok()?.into_inner();
            Some(items.filter_map(async |item| item.ok().filter(|item| item.verification.is_some())).boxed())
        };
        let here = self.verifier.all().filter(|item| std::future::ready(item.verification.is_some())).boxed();
        let others = join_all(self.everywhere.links().into_iter().map(ask)).await.into_iter().flatten();
        let absent_count = absent.len() as u64;
        let absent = absent.into_iter().take(MAX_NAMED).collect();
        let last = v1::VerifyNodesResponse { verification: None, absent, absent_count };
        let named = Arc::clone(&missing);
        let all = stream::select_all(others.chain([here])).inspect(move |item| {
            let node = item.verification.as_ref().map(|verification| &verification.node);
            node.and_then(|node| named.lock().unwrap_or_else(PoisonError::into_inner).remove(node));
        });
        // A replica may not answer, or its answer may break off.
        let silent = stream::once(async move {
            let missing = std::mem::take(&mut *missing.lock().unwrap_or_else(PoisonError::into_inner));
            stream::iter(missing.into_iter().map(|(node, replica)| {
                let unverified = vec![format!("replica {replica} has not verified the node: ask again")];
                let (result, others) = ("unverified".to_owned(), v1::NodeVerification::default());
                let verification = Some(v1::NodeVerification { node, replica, result, unverified, ..others });
                v1::VerifyNodesResponse { verification, ..v1::VerifyNodesResponse::default() }
            }))
        });
        all.chain(silent.flatten()).chain(stream::once(std::future::ready(last))).boxed()
    }
}
