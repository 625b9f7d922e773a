//! Tests the cases in which an agent moves to another replica, and the cases in which it stays.

use std::time::Duration;

use headgate_proto::v1::{self, SourceState, server_message, source_position::Kind, welcome::ResumeMode};

use super::{Agent, programmed, replica::ScriptedReplica, store};
use crate::testing::{batch, message, service};

/// A time in which an agent can ask the other replicas once, and move.
const ASKED: Duration = Duration::from_secs(8);

fn heartbeat(state: SourceState) -> v1::ServerMessage {
    message(server_message::Body::Heartbeat(v1::Heartbeat { source_state: state.into(), ..Default::default() }))
}

fn services_at(position: u64) -> Vec<v1::SourcePosition> {
    vec![v1::SourcePosition { kind: Kind::Services.into(), position }]
}

/// Starts two replicas, and an agent that has programmed the state of one replica. Returns this
/// replica and its connection, the other replica, and the agent.
async fn two() -> (ScriptedReplica, super::Connection, ScriptedReplica, Agent) {
    let (mut one, mut two) = (ScriptedReplica::start().await, ScriptedReplica::start().await);
    let agent = Agent::of(&[&one, &two]);
    let (mut connection, is_one) = tokio::select! {
        connection = one.accept() => (connection, true),
        connection = two.accept() => (connection, false),
    };
    let store = store();
    let _ = connection.hello().await;
    for mut message in store.stream(None) {
        if let Some(server_message::Body::SnapshotEnd(end)) = &mut message.body {
            end.positions = services_at(1);
        }
        connection.send(message).await;
    }
    assert_eq!(connection.ack().await.version, 1);
    if is_one { (one, connection, two, agent) } else { (two, connection, one, agent) }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_moves_from_a_cut_off_replica_to_a_replica_that_follows() {
    let (_first, mut connection, mut second, agent) = two().await;
    second.set_standing(8, SourceState::Following, services_at(9));
    connection.send(heartbeat(SourceState::CutOff)).await;
    let (_connection, hello) = programmed(&mut second, &store()).await;
    assert!(hello.resume.is_some());
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_arrives_while_an_agent_asks_does_not_make_other_replicas_look_behind() {
    let (_first, mut connection, mut second, agent) = two().await;
    second.set_standing(8, SourceState::Following, services_at(1));
    second.delay_answers(true);
    // The replica is cut off because it cannot watch one kind; changes of other kinds still arrive.
    connection.send(heartbeat(SourceState::CutOff)).await;
    second.wait_until_asked().await;
    let mut change = batch(1, 2, &[service("web", 81)]);
    let Some(server_message::Body::Batch(wire)) = &mut change.body else { unreachable!() };
    wire.positions = services_at(2);
    connection.send(change).await;
    assert_eq!(connection.ack().await.version, 2);
    second.delay_answers(false);
    assert!(second.accept().await.hello().await.resume.is_some());
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_a_state_stays_when_no_other_replica_follows() {
    let others = [
        (8, SourceState::CutOff, services_at(9)),
        (8, SourceState::Unlisted, vec![]),
        // This replica is behind the agent, which holds position 1 of the services.
        (8, SourceState::Following, services_at(0)),
        // This replica is the agent's own replica, at another address.
        (7, SourceState::Following, services_at(9)),
    ];
    let mut running = Vec::new();
    for (epoch, state, positions) in others {
        running.push(tokio::spawn(async move {
            let (_first, mut connection, mut second, agent) = two().await;
            second.set_standing(epoch, state, positions.clone());
            connection.send(heartbeat(SourceState::CutOff)).await;
            let moved = second.accept_within(ASKED).await;
            assert!(moved.is_none(), "the agent moved to a replica that is {state:?} at {positions:?}, epoch {epoch}");
            agent.stop().await;
        }));
    }
    for running in running {
        running.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_without_a_state_moves_from_an_unlisted_replica_even_to_a_cut_off_replica() {
    let (mut one, mut two) = (ScriptedReplica::start().await, ScriptedReplica::start().await);
    for replica in [&one, &two] {
        replica.set_standing(8, SourceState::CutOff, services_at(1));
    }
    let agent = Agent::of(&[&one, &two]);
    let (mut connection, other) = tokio::select! {
        connection = one.accept() => (connection, &mut two),
        connection = two.accept() => (connection, &mut one),
    };
    assert!(connection.hello().await.resume.is_none());
    let mut welcome = store().welcome(ResumeMode::Full);
    let Some(server_message::Body::Welcome(wire)) = &mut welcome.body else { unreachable!() };
    wire.source_state = SourceState::Unlisted.into();
    connection.send(welcome).await;
    let (_connection, _) = programmed(other, &store()).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_asked_to_move_for_balance_stays_when_no_other_replica_follows() {
    let drain = || {
        let (reconnect_within_ms, reason) = (10, "more than its share".into());
        message(server_message::Body::Drain(v1::Drain { reconnect_within_ms, reason, for_balance: true }))
    };
    let (_first, mut connection, mut second, agent) = two().await;
    second.set_standing(8, SourceState::CutOff, services_at(9));
    connection.send(drain()).await;
    assert!(second.accept_within(Duration::from_secs(2)).await.is_none());
    second.set_standing(8, SourceState::Following, services_at(9));
    connection.send(drain()).await;
    let (_connection, _) = programmed(&mut second, &store()).await;
    agent.stop().await;
}
