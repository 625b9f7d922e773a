//! Tests when an agent moves to another replica.

use headgate_proto::v1::{self, SourceState, server_message, source_position::Kind};

use super::{Agent, replica::ScriptedReplica, store};
use crate::testing::{batch, message, service};

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
