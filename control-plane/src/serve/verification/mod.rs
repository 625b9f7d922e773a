//! Verifies the state of nodes on behalf of `Inspect.VerifyNodes` (discovery.proto, section 19).
//!
//! The agent of a node reads its kernel and sends digests. `comparison.rs` compares them with the
//! store, off the runtime's threads. This file asks, and asks again while the state moves.

mod comparison;

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use headgate_listener::blocking;
use headgate_proto::v1::{self, node_answer, node_query};
use prost::Message as _;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};
use tonic::{Code, Status};

use self::comparison::Comparison;
use super::fleet::Fleet;

/// The maximum number of nodes that a replica verifies at the same time. Other queries about nodes
/// have room beside them.
const MAX_NODES: usize = 8;

/// The maximum number of comparisons that run at the same time. A comparison computes the
/// forwarding table of a node.
const MAX_COMPARISONS: usize = 1;

/// How often a node is asked at most, because the state moves, or to see whether a repair worked.
const MAX_ATTEMPTS: usize = 5;

/// The pause between two attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(500);

/// How long the verification of an agent may take.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// The pause before an agent is asked again whether its verification has ended.
const POLL_PAUSE: Duration = Duration::from_millis(200);

/// Verifies nodes.
pub(crate) struct Verifier {
    fleet: Arc<Fleet>,
    nodes: Semaphore,
    comparisons: Semaphore,
}

impl Verifier {
    /// Creates the verifier of a replica.
    pub(crate) fn new(fleet: Arc<Fleet>) -> Arc<Self> {
        Arc::new(Self { fleet, nodes: Semaphore::new(MAX_NODES), comparisons: Semaphore::new(MAX_COMPARISONS) })
    }

    /// Verifies all nodes that have a stream to this replica. Dropping the result ends the work.
    pub(crate) fn all(self: &Arc<Self>) -> impl Stream<Item = v1::VerifyNodesResponse> + use<> {
        let verifier = Arc::clone(self);
        let nodes: Vec<Arc<str>> = self.fleet.all().iter().map(|agent| Arc::clone(&agent.node)).collect();
        let verifications = stream::iter(nodes).map(move |node| {
            let verifier = Arc::clone(&verifier);
            async move {
                let verification = verifier.node(&node).await.unwrap_or_else(|status| {
                    let mut comparison = Comparison::new(&node);
                    comparison.fail(status.message());
                    verifier.finish(&node, comparison)
                });
                v1::VerifyNodesResponse { verification: Some(verification), ..v1::VerifyNodesResponse::default() }
            }
        });
        verifications.buffer_unordered(MAX_NODES)
    }

    /// Verifies a node. A result `unverified` names the reason if the node cannot be verified.
    ///
    /// # Errors
    ///
    /// `NOT_FOUND` if the node has no stream to this replica, and `UNAVAILABLE` if the replica
    /// stops. Retry in both cases, with another replica too.
    pub(crate) async fn node(&self, node: &str) -> Result<v1::NodeVerification, Status> {
        let _permit = self.nodes.acquire().await.map_err(closed)?;
        let mut comparison = Comparison::new(node);
        match self.attempts(&mut comparison).await {
            // The node has, or had, its stream elsewhere, and nothing is known about it.
            Err(status) if status.code() == Code::NotFound && !comparison.has_answer() => Err(status),
            ended => {
                if let Err(status) = ended {
                    comparison.fail(status.message());
                }
                Ok(self.finish(node, comparison))
            }
        }
    }

    /// Compares answers of a node until everything is equal, or [`MAX_ATTEMPTS`] are over.
    async fn attempts(&self, comparison: &mut Comparison) -> Result<(), Status> {
        let node = comparison.node().to_owned();
        for attempt in 0..MAX_ATTEMPTS {
            if attempt > 0 {
                sleep(ATTEMPT_PAUSE).await;
            }
            let answer = self.answer(&node, v1::VerifyQuery::default()).await?;
            let run = answer.run;
            self.compare(comparison, answer, Comparison::take).await?;
            let buckets = comparison.suspects();
            if !buckets.is_empty() {
                let answer = self.answer(&node, v1::VerifyQuery { run, buckets }).await?;
                self.compare(comparison, answer, Comparison::describe).await?;
            }
            if let Some(agent) = self.fleet.find(&node).filter(|_| !comparison.differing().is_empty()) {
                agent.send_again(comparison.differing());
            }
            if comparison.is_settled() {
                break;
            }
        }
        Ok(())
    }

