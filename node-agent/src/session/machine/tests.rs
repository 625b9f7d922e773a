#![allow(clippy::unwrap_used)]
use headgate_core::{Dirty, Endpoint, digest::service_bucket, reference};
use headgate_proto::{ChangesBuilder, References};
use proptest::prelude::*;

use super::*;
use crate::{
    state::Held,
    testing::{Replica, batch, chunk, end, endpoint, key, message, no_endpoint, service, service_cidr},
};

/// An agent that uses neither a network nor a kernel.
struct Agent {
    machine: Machine,
    held: Held,
    nacks: Vec<v1::Nack>,
}

impl Agent {
    fn new() -> Self {
        Self { machine: Machine::new("node-1".into()), held: Held::default(), nacks: Vec::new() }
    }

    fn hello(&mut self) -> Option<v1::Resume> {
        self.machine.begin(self.held.position());
        self.held.resume()
    }

    fn receive(&mut self, message: v1::ServerMessage) -> Result<(), Violation> {
        for effect in self.machine.on_message(message)? {
            if let Effect::Apply(step) = effect {
                self.held.apply(step, &mut Dirty::default());
            }
        }
        self.nacks.extend(self.machine.rejections.pop());
        if self.machine.needs_referable() {
            self.machine.refer_to(Referable::of(self.held.state()));
        }
        Ok(())
    }

    /// Receives the first `cut` messages of a stream, and loses the rest. Returns their number.
    fn follow(&mut self, replica: &Replica, cut: usize) -> usize {
        let resume = self.hello();
        let messages = replica.stream(resume.as_ref());
        let count = messages.len();
        for message in messages.into_iter().take(cut) {
            self.receive(message).unwrap();
        }
        count
    }

    /// An agent that has received the whole state of a replica.
    fn following(replica: &Replica) -> Self {
        let mut agent = Self::new();
        agent.follow(replica, usize::MAX);
        agent
    }

    /// Asserts that the agent holds the current state of a replica.
    fn assert_holds(&self, replica: &Replica) {
        assert_eq!(self.held.position(), Some((replica.epoch, replica.version())));
        assert_eq!(self.held.state().digests(), replica.state.digests());
        assert_eq!(self.held.state().endpoint_count(), replica.state.endpoint_count());
    }
}

fn replica(epoch: u64) -> Replica {
    let mut replica = Replica::new(epoch, 2);
    let web = [service("web", 80), endpoint("web", 1, 8080), endpoint("web", 2, 8080), endpoint("web", 3, 8080)];
    replica.commit(web.to_vec());
    replica.commit(vec![service("db", 5432), endpoint("db", 9, 5432), service_cidr("kubernetes", 0)]);
    replica
}

#[test]
fn an_interrupted_snapshot_changes_nothing() {
    let first = replica(7);
    // The first snapshot.
    let mut agent = Agent::new();
    agent.follow(&first, first.stream(None).len() - 1);
    assert!(agent.held.resume().is_none() && agent.held.state().service_count() == 0);
    let mut agent = Agent::following(&first);
    let mut second = Replica::new(8, 1);
    second.commit(vec![service("other", 1), endpoint("other", 1, 1), endpoint("other", 2, 1)]);
    let digests = agent.held.resume();
    agent.follow(&second, second.stream(digests.as_ref()).len() - 1);
    agent.assert_holds(&first);
    // The next stream does not use the resources that were staged on the broken stream.
    agent.follow(&second, usize::MAX);
    agent.assert_holds(&second);
}

#[test]
fn a_resume_by_digests_replaces_only_the_buckets_that_differ() {
    let first = replica(7);
    let mut agent = Agent::following(&first);
    let mut second = replica(8);
    let removal = Change::RemoveServiceCidr("kubernetes".into());
    second.commit(vec![no_endpoint("web", 2), endpoint("web", 1, 9090), removal]);
    let resume = agent.hello();
    let mut dirty = Dirty::default();
    for message in second.stream(resume.as_ref()) {
        for effect in agent.machine.on_message(message).unwrap() {
            if let Effect::Apply(step) = effect {
                assert_eq!(step.snapshot.as_ref().unwrap().buckets.len(), 2);
                agent.held.apply(step, &mut dirty);
            }
        }
    }
    agent.assert_holds(&second);
    let services: Vec<String> = dirty.services.iter().map(ToString::to_string).collect();
    assert_eq!(services, ["prod/web"], "the unchanged service is not dirty");
    assert!(dirty.service_cidrs);
}

