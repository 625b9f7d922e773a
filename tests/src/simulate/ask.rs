//! Questions to the replicas and agents, and the comparison of each answer with the kernels.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use fastrand::Rng;
use headgate_listener::connector;
use headgate_proto::v1::{self, barrier_answer::Result as Outcome, inspect_client::InspectClient};
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::{
    source::{BAIT, CLUSTER, GATE, LOCAL, NAMESPACE, NODES, Phase, Pod, service_name, size},
    world::{CLIENT, Host, Shared, inspect_address, lock},
};
use crate::apiserver::Kind;

/// How long a question may take until its answer counts as missing.
const LIMIT: Duration = Duration::from_secs(12);
/// How often agents are listed in a row.
const TIMES: u32 = 12;
/// The time that the programs get for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A question about all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Question {
    /// Which nodes are up to date.
    Agents,
    /// When an endpoint is on all nodes.
    Wait,
    /// When an endpoint is on no node.
    WaitGone,
    /// A pod stops, and a reader asks when it may.
    Drain,
    /// A pod stops, and asks its node when it may.
    PodAsks,
    /// A pod that is not ready does not stop.
    DrainUnready,
    /// A pod waits for its readiness gate.
    Gate,
    /// Whether a node's kernel forwards as its replica requires.
    Verify,
}

impl Question {
    /// The questions about endpoints; some of them are more frequent.
    pub const ALL: [Self; 12] = [
        Self::Agents,
        Self::Agents,
        Self::Wait,
        Self::WaitGone,
        Self::Drain,
        Self::Drain,
        Self::Drain,
        Self::PodAsks,
        Self::PodAsks,
        Self::PodAsks,
        Self::DrainUnready,
        Self::Gate,
    ];
}

/// An answer, or why there is none.
type Answer<T> = Result<T, String>;

/// Asks one question.
pub struct Asker {
    /// What all share.
    pub shared: Arc<Shared>,
    /// Decides what the question is about.
    pub rng: Rng,
}

impl Asker {
    /// Asks a question, and compares the answer with the kernels.
    pub async fn ask(mut self, question: Question) {
        let asked = match question {
            Question::Agents => self.agents().await,
            Question::Wait => self.wait().await,
            Question::WaitGone => self.wait_gone().await,
            Question::Drain | Question::PodAsks => self.drain(question).await,
            Question::DrainUnready => self.drain_unready().await,
            Question::Gate => self.gate().await,
            Question::Verify => self.verify().await,
        };
        let outcome = asked.unwrap_or_else(|_| "no answer".into());
        self.shared.open_questions.fetch_sub(1, Ordering::Relaxed);
        *lock(&self.shared.answers).entry(format!("{question:?}: {outcome}")).or_default() += 1;
    }

    async fn pause(&mut self, milliseconds: u64) {
        sleep(Duration::from_millis(self.rng.u64(0..milliseconds))).await;
    }

    async fn client(&self, place: usize) -> Answer<InspectClient<Channel>> {
        let endpoint = Endpoint::from_static("http://replica");
        let connector =
            connector(Host::carrier(&self.shared.network, CLIENT, &self.shared.named), inspect_address(place));
        let connected = timeout(Duration::from_secs(5), endpoint.connect_with_connector(connector)).await;
        let channel = connected.map_err(|_| "no connection".to_owned())?.map_err(|error| error.to_string())?;
        Ok(InspectClient::new(channel))
    }

    /// A client of any replica.
    async fn any_client(&self) -> Answer<InspectClient<Channel>> {
        let running = self.shared.running();
        let place = fastrand::choice(running).ok_or("no replica runs")?;
        self.client(place).await
    }