    /// Returns the result of a comparison, counts it, logs differences, and records what it proves.
    fn finish(&self, node: &str, comparison: Comparison) -> v1::NodeVerification {
        let agent = self.fleet.find(node);
        let mut verification = v1::NodeVerification {
            node: node.to_owned(),
            replica: self.fleet.context.settings.replica_name.clone(),
            backend: agent.as_ref().map(|agent| agent.record().backend.clone()).unwrap_or_default(),
            ..comparison.finish()
        };
        let has_drift = verification.drift_count > 0 || !verification.drift.is_empty();
        let result = match (has_drift, verification.unverified.is_empty()) {
            (true, _) => "drift",
            (false, false) => "unverified",
            (false, true) => "verified",
        };
        result.clone_into(&mut verification.result);
        if verification.shadow.is_some() {
            return verification;
        }
        self.fleet.context.metrics.verifications.of([result]).inc();
        if let Some(v1::Drift { service, difference }) = verification.drift.first() {
            let drift_count = verification.drift_count;
            tracing::warn!(%node, drift_count, service, difference, "a node differs from what it should have");
        }
        // A verification that proves nothing must not hide an earlier difference.
        if result != "unverified"
            && let Some(agent) = agent
        {
            agent.update(|record| record.verified_on_request(&verification));
        }
        verification
    }

    /// Runs a step of a comparison on a thread that may block.
    async fn compare(
        &self,
        comparison: &mut Comparison,
        answer: v1::Verification,
        step: impl FnOnce(&mut Comparison, &comparison::ReplicaState, &v1::Verification) + Send + 'static,
    ) -> Result<(), Status> {
        let _permit = self.comparisons.acquire().await.map_err(closed)?;
        let rejections = self.fleet.find(comparison.node()).map(|agent| Arc::clone(&agent.record().rejections));
        let known = comparison::ReplicaState {
            store: Arc::clone(&self.fleet.context.store),
            rejections: rejections.unwrap_or_default(),
        };
        let mut taken = std::mem::replace(comparison, Comparison::new(comparison.node()));
        let compared = blocking(move || {
            step(&mut taken, &known, &answer);
            taken
        });
        *comparison = compared.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(())
    }

    /// Asks an agent until its verification has ended.
    async fn answer(&self, node: &str, mut query: v1::VerifyQuery) -> Result<v1::Verification, Status> {
        let deadline = Instant::now() + RUN_TIMEOUT;
        loop {
            let kind = Some(node_query::Kind::Verify(query.clone()));
            match self.fleet.ask(node, v1::NodeQuery { kind }) {
                Ok(asked) => {
                    let answer = joined(asked).await?;
                    if !answer.is_running {
                        return Ok(answer);
                    }
                    query.run = answer.run;
                }
                // Other clients ask too many queries at the moment.
                Err(status) if status.code() == Code::ResourceExhausted && Instant::now() < deadline => {}
                Err(status) => return Err(status),
            }
            if Instant::now() >= deadline {
                return Err(Status::deadline_exceeded(format!(
                    "the verification of node {node} has not ended within {} s: look at the load of the node, and at the log of its agent",
                    RUN_TIMEOUT.as_secs()
                )));
            }
            sleep(POLL_PAUSE).await;
        }
    }
}

/// Joins the parts of an answer.
async fn joined(mut asked: super::fleet::Asked) -> Result<v1::Verification, Status> {
    let mut answer = v1::Verification::default();
    while let Some(part) = asked.next().await {
        let Some(node_answer::Kind::Verification(part)) = part?.kind else {
            return Err(Status::internal("the agent answered another query"));
        };
        let malformed = |error: prost::DecodeError| Status::internal(format!("the answer is malformed: {error}"));
        answer.merge(part.encode_to_vec().as_slice()).map_err(malformed)?;
    }
    Ok(answer)
}

fn closed(_: tokio::sync::AcquireError) -> Status {
    Status::unavailable("this replica stops")
}
