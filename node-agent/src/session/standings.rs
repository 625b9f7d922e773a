//! Asks the other replicas for their standing (contract, 15).

use std::{sync::Arc, time::Duration};

use headgate_proto::v1::{self, discovery_client::DiscoveryClient};
use tokio::{task::JoinSet, time::timeout};
use tonic::Code;
use tracing::debug;

use super::{failover::Standing, replicas::Target, tls::AgentTls};

/// How long a replica may take to answer, connecting included.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What the agent of `node` asks these replicas.
pub(super) struct StandingsQuery {
    pub(super) node: Arc<str>,
    pub(super) tls: Option<Arc<AgentTls>>,
    pub(super) replicas: Vec<Target>,
    /// Of the replica that the agent follows: one that answers with the same epoch is that replica,
    /// at another address.
    pub(super) epoch: Option<u64>,
}

/// Replicas that answered, and how they stand.
pub(super) type Standings = Vec<(Target, Standing)>;

impl StandingsQuery {
    /// The replicas that answered, and what they said. All are asked at once.
    pub(super) async fn ask(self) -> Standings {
        let Self { node, tls, replicas, epoch } = self;
        let mut asked = JoinSet::new();
        for target in replicas {
            let (node, tls) = (Arc::clone(&node), tls.clone());
            asked.spawn(async move {
                let answer = timeout(ANSWER_TIMEOUT, ask_one(&target, &node, tls.as_ref())).await;
                (target, answer.unwrap_or_else(|_| Err(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs()))))
            });
        }
        let mut answers = Vec::new();
        for (target, answer) in asked.join_all().await {
            match answer {
                Ok((theirs, _)) if theirs.is_some() && theirs == epoch => {}
                Ok((_, standing)) => answers.push((target, standing)),
                Err(error) => debug!(replica = %target, error, "another replica does not say how it stands"),
            }
        }
        answers
    }
}

/// A replica's epoch and standing. One that is older than the question has neither.
async fn ask_one(target: &Target, node: &str, tls: Option<&Arc<AgentTls>>) -> Result<(Option<u64>, Standing), String> {
    let connection = target.control_plane.connect(target.address, tls).await.map_err(|error| error.to_string())?;
    let request = v1::StandingRequest { node_name: node.to_owned() };
    match DiscoveryClient::new(connection.channel).standing(request).await {
        Ok(answer) => {
            let answer = answer.into_inner();
            Ok((Some(answer.epoch), Standing::of(&answer)))
        }
        Err(status) if status.code() == Code::Unimplemented => Ok((None, Standing::default())),
        Err(status) => Err(status.message().to_owned()),
    }
}
