//! Tests of an agent that starts with a state from disk: what it requests, and when it programs the
//! state.

use headgate_core::Change;
use tempfile::TempDir;

use super::*;
use crate::testing::batch;

fn start(folder: &TempDir, replica: &ScriptedReplica) -> Agent {
    Agent::start(&[
        format!("--control-plane=http://{}", replica.address),
        format!("--state-dir={}", folder.path().display()),
    ])
}

/// A batch with one endpoint, and with a Service without ports, which an agent rejects.
fn unusable(previous_version: u64) -> v1::ServerMessage {
    let mut bad = batch(previous_version, previous_version + 1, &[endpoint("web", 3, 8080), service("bad", 1)]);
    let Some(server_message::Body::Batch(wire)) = &mut bad.body else { unreachable!() };
    wire.changes.as_mut().unwrap().services[0].ports.clear();
    bad
}

/// Makes the run that ended look like one that crashed in the same boot, so that the rules in the
/// kernel may be newer than the state on disk.
fn crashed(folder: &TempDir) {
    let run = folder.path().join("run");
    assert_eq!(std::fs::read_to_string(&run).unwrap().trim_end(), "saved");
    std::fs::copy("/proc/sys/kernel/random/boot_id", run).unwrap();
}

/// Waits for the ACK of a version, and ignores other messages.
async fn acknowledged(connection: &mut Connection, version: u64) {
    loop {
        match connection.next().await {
            Body::Ack(ack) if ack.version == version => return,
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_requests_the_resources_again_that_it_rejected() {
    let (folder, mut replica, mut store) = (tempfile::tempdir().unwrap(), ScriptedReplica::start().await, store());
    let agent = start(&folder, &replica);
    let (mut connection, _) = serve(&mut replica, &store).await;
    acknowledged(&mut connection, 1).await;
    connection.send(unusable(1)).await;
    acknowledged(&mut connection, 2).await;
    agent.stop().await;

    let agent = start(&folder, &replica);
    store.commit(vec![endpoint("web", 3, 8080), service("bad", 1)]);
    let (mut connection, hello) = serve(&mut replica, &store).await;
    assert_eq!(hello.resume.unwrap().epoch, 0, "the agent resumes by digests: the log lacks the rejected resource");
    acknowledged(&mut connection, 2).await;
    agent.stop().await;

    // The agent has received the rejected resource again in a usable form, so no rejection is left.
    let agent = start(&folder, &replica);
    let (_connection, hello) = serve(&mut replica, &store).await;
    let resume = hello.resume.unwrap();
    assert_eq!((resume.epoch, resume.version), (store.epoch, 2));
    agent.stop().await;
}

/// Starts an agent with a state from disk and the rules of its earlier run. Sends the agent all
/// messages of `steps` except the last message, and checks that the agent programs nothing before
/// that message.
async fn resume_with_a_pause_before_the_end(steps: Vec<Vec<Change>>) {
    let (folder, mut replica, mut store) = (tempfile::tempdir().unwrap(), ScriptedReplica::start().await, store());
    let agent = start(&folder, &replica);
    let (mut connection, _) = serve(&mut replica, &store).await;
    acknowledged(&mut connection, 1).await;
    agent.stop().await;
    crashed(&folder);

    steps.into_iter().for_each(|step| store.commit(step));
    let agent = start(&folder, &replica);
    let mut connection = replica.accept().await;
    let hello = connection.hello().await;
    let mut messages = store.stream(hello.resume.as_ref());
    let last = messages.pop().unwrap();
    assert_eq!(messages.len(), 2, "Welcome and the first of two messages");
    for message in messages {
        connection.send(message).await;
    }
    let wrote = |calls: &[Call]| calls.iter().any(|call| matches!(call, Call::Full(..) | Call::Apply(..)));
    let control = agent.control.clone();
    let waited = tokio::task::spawn_blocking(move || control.wait_for(Duration::from_millis(1_500), wrote));
    assert!(!waited.await.unwrap(), "the agent programmed a state that may be older than the kernel's rules");
    connection.send(last).await;
    acknowledged(&mut connection, store.version()).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_programmed_from_disk_while_a_step_arrives_in_parts_or_before_the_head_is_reached() {
    let [three, four, five] = [3, 4, 5].map(|last| endpoint("web", last, 8080));
    resume_with_a_pause_before_the_end(vec![vec![three.clone(), four.clone(), five]]).await;
    resume_with_a_pause_before_the_end(vec![vec![three], vec![four]]).await;
}
