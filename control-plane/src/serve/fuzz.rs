//! Passes the messages of agents and of other replicas to a replica without connections, for
//! fuzzing.

use std::sync::Arc;

use headgate_proto::v1::{self, agent_message::Body};
use prost::Message as _;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::{
    context::{PeerSettings, Settings, Signal},
    everywhere::Link,
    stream::{Session, Streams},
};
use crate::{
    identity::{Identity, Peer},
    metrics::Metrics,
    store::Store,
};

/// In a `Hello`, this epoch is replaced by the store's epoch, which is random.
const OWN_EPOCH: u64 = 1;

/// Passes `messages` to a stream of a replica that serves `store`. After each message, reads
/// everything that the replica sends. Returns how many messages were accepted.
pub fn stream<'a>(store: Arc<Store>, messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let streams = Streams::new(store, Arc::new(Metrics::default()), Settings::default());
    let peer = Peer { address: ([127, 0, 0, 1], 7443).into(), identity: Identity::Unchecked, not_after: None };
    let signal = Arc::new(Signal::new());
    let mut session: Option<Session> = None;
    let mut accepted = 0;
    for bytes in messages {
        let Ok(mut message) = v1::AgentMessage::decode(bytes) else { break };
        if let Some(Body::Hello(v1::Hello { resume: Some(resume), .. })) = &mut message.body
            && resume.epoch == OWN_EPOCH
        {
            resume.epoch = streams.context.store.epoch();
        }
        let now = Instant::now();
        let taken = match &mut session {
            Some(session) => session.take(message, now),
            None => Session::open(&streams, &peer, &message, &signal, now).map(|opened| session = Some(opened)),
        };
        if taken.is_err() {
            break;
        }
        accepted += 1;
        let sends = |session: &mut Session| matches!(session.next(now), Ok(Some(_)));
        while session.as_mut().is_some_and(sends) {}
    }
    accepted
}

/// Passes the messages of another replica to one that serves `store`. A message follows a byte: 0
/// before a roster, and 1 before the answer to a question. `channel` is never used. Returns how
/// many messages were taken in.
pub fn replica<'a>(store: Arc<Store>, channel: &Channel, messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let settings = Settings { peers: Some(PeerSettings::default()), ..Settings::default() };
    let everywhere = Arc::clone(&Streams::new(store, Arc::new(Metrics::default()), settings).everywhere);
    let Some(replicas) = everywhere.replicas() else { return 0 };
    let link = Arc::new(Link::new(([127, 0, 0, 1], 7444).into()));
    let take = |message: &[u8]| match message.split_first()? {
        (0, roster) => replicas.take_roster(&link, v1::Roster::decode(roster).ok()?, channel).ok(),
        (_, answer) => {
            let answer = v1::QuestionAnswer::decode(answer).ok()?;
            let epoch = link.look(|replica| replica.ok().map(|replica| replica.identity.epoch))?;
            let verdict = everywhere.judge(None, &[Arc::clone(&link)], vec![Some((epoch, answer))]);
            let nodes = verdict.unconfirmed.keys().chain(verdict.absent.keys());
            nodes.for_each(|node| drop(everywhere.without_agent(&verdict, node)));
            Some(())
        }
    };
    let taken = messages.into_iter().map_while(take).count();
    replicas.part(&link, false);
    taken
}
