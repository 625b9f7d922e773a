//! The drain barrier of the model. The decision is real: what the stores say about the endpoints,
//! and how a round of answers decides. The kernel of the agent's node and the ACKs are lists.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use headgate_control_plane::{
    serve::Round,
    store::{Last, Usage},
};
use headgate_core::{Dirty, ServiceKey, State};
use headgate_node_agent::state::Held;
use headgate_proto::v1;

use super::{replica::Replica, source};

/// A rule of the barrier that the model breaks, to show that the rule is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Every stream counts as an ACK.
    AnyStreamConfirms,
    /// Only the agents of the asking replica count.
    OthersAreNotAsked,
}

pub(crate) struct Barrier {
    pub(crate) broken: Option<Broken>,
    /// What the kernel of the agent's node has.
    kernel: State,
    /// For each replica, the version that the agent has acknowledged on its last stream to the
    /// replica. A replica does not notice at once that a stream has broken. `None` without a
    /// stream, and `Some(None)` before the first ACK.
    pub(crate) acked: Vec<Option<Option<u64>>>,
}

impl Barrier {
    pub(crate) fn new(replicas: usize) -> Self {
        Self { broken: None, kernel: State::default(), acked: vec![None; replicas] }
    }

    /// The kernel accepts what the agent holds. The replica, which has this epoch, receives the ACK
    /// if the state has a version of the replica.
    pub(crate) fn program(&mut self, held: &Held, replica: usize, epoch: u64) {
        self.kernel = State::default();
        for change in source::changes_of(held.state()) {
            self.kernel.apply(change, &mut Dirty::default());
        }
        if let Some((_, version)) = held.position().filter(|(of, _)| *of == epoch) {
            self.acked[replica] = Some(Some(version));
        }
    }

    /// Asks the barrier at each replica about each endpoint that the source removes. If the barrier
    /// opens, asserts that the kernel does not have the endpoint. Returns how often it opened.
    pub(crate) fn check(&self, replicas: &[Replica]) -> u64 {
        let mut opened = 0;
        for (key, address) in source::removed_endpoints() {
            for (asker, replica) in replicas.iter().enumerate().filter(|(_, replica)| replica.is_listed()) {
                let Usage::UnusedSince(..) = replica.store.usage(&key, address) else { continue };
                let is_alone = self.broken == Some(Broken::OthersAreNotAsked);
                let node: Arc<str> = source::NODE.into();
                let mut round = Round::default();
                for (index, peer) in replicas.iter().enumerate().filter(|(index, _)| !is_alone || *index == asker) {
                    let roster = self.acked[index].iter().map(|_| (&node, 1, None));
                    round.add("replica", roster, Some(self.answer(replica, index, peer, &key, address)));
                }
                let nodes = if is_alone { vec![("other".into(), false)] } else { vec![(Arc::clone(&node), true)] };
                let unknown = BTreeMap::from([("replicas".to_owned(), "they are young".to_owned())]);
                if round.verdict(&nodes, unknown).holds() {
                    opened += 1;
                    let has = self.kernel.entry(&key).is_some_and(|entry| entry.endpoints().contains_key(&address));
                    assert!(!has, "the barrier opens for {key} {address}, and the kernel still has the endpoint");
                }
            }
        }
        opened
    }

    /// What a replica answers to another replica.
    fn answer(
        &self,
        asker: &Replica,
        index: usize,
        peer: &Replica,
        key: &ServiceKey,
        address: IpAddr,
    ) -> v1::QuestionAnswer {
        let is_behind = peer.store.behind(&asker.store.changed_positions()).is_some();
        let since = match peer.store.usage(key, address) {
            Usage::UnusedSince(since, Last::No) if peer.is_listed() && !is_behind => Some(since),
            _ => None,
        };
        let mut answer = v1::QuestionAnswer { roster: 1, ..v1::QuestionAnswer::default() };
        if since.is_none() {
            "the endpoint is in use".clone_into(&mut answer.problem);
        }
        if let Some(acked) = self.acked[index] {
            let is_confirmed = since.is_some_and(|since| acked.is_some_and(|acked| acked >= since))
                || self.broken == Some(Broken::AnyStreamConfirms) && since.is_some();
            if !is_confirmed {
                answer.unconfirmed.push(v1::Laggard { node: source::NODE.to_owned(), ..v1::Laggard::default() });
            }
        }
        answer
    }
}