    /// The resourceVersion of the last EndpointSlice that each replica knows, by name.
    async fn known(&self) -> BTreeMap<String, u64> {
        let mut known = BTreeMap::new();
        for place in self.shared.running() {
            let status = async {
                let mut client = self.client(place).await?;
                client.get_status(v1::GetStatusRequest::default()).await.map_err(|status| status.to_string())
            };
            let Ok(Ok(status)) = timeout(Duration::from_secs(5), status).await else { continue };
            let status = status.into_inner();
            let of_slices =
                |position: &&v1::SourcePosition| position.kind() == v1::source_position::Kind::EndpointSlices;
            if let Some(position) = status.positions.iter().find(of_slices) {
                known.insert(status.replica, position.position);
            }
        }
        known
    }

    /// Asks until all nodes are up to date.
    async fn agents(&mut self) -> Answer<String> {
        let until = Instant::now() + LIMIT;
        loop {
            let known = self.known().await;
            // Changes that a replica has known for less than a second do not count.
            sleep(Duration::from_millis(1200)).await;
            // A state may be wrong only for a moment.
            for time in 1..=TIMES {
                let rows = self.rows().await.unwrap_or_default();
                let good: Vec<&v1::AgentInfo> = rows.iter().filter(|row| row.state == "up_to_date").collect();
                for row in &good {
                    let Some(node) = NODES.iter().position(|node| *node == row.node) else { continue };
                    let Some(version) = known.get(&row.replica).copied() else { continue };
                    if self.shared.is_dark(node) {
                        continue;
                    }
                    if self.shared.is_known_to_fail(node) {
                        self.shared.is_false(&format!("{} is up to date, but its last attempt failed", row.node));
                    }
                    let kernel = self.shared.read(node);
                    let is_rejected = |service| {
                        let name = format!("Service {NAMESPACE}/{}", service_name(service));
                        row.rejections.iter().any(|rejection| rejection.object == name)
                    };
                    // An agent may not know yet what another program did to the bait.
                    let counts = |service| service != BAIT && !is_rejected(service);
                    let difference = self.shared.source().compare(node, &kernel, version, counts);
                    if let Some(difference) = difference {
                        self.shared.is_false(&format!("up to date ({} knew {version}), but {difference}", row.replica));
                    }
                }
                self.pause(200).await;
                if time == TIMES && good.len() == NODES.len() && rows.len() == good.len() {
                    return Ok("up to date".into());
                }
                if Instant::now() > until {
                    return Ok("not up to date".into());
                }
            }
            self.pause(500).await;
        }
    }

    /// Says so if a node is not up to date or not verified, although nothing happens.
    pub async fn all_are_well(self) {
        let rows = self.rows().await;
        let are_good =
            |rows: &Vec<v1::AgentInfo>| rows.len() == NODES.len() && rows.iter().all(|row| row.state == "up_to_date");
        if !rows.as_ref().is_ok_and(are_good) {
            let rows =
                rows.map(|rows| rows.into_iter().map(|row| (row.node, row.state, row.reason)).collect::<Vec<_>>());
            self.shared.is_false(&format!("not all are up to date although nothing happens: {rows:?}"));
        }
        let said = self.verifications("").await;
        let are_verified = said.as_ref().is_ok_and(|(verifications, absent)| {
            let verified = verifications.iter().filter(|one| one.result == "verified" && one.drift.is_empty());
            let nodes: BTreeSet<&str> = verified.map(|one| one.node.as_str()).collect();
            *absent == 0 && verifications.len() == NODES.len() && nodes == NODES.iter().copied().collect()
        });
        if !are_verified {
            self.shared.is_false(&format!("not all are verified although nothing happens: {said:?}"));
        }
        self.shared.open_questions.fetch_sub(1, Ordering::Relaxed);
    }

    async fn rows(&self) -> Answer<Vec<v1::AgentInfo>> {
        let mut client = self.any_client().await?;
        let read = async {
            let mut rows = Vec::new();
            let mut stream = client.list_agents(v1::ListAgentsRequest::default()).await?.into_inner();
            while let Some(info) = stream.message().await? {
                rows.push(info);
            }
            Ok::<_, tonic::Status>(rows)
        };
        let read = timeout(LIMIT, read).await.map_err(|_| "no answer".to_owned())?;
        read.map_err(|status| status.to_string())
    }