#[test]
fn a_snapshot_of_buckets_in_mid_stream_replaces_only_these_buckets() {
    let mut replica = replica(7);
    let mut agent = Agent::following(&replica);
    replica.commit(vec![Change::RemoveService(key("db")), no_endpoint("db", 9)]);
    agent.receive(end(3, vec![service_bucket(&key("db")).into()], 0)).unwrap();
    agent.assert_holds(&replica);
    replica.commit(vec![endpoint("web", 5, 8080)]);
    replica.batches_after(3).into_iter().for_each(|message| agent.receive(message).unwrap());
    agent.assert_holds(&replica);
}

#[test]
fn a_split_batch_takes_effect_with_its_last_part() {
    let mut agent = Agent::following(&replica(7));
    agent.receive(batch(2, 2, &[service("new", 1)])).unwrap();
    // A message of an unknown kind is ignored.
    agent.receive(v1::ServerMessage { body: None }).unwrap();
    agent.receive(batch(2, 2, &[endpoint("new", 1, 1)])).unwrap();
    assert_eq!(agent.held.position(), Some((7, 2)));
    assert!(agent.held.state().entry(&key("new")).is_none());
    agent.receive(batch(2, 3, &[endpoint("new", 2, 1)])).unwrap();
    assert_eq!(agent.held.position(), Some((7, 3)));
    assert_eq!(agent.held.state().entry(&key("new")).unwrap().endpoints().len(), 2);
}

fn other(sentence: &str) -> Violation {
    Violation::Other(sentence.to_owned())
}

#[test]
fn a_lost_batch_is_a_violation() {
    let mut agent = Agent::following(&replica(7));
    assert_eq!(agent.receive(batch(3, 4, &[])), Err(Violation::VersionGap { previous: 3, held: 2 }));
    assert_eq!(agent.receive(batch(1, 2, &[])), Err(Violation::VersionGap { previous: 1, held: 2 }));
    assert_eq!(agent.receive(batch(2, 1, &[])), Err(other("version 1 was sent after version 2 of the same epoch")));
    assert_eq!(agent.held.position(), Some((7, 2)));
}

#[test]
fn incomplete_or_malformed_snapshots_are_violations() {
    let replica = replica(7);
    let started = |agent: &mut Agent| {
        let _ = agent.hello();
        agent.receive(replica.welcome(ResumeMode::Full)).unwrap();
        agent.receive(chunk(&[service("a", 1), endpoint("a", 1, 1)])).unwrap();
    };
    let violation_of = |last: v1::ServerMessage| {
        let mut agent = Agent::new();
        started(&mut agent);
        let violation = agent.receive(last).unwrap_err();
        assert!(agent.held.position().is_none());
        violation
    };
    let bucket = service_bucket(&key("a"));
    let wrong = |bucket| other(&format!("SnapshotEnd names bucket {bucket}, which is out of order or out of range"));
    assert_eq!(violation_of(end(1, vec![], 3)), other("SnapshotEnd counts 3 resources, but 2 arrived"));
    assert_eq!(violation_of(end(1, vec![1024], 2)), wrong(1024));
    assert_eq!(violation_of(end(1, vec![5, 5], 2)), wrong(5));
    assert_eq!(violation_of(end(1, vec![6, 5], 2)), wrong(5));
    let foreign = violation_of(end(1, vec![u32::from(bucket ^ 1)], 2)).to_string();
    assert!(foreign.ends_with(&format!(" of bucket {bucket}, which SnapshotEnd does not name")), "{foreign}");
    assert_eq!(violation_of(chunk(&[no_endpoint("a", 1)])), other("a snapshot contains removals"));
    assert_eq!(violation_of(chunk(&[Change::RemoveService(key("a"))])), other("a snapshot contains removals"));
    assert_eq!(violation_of(chunk(&[Change::RemoveServiceCidr("c".into())])), other("a snapshot contains removals"));
    assert_eq!(violation_of(batch(0, 1, &[])), other(BATCH_IN_SNAPSHOT));
}

