//! Asks other replicas for their standing: the state and the positions of their sources (rule 15 of
//! the contract in `proto/headgate/v1/discovery.proto`).

use std::{sync::Arc, time::Duration};

use headgate_proto::v1::{
    self, agent_message::Body as Asked, discovery_client::DiscoveryClient, server_message::Body as Answered,
};
use tokio::{task::JoinSet, time::timeout};
use tracing::debug;

use super::{failover::Standing, replicas::Replica, tls::AgentTls};

/// Maximum time for an answer, including the time to connect.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The replicas that answered, with their standings.
pub(super) type Standings = Vec<(Replica, Standing)>;

/// Asks all replicas at the same time, for the agent of `node`, and returns the answers. Replicas
/// that do not answer in time are left out. So is a replica that answers with `epoch`, the epoch of
/// the replica that the agent follows: it is the same replica at another address.
pub(super) async fn ask(
    node: Arc<str>,
    tls: Option<Arc<AgentTls>>,
    replicas: Vec<Replica>,
    epoch: Option<u64>,
) -> Standings {
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
            Ok((theirs, _)) if Some(theirs) == epoch => {}
            Ok((_, standing)) => answers.push((target, standing)),
            Err(error) => debug!(replica = %target, error, "another replica did not report its standing"),
        }
    }
    answers
}

/// Asks one replica for its epoch and standing.
async fn ask_one(target: &Replica, node: &str, tls: Option<&Arc<AgentTls>>) -> Result<(u64, Standing), String> {
    let connection = target.control_plane.connect(target.address, tls).await.map_err(|error| error.to_string())?;
    let request = Asked::Standing(v1::StandingRequest { node_name: node.to_owned() });
    let request = tokio_stream::once(v1::AgentMessage { body: Some(request) });
    let answer = async { DiscoveryClient::new(connection.channel).sync(request).await?.into_inner().message().await };
    match answer.await.map_err(|status| status.message().to_owned())?.and_then(|message| message.body) {
        Some(Answered::Standing(answer)) => Ok((answer.epoch, Standing::of(&answer))),
        _ => Err("the answer is not a standing".to_owned()),
    }
}