    fn pod(&self, pod: usize) -> Pod {
        self.shared.source().pods[pod].clone()
    }

    async fn waited(&self, service: usize, pod: &Pod, gone: bool) -> Answer<bool> {
        let request = v1::WaitRequest {
            namespace: NAMESPACE.into(),
            name: service_name(service),
            endpoint: pod.address.to_string(),
            gone,
            timeout_ms: TIMEOUT.as_millis() as u64,
            allow_absent: false,
        };
        let mut client = self.any_client().await?;
        let read = async {
            let mut stream = client.wait(request).await.map_err(|status| status.to_string())?.into_inner();
            let mut last = None;
            while let Some(answer) = stream.message().await.map_err(|status| status.to_string())? {
                last = Some(answer);
            }
            last.ok_or_else(|| "no answer".to_owned())
        };
        let answer = timeout(LIMIT, read).await.map_err(|_| "no answer".to_owned())??;
        self.shared.tell(format!("wait for {} (gone: {gone}): {answer:?}", pod.address));
        Ok(answer.done && answer.nodes > 0)
    }

    async fn wait(&mut self) -> Answer<String> {
        let (node, service) = (self.rng.usize(0..NODES.len()), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.add(api, node, &[service], Phase::Unready);
            source.hold(pod);
            source.set(api, pod, Phase::Ready);
            pod
        });
        let (asked, shown) = (std::time::Instant::now(), self.pod(pod));
        let waited = self.waited(service, &shown, false).await;
        if waited == Ok(true) {
            self.judge_present("wait: done", &shown, asked);
        }
        self.shared.source().release(pod);
        waited.map(|done| if done { "done" } else { "not done" }.into())
    }

    async fn wait_gone(&mut self) -> Answer<String> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.take(api, choice, &[service]);
            source.set(api, pod, Phase::Gone);
            pod
        });
        let (asked, shown) = (std::time::Instant::now(), self.pod(pod));
        let waited = self.waited(service, &shown, true).await;
        if waited == Ok(true) {
            self.judge_removed("wait for the removal: done", &shown, asked, false);
        }
        waited.map(|done| if done { "done" } else { "not done" }.into())
    }

    /// Asks whether a pod may stop.
    async fn may_stop(&self, question: Question, pod: &Pod, time: Duration) -> Answer<v1::BarrierAnswer> {
        let milliseconds = time.as_millis() as u64;
        if question == Question::PodAsks {
            let barriers = lock(&self.shared.barriers)[pod.node].clone().ok_or("no agent")?;
            let request = v1::BarrierRequest {
                pod_namespace: NAMESPACE.into(),
                pod_name: pod.name.clone(),
                silent_ms: milliseconds,
                ..v1::BarrierRequest::default()
            };
            // The agent may end or freeze meanwhile.
            let asked = barriers.ask(request, Instant::now() + time);
            return timeout(LIMIT, asked).await.map_err(|_| "no answer".to_owned())?;
        }
        let request = v1::DrainPodRequest {
            namespace: NAMESPACE.into(),
            name: pod.name.clone(),
            timeout_ms: milliseconds,
            silent_ms: milliseconds,
            uid: String::new(),
        };
        let mut client = self.any_client().await?;
        let read = async {
            let mut stream = client.drain_pod(request).await.map_err(|status| status.to_string())?.into_inner();
            stream.message().await.map_err(|status| status.to_string())?.ok_or_else(|| "no answer".to_owned())
        };
        timeout(LIMIT, read).await.map_err(|_| "no answer".to_owned())?
    }

    async fn drain(&mut self, question: Question) -> Answer<String> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        // Some pods also belong to the Service with a Local policy.
        let services = if self.rng.u8(0..3) == 0 { vec![service, LOCAL] } else { vec![service] };
        let pod = self.shared.change(|source, api| source.take(api, choice, &services));
        let before = self.pod(pod);
        self.shared.tell(format!("{question:?}: {} of {} stops", before.address, NODES[before.node]));
        self.shared.change(|source, api| source.set(api, pod, Phase::Stopping));
        self.pause(800).await;
        let until = Instant::now() + LIMIT;
        let gone_at = Instant::now() + Duration::from_millis(self.rng.u64(0..4000));
        let mut outcome = "no answer".to_owned();
        while Instant::now() < until {
            let asked = std::time::Instant::now();
            let shared = Arc::clone(&self.shared);
            let asking = self.may_stop(question, &before, TIMEOUT);
            tokio::pin!(asking);
            // The pod disappears while it asks.
            let said = match timeout(gone_at.saturating_duration_since(Instant::now()), &mut asking).await {
                Ok(said) => said,
                Err(_) => {
                    shared.change(|source, api| source.set(api, pod, Phase::Gone));
                    asking.await
                }
            };
            shared.tell(format!("{question:?} {}: {said:?}", before.address));
            match said {
                Ok(answer) => match answer.result() {
                    Outcome::Drained | Outcome::Last => {
                        let is_last = answer.result() == Outcome::Last;
                        outcome = if is_last { "last" } else { "drained" }.into();
                        self.judge_removed(&format!("{question:?}: {outcome}"), &before, asked, is_last);
                        break;
                    }
                    Outcome::Incomplete => {
                        outcome = "incomplete".into();
                        break;
                    }
                    Outcome::Refused => {
                        let is_gone = self.pod(pod).phase == Phase::Gone;
                        if answer.reason.contains("no endpoint belongs") && !is_gone && before.is_known {
                            self.shared.is_false(&format!("{question:?} of {}: {}", before.address, answer.reason));
                        }
                        outcome = "refused".into();
                    }
                },
                Err(_) => outcome = "no answer".into(),
            }
            // The agent or the replica did not answer, or refused.
            sleep(Duration::from_millis(300)).await;
        }
        self.shared.change(|source, api| source.set(api, pod, Phase::Gone));
        Ok(outcome)
    }

    async fn drain_unready(&mut self) -> Answer<String> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.take(api, choice, &[service]);
            source.set(api, pod, Phase::Unready);
            pod
        });
        let shown = self.pod(pod);
        let said = self.may_stop(Question::DrainUnready, &shown, Duration::from_secs(3)).await;
        let outcome = said.as_ref().map_or("no answer", |answer| answer.result().as_str_name());
        if said.as_ref().is_ok_and(|answer| matches!(answer.result(), Outcome::Drained | Outcome::Last)) {
            self.shared.is_false(&format!("drain: {outcome}, but {} is only not ready: {said:?}", shown.address));
        }
        self.shared.change(|source, api| {
            source.set(api, pod, Phase::Ready);
            source.release(pod);
        });
        Ok(outcome.to_lowercase())
    }

    async fn gate(&mut self) -> Answer<String> {
        let (node, service) = (self.rng.usize(0..NODES.len()), self.rng.usize(0..CLUSTER));
        let asked = std::time::Instant::now();
        let pod = self.shared.change(|source, api| {
            let pod = source.add(api, node, &[service], Phase::Gated);
            source.hold(pod);
            pod
        });
        let shown = self.pod(pod);
        let until = Instant::now() + LIMIT;
        let reason = loop {
            let object = self.shared.api.get(Kind::Pod, NAMESPACE, &shown.name).ok_or("the pod is gone")?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.iter().find(|condition| condition["type"] == GATE && condition["status"] == "True");
            if let Some(condition) = found {
                break condition["reason"].as_str().unwrap_or_default().to_owned();
            }
            if Instant::now() > until {
                break "no condition".to_owned();
            }
            sleep(Duration::from_millis(20)).await;
        };
        if reason == "Programmed" {
            self.judge_present("gate: Programmed", &shown, asked);
        }
        self.shared.change(|source, api| {
            source.set(api, pod, Phase::Ready);
            source.release(pod);
        });
        Ok(reason)
    }

    /// The verifications of a node, or of all nodes if `node` is empty, and the number of nodes
    /// that had no agent.
    async fn verifications(&self, node: &str) -> Answer<(Vec<v1::NodeVerification>, u64)> {
        let mut client = self.any_client().await?;
        let read = async {
            let (mut verifications, mut absent) = (Vec::new(), 0);
            let request = v1::VerifyNodesRequest { node: node.into(), only_this_replica: false };
            let mut stream = client.verify_nodes(request).await?.into_inner();
            while let Some(said) = stream.message().await? {
                verifications.extend(said.verification);
                absent += said.absent_count;
            }
            Ok::<_, tonic::Status>((verifications, absent))
        };
        let read = timeout(LIMIT, read).await.map_err(|_| "no answer".to_owned())?;
        read.map_err(|status| status.to_string())
    }

    async fn verify(&mut self) -> Answer<String> {
        let is_usual = self.rng.u8(0..3) > 0;
        let node = if is_usual { self.shared.usual_node } else { self.rng.usize(0..NODES.len()) };
        let (known, dumps) = (self.known().await, self.shared.kernels[node].dumps());
        let said = self.verifications(NODES[node]).await?.0.pop().ok_or("no answer")?;
        self.shared.tell(format!("verify: {said:?}"));
        if said.result == "verified" || said.is_repaired {
            let Some(version) = known.get(&said.replica).copied() else { return Ok("not judged".to_owned()) };
            let dumped = self.shared.dumped_since(node, dumps);
            // For each Service, some dump must be as the replica required before the question.
            // A repair says nothing about Services without drift, which may be unverified.
            let is_said = |service: &usize| {
                let name = format!("{NAMESPACE}/{}", service_name(*service));
                said.result == "verified" || said.drift.iter().any(|drift| drift.service == name)
            };
            let difference = (0..size().services).filter(is_said).find_map(|service| {
                let compare = |dump| self.shared.source().compare(node, dump, version, |compared| compared == service);
                let differences: Option<Vec<String>> = dumped.iter().map(compare).collect();
                differences.map(|mut differences| differences.pop().unwrap_or_else(|| "no kernel was read".into()))
            });
            if let Some(difference) = difference {
                self.shared.is_false(&format!("verified ({} knew {version}), but {difference}", said.replica));
            }
        }
        if said.result == "drift" && !lock(&self.shared.is_tampered)[node] {
            self.shared.is_false(&format!("drift, but the kernel does what the agent writes: {:?}", said.drift));
        }
        Ok(said.result)
    }

    /// Says so if a node that counts does not forward to the pod.
    fn judge_present(&self, claim: &str, pod: &Pod, asked: std::time::Instant) {
        self.judge(claim, pod, asked, |is_found, _| !is_found);
    }

    /// Says so if a node that counts forwards to the pod. If the pod is the `last` endpoint, only
    /// nodes count that have others.
    fn judge_removed(&self, claim: &str, pod: &Pod, asked: std::time::Instant, last: bool) {
        self.judge(claim, pod, asked, |is_found, wanted| is_found && !(last && wanted.is_none()));
    }

    fn judge(&self, claim: &str, pod: &Pod, asked: std::time::Instant, is_wrong: impl Fn(bool, Option<bool>) -> bool) {
        for node in 0..NODES.len() {
            let kernel = self.shared.read(node);
            let differences = {
                let source = self.shared.source();
                if !source.counts(node, asked) || self.shared.is_dark(node) {
                    continue;
                }
                source.differences(claim, pod, node, &kernel, &is_wrong)
            };
            differences.iter().for_each(|difference| self.shared.is_false(difference));
        }
    }
}