#[test]
fn batches_and_snapshots_may_not_interleave() {
    let mut agent = Agent::following(&replica(7));
    agent.receive(chunk(&[service("a", 1)])).unwrap();
    assert_eq!(agent.receive(batch(2, 3, &[])), Err(other(BATCH_IN_SNAPSHOT)));
    let mut agent = Agent::following(&replica(7));
    agent.receive(batch(2, 2, &[service("a", 1)])).unwrap();
    assert_eq!(agent.receive(chunk(&[])), Err(other(SNAPSHOT_IN_BATCH)));
    assert_eq!(agent.receive(end(3, vec![], 0)), Err(other(SNAPSHOT_IN_BATCH)));
}

#[test]
fn welcome_must_arrive_first_and_only_once_and_must_match_hello() {
    let replica = replica(7);
    let violation_of = |held: bool, welcome: v1::ServerMessage| {
        let mut agent = if held { Agent::following(&replica) } else { Agent::new() };
        let _ = agent.hello();
        agent.receive(welcome).err()
    };
    assert_eq!(violation_of(true, batch(2, 3, &[])), Some(other(BEFORE_WELCOME)));
    assert_eq!(violation_of(true, message(Body::Heartbeat(v1::Heartbeat::default()))), Some(other(BEFORE_WELCOME)));
    let does_not_fit =
        |held, welcome| violation_of(held, welcome).unwrap().to_string().starts_with("Welcome does not match Hello: ");
    assert!(does_not_fit(false, replica.welcome(ResumeMode::Log)));
    assert!(does_not_fit(false, replica.welcome(ResumeMode::Digests)));
    assert!(does_not_fit(true, Replica::new(8, 1).welcome(ResumeMode::Log)));
    assert!(does_not_fit(true, Replica::new(0, 1).welcome(ResumeMode::Full)));
    assert!(does_not_fit(true, replica.welcome(ResumeMode::Unspecified)));
    assert_eq!(violation_of(true, replica.welcome(ResumeMode::Log)), None);
    assert_eq!(violation_of(true, replica.welcome(ResumeMode::Digests)), None);
    assert_eq!(violation_of(true, replica.welcome(ResumeMode::Full)), None);
    let mut agent = Agent::following(&replica);
    assert_eq!(agent.receive(replica.welcome(ResumeMode::Log)), Err(other("a second Welcome arrived")));
}

#[test]
fn a_rejected_change_is_reported_and_leaves_the_old_value() {
    let mut replica = replica(7);
    let mut agent = Agent::following(&replica);
    let mut message = batch(2, 3, &[service("web", 81), endpoint("web", 1, 9090), endpoint("web", 9, 9090)]);
    let Some(Body::Batch(wire)) = &mut message.body else { unreachable!() };
    wire.changes.as_mut().unwrap().services[0].ports[0].port = 70_000;
    agent.receive(message).unwrap();
    assert_eq!(agent.held.position(), Some((7, 3)));
    let nack = agent.nacks.pop().unwrap();
    assert_eq!((nack.version, nack.rejections.len()), (3, 1));
    assert_eq!(nack.rejections[0].resource, "Service prod/web");
    assert_eq!(nack.rejections[0].field, "ports[0].port");
    let entry = agent.held.state().entry(&key("web")).unwrap();
    assert_eq!(entry.service().unwrap().ports[0].port, 80, "the last good value stays");
    assert_eq!(entry.endpoints().len(), 4, "the rest of the batch is applied");
    // The digests show that the agent does not hold the new value.
    replica.commit(vec![service("web", 81), endpoint("web", 1, 9090), endpoint("web", 9, 9090)]);
    let differing = replica.state.digests().differing(agent.held.state().digests());
    assert_eq!(differing, [service_bucket(&key("web"))]);

    // The next stream does not send the resource again, so the agent repeats the rejection. The
    // agent withdraws the rejection with the next usable value.
    let _ = agent.hello();
    agent.receive(Replica::new(7, 1).welcome(ResumeMode::Log)).unwrap();
    assert_eq!(agent.nacks.pop().unwrap().rejections, nack.rejections);
    agent.receive(batch(3, 4, &[service("web", 82)])).unwrap();
    let nack = agent.nacks.pop().unwrap();
    assert_eq!((nack.version, nack.rejections.len(), nack.withdrawn), (4, 0, vec!["Service prod/web".to_owned()]));
}

