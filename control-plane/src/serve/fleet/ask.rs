//! Queries about nodes, which agents answer on their streams (discovery.proto, section 17).

use std::{sync::Arc, time::Duration};

use headgate_proto::v1;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, timeout_at},
};
use tonic::Status;

use super::{
    Agent, Fleet,
    agent::{AnswerParts, stream_ended},
    progress::clip,
};

pub(super) const MAX_ON_REPLICA: usize = 32;

/// The maximum time until the next part of an answer.
const PART_TIMEOUT: Duration = Duration::from_secs(5);

const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A query that was asked, and the parts of its answer. Dropping this value gives the query up.
#[derive(Debug)]
pub(crate) struct Asked {
    agent: Arc<Agent>,
    id: u64,
    parts: AnswerParts,
    until: Instant,
    is_complete: bool,
    _permit: OwnedSemaphorePermit,
}

impl Fleet {
    /// Returns the status of a query about a node without a stream.
    pub(crate) fn without_stream(&self, node: &str) -> Status {
        let replica = &self.context.settings.replica_name;
        Status::not_found(format!(
            "the agent of node {node:?} has no stream to replica {replica}: ask the other replicas; if the agent has no stream to any of them, look \
             at its log"
        ))
    }

    /// Asks the agent of a node. The status names the node and the remedy; `Inspect.QueryNode`
    /// lists the codes.
    pub(crate) fn ask(&self, node: &str, query: v1::NodeQuery) -> Result<Asked, Status> {
        let replica = &self.context.settings.replica_name;
        let agent = self.find(node).ok_or_else(|| self.without_stream(node))?;
        let permit = Arc::clone(&self.queries).try_acquire_owned().map_err(|_| {
            let text =
                format!("{MAX_ON_REPLICA} queries about nodes already wait at replica {replica}: ask again later");
            Status::resource_exhausted(text)
        })?;
        let (id, parts) = agent.queries.add(node, query)?;
        let until = Instant::now() + ANSWER_TIMEOUT;
        agent.signal.wake();
        Ok(Asked { agent, id, parts, until, is_complete: false, _permit: permit })
    }
}

impl Asked {
    /// Returns the next part of the answer, or `None` after the last part.
    pub(crate) async fn next(&mut self) -> Option<Result<v1::NodeAnswer, Status>> {
        while !self.is_complete {
            match self.receive().await {
                Ok(None) => {}
                Ok(Some(part)) => return Some(Ok(part)),
                Err(status) => {
                    self.is_complete = true;
                    return Some(Err(status));
                }
            }
        }
        None
    }

    /// Receives one message of the answer. The last message may carry no part.
    async fn receive(&mut self) -> Result<Option<v1::NodeAnswer>, Status> {
        let node = &self.agent.node;
        let deadline = self.until.min(Instant::now() + PART_TIMEOUT);
        let Ok(received) = timeout_at(deadline, self.parts.recv()).await else {
            return Err(Status::deadline_exceeded(format!(
                "the agent of node {node} does not answer in time: look at the load and the network of the node, and at the log of the agent"
            )));
        };
        let answer = received.unwrap_or_else(|| Err(stream_ended(node)))?;
        if !answer.error.is_empty() {
            let error = clip(&answer.error);
            return Err(Status::failed_precondition(format!("the agent of node {node} cannot answer: {error}")));
        }
        self.is_complete = answer.is_last;
        Ok(answer.part)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.agent.queries.remove(self.id);
    }
}
