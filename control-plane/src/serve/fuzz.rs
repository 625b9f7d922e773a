//! Runs streams of agents without connections, for fuzzing.

use std::sync::Arc;

use headgate_proto::v1::{self, agent_message::Body};
use prost::Message as _;
use tokio::time::Instant;

use super::{
    context::{Settings, Signal},
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