#[test]
fn an_unusable_resource_of_a_snapshot_keeps_its_last_good_value() {
    let mut agent = Agent::following(&replica(7));
    let changes = [service("web", 80), endpoint("web", 1, 8080), endpoint("web", 2, 8080)];
    let mut bad = chunk(&changes);
    let Some(Body::SnapshotChunk(wire)) = &mut bad.body else { unreachable!() };
    let wire = wire.changes.as_mut().unwrap();
    wire.services[0].cluster_ips[0] = vec![1, 2, 3].into();
    wire.endpoints[0].changed[1].placement = 99;
    let _ = agent.hello();
    agent.receive(replica(8).welcome(ResumeMode::Digests)).unwrap();
    agent.receive(bad).unwrap();
    agent.receive(end(1, vec![service_bucket(&key("web")).into()], 3)).unwrap();
    let resources: Vec<_> = agent.nacks[0].rejections.iter().map(|rejection| rejection.resource.as_str()).collect();
    assert_eq!(resources, ["Endpoint prod/web 10.1.0.2", "Service prod/web"]);
    let entry = agent.held.state().entry(&key("web")).unwrap();
    assert!(entry.service().is_some());
    let addresses: Vec<String> = entry.endpoints().keys().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.1.0.1", "10.1.0.2"], "the snapshot did not contain the third address, so it is removed");
}

/// A batch that uses references to give a new endpoint the service and placement of `like`.
fn referring(version: u64, like: &Change) -> v1::ServerMessage {
    let Change::Endpoint(key, like) = like else { unreachable!() };
    let moved = Endpoint { address: [10, 1, 0, 77].into(), ..like.clone() };
    let references =
        References { service: Some(reference::service(key)), placement: Some(reference::placement(&like.placement)) };
    let mut builder = ChangesBuilder::default();
    builder.push(&Change::Endpoint(key.clone(), moved), 0, references);
    message(Body::Batch(v1::Batch { version, changes: Some(builder.finish()), ..Default::default() }))
}

#[test]
fn references_resolve_to_resources_that_the_agent_holds() {
    let mut replica = replica(1);
    let mut agent = Agent::following(&replica);
    replica.commit(vec![service("new", 80), endpoint("new", 9, 7777)]);
    replica.batches_after(replica.version() - 1).into_iter().for_each(|batch| agent.receive(batch).unwrap());
    agent.receive(referring(replica.version() + 1, &endpoint("new", 9, 7777))).unwrap();
    let entry = agent.held.state().entry(&key("new")).unwrap();
    let Change::Endpoint(_, like) = endpoint("new", 9, 7777) else { unreachable!() };
    let moved = Endpoint { address: [10, 1, 0, 77].into(), ..like };
    assert_eq!(entry.endpoints().get(&moved.address), Some(&moved));
    // References also work after a resume by log, because they resolve to the held state.
    agent.hello();
    agent.receive(replica.welcome(ResumeMode::Log)).unwrap();
    agent.receive(referring(replica.version() + 2, &endpoint("new", 9, 7777))).unwrap();
    assert_eq!(agent.held.position(), Some((1, replica.version() + 2)));
}

#[test]
fn an_unknown_reference_is_a_violation_and_changes_nothing() {
    let replica = replica(1);
    let mut agent = Agent::following(&replica);
    let other = endpoint("elsewhere", 9, 7777);
    let violation = agent.receive(referring(replica.version() + 1, &other)).unwrap_err();
    assert!(matches!(violation, Violation::Reference(_)), "{violation}");
    assert!(violation.to_string().contains("is missing in this agent's state; resuming by digests"), "{violation}");
    agent.assert_holds(&replica);
}

#[test]
fn a_batch_may_refer_to_rejected_resources() {
    let replica = replica(1);
    let mut agent = Agent::following(&replica);
    let version = replica.version();
    let mut message = batch(version, version + 1, &[service("bad", 80), endpoint("bad", 9, 7777)]);
    let Some(Body::Batch(wire)) = &mut message.body else { unreachable!() };
    wire.changes.as_mut().unwrap().services[0].ports[0].protocol = 99;
    wire.changes.as_mut().unwrap().endpoints[0].changed[0].conditions = 1 << 7;
    agent.receive(message).unwrap();
    assert_eq!(agent.nacks[0].rejections.len(), 2);
    let other = endpoint("bad", 9, 7777);
    agent.receive(referring(version + 2, &other)).unwrap();
    // This snapshot removes all resources. References to the rejected resources still resolve.
    agent.receive(end(version + 2, vec![], 0)).unwrap();
    agent.receive(referring(version + 3, &other)).unwrap();
}

#[test]
fn only_a_usable_node_with_the_agents_name_is_accepted() {
    let mut agent = Agent::following(&replica(7));
    let own = |name: &str, addresses: Vec<prost::bytes::Bytes>| {
        let node = v1::Node { name: name.into(), addresses, ..Default::default() };
        let position = Some(v1::SourcePosition { kind: v1::source_position::Kind::Nodes.into(), position: 20 });
        message(Body::OwnNode(v1::OwnNode { revision: 4, node: Some(node), position, ..v1::OwnNode::default() }))
    };
    let effect = |agent: &mut Agent, message| agent.machine.on_message(message).unwrap().pop().unwrap();
    let good = effect(&mut agent, own("node-1", vec![vec![10, 0, 0, 1].into()]));
    let Effect::Node(OwnNode { revision: 4, node: Some(node), position: Some(position), .. }) = good else {
        panic!("{good:?}")
    };
    assert_eq!((node.addresses.len(), position.position), (1, 20));
    let bad_address = effect(&mut agent, own("node-1", vec![vec![10].into()]));
    assert!(matches!(bad_address, Effect::Reject(rejections) if rejections[0].field == "addresses"));
    let foreign = effect(&mut agent, own("node-2", Vec::new()));
    assert!(matches!(foreign, Effect::Reject(rejections) if rejections[0].resource == "Node node-2"));
    let unknown = v1::OwnNode { revision: 5, ..v1::OwnNode::default() };
    let unknown = effect(&mut agent, message(Body::OwnNode(unknown)));
    assert!(matches!(unknown, Effect::Node(OwnNode { revision: 5, node: None, position: None, .. })));
}

#[test]
fn hello_states_the_source_position_of_the_agents_own_node() {
    use v1::source_position::Kind;
    let position_in_hello = |held: &Held, kind: Kind| {
        let resume = held.resume().unwrap();
        let mut positions = resume.positions.into_iter().filter(|position| position.kind() == kind);
        positions.next().map(|position| position.position)
    };
    let at = |kind: Kind, position| Some(v1::SourcePosition { kind: kind.into(), position });
    let mut held = Held::default();
    assert_eq!(held.resume(), None);
    held.node_position = at(Kind::Nodes, 20);
    let resume = held.resume().unwrap();
    assert_eq!((resume.epoch, resume.digests), (0, None), "the agent holds only the Node");
    assert_eq!(position_in_hello(&held, Kind::Nodes), Some(20));
    // With a source from a backup, the replica sends a lower position after a bounded wait.
    held.node_position = at(Kind::Nodes, 10);
    assert_eq!(position_in_hello(&held, Kind::Nodes), Some(10));
    // A folder has one position for all kinds. `Hello` states the higher of two positions: the
    // position of the Node, and the position of the other resources.
    let mut agent = Agent::following(&replica(7));
    for (node_position, expected) in [(1, 2), (5, 5)] {
        agent.held.node_position = at(Kind::Files, node_position);
        assert_eq!(position_in_hello(&agent.held, Kind::Files), Some(expected));
    }
}

fn resuming_by_log(head_version: u64) -> (Machine, Vec<Effect>) {
    let mut machine = Machine::new("node-1".into());
    machine.begin(Some((7, 3)));
    let resume = ResumeMode::Log.into();
    let welcome =
        Body::Welcome(v1::Welcome { epoch: 7, resume, head_version: Some(head_version), ..v1::Welcome::default() });
    let effects = machine.on_message(message(welcome)).unwrap();
    (machine, effects)
}

fn has_resumed(effects: &[Effect]) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Resumed))
}

#[test]
fn a_resume_by_log_is_complete_at_the_head_that_welcome_named() {
    assert!(has_resumed(&resuming_by_log(3).1), "the agent already holds the head");
    let (mut machine, effects) = resuming_by_log(6);
    assert!(!has_resumed(&effects));
    let mut resumed_by = |message| has_resumed(&machine.on_message(message).unwrap());
    assert!(!resumed_by(batch(3, 4, &[endpoint("web", 1, 1)])), "two versions are missing");
    assert!(!resumed_by(batch(4, 4, &[endpoint("web", 2, 1)])), "the batch is only a part of a step");
    assert!(!resumed_by(message(Body::Heartbeat(v1::Heartbeat { head_version: 4, ..Default::default() }))));
    // The head may be higher than 6 by now, so the step may end at a version above 6.
    assert!(resumed_by(batch(4, 9, &[endpoint("web", 3, 1)])));
    assert!(!resumed_by(batch(9, 10, &[endpoint("web", 4, 1)])), "the effect occurs once");
}

#[test]
fn a_rejection_outlives_a_stream_that_breaks_before_its_snapshot() {
    let (one, other) = (replica(7), replica(8));
    let mut agent = Agent::following(&one);
    let mut bad = batch(2, 3, &[service("bad", 1)]);
    let Some(Body::Batch(wire)) = &mut bad.body else { unreachable!() };
    wire.changes.as_mut().unwrap().services[0].ports.clear();
    agent.receive(bad).unwrap();
    agent.nacks.clear();
    // The stream of another replica breaks after Welcome, without a snapshot.
    agent.follow(&other, 1);
    agent.hello();
    agent.receive(one.welcome(ResumeMode::Log)).unwrap();
    // A resume by log does not send the resource again, so the rejection is repeated.
    let resource = format!("Service {}", key("bad"));
    assert_eq!(agent.nacks[0].rejections[0].resource, resource);
    agent.follow(&other, usize::MAX);
    assert!(!agent.machine.rejections.contains(&resource), "the other replica has no such Service");
}

fn any_change() -> impl Strategy<Value = Change> {
    let name = prop::sample::select(vec!["a", "b", "c", "d"]);
    prop_oneof![
        (name.clone(), 1u16..4).prop_map(|(name, port)| service(name, port)),
        name.clone().prop_map(|name| Change::RemoveService(key(name))),
        (name.clone(), 1u8..6, 1u16..3).prop_map(|(name, last, port)| endpoint(name, last, port)),
        (name.clone(), 1u8..6).prop_map(|(name, last)| no_endpoint(name, last)),
        (name.clone(), 0u8..3).prop_map(|(name, third)| service_cidr(name, third)),
        name.prop_map(|name| Change::RemoveServiceCidr(name.into())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Two replicas commit the same changes in different batches. An agent alternates between them,
    /// and each of its streams breaks after any message.
    #[test]
    fn an_agent_reaches_the_replicas_state_after_any_broken_streams(
        batches in prop::collection::vec(prop::collection::vec(any_change(), 1..8), 1..12),
        streams in prop::collection::vec((any::<bool>(), 0usize..12), 0..12),
        per_message in 1usize..5,
    ) {
        let mut replicas = [Replica::new(7, per_message), Replica::new(8, per_message + 1)];
        let mut agent = Agent::new();
        let mut batches = batches.into_iter();
        for (second, cut) in streams {
            if let Some(batch) = batches.next() {
                batch.iter().for_each(|change| replicas[0].commit(vec![change.clone()]));
                replicas[1].commit(batch);
            }
            agent.follow(&replicas[usize::from(second)], cut);
        }
        for batch in batches {
            replicas.iter_mut().for_each(|replica| replica.commit(batch.clone()));
        }
        agent.follow(&replicas[1], usize::MAX);
        agent.assert_holds(&replicas[1]);
        prop_assert!(agent.nacks.is_empty());
    }
}
