//! Agents choose replicas while replicas lose their API servers. No test asserts on time.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use headgate_tests::{
    apiserver::{Kind, Order, RequestFault, RequestFilter, Restart, Verb},
    failover::{Mode, Scenario, Scene, run},
    testbed::process::program,
};
use tokio::time::sleep;

/// A guard against hanging.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_leave_a_replica_that_loses_its_api_server_if_another_follows_the_source() {
    for cut in [Mode::Refusing, Mode::Silent] {
        let mut scene = Scene::set(20, &[Mode::Open, Mode::Open]).await.unwrap();
        scene.add_agents(12, &[0, 1]).unwrap();
        scene.until_programmed().await.unwrap();
        scene.replicas()[1].gate.set(cut).await;
        scene.change().unwrap();
        scene.until_programmed().await.unwrap();
        assert_eq!(scene.places().await.unwrap(), [12, 0], "{cut:?}");
        let moves = scene.moves();
        assert!(moves.iter().all(|moves| *moves <= 1), "an agent moved more than once: {moves:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restore_of_etcd_agents_of_a_cut_off_replica_follow_the_restored_source() {
    let mut scene = Scene::set(5, &[Mode::Open, Mode::Open]).await.unwrap();
    let backup = scene.api().backup();
    scene.add_agents(4, &[0, 1]).unwrap();
    scene.change().unwrap();
    scene.until_programmed().await.unwrap();
    scene.replicas()[1].gate.set(Mode::Refusing).await;
    scene.until_ready(1, false).await.unwrap();
    scene.api().restart(&Restart::RestoreBackup(backup)).unwrap();
    // Replica 0 follows the restored source, and is behind the agents of replica 1.
    let limit = Instant::now() + 2 * LIMIT;
    while scene.places().await.unwrap() != [4, 0] {
        assert!(Instant::now() < limit, "agents stay: {:?}", scene.places().await.unwrap());
        sleep(Duration::from_millis(100)).await;
    }
    scene.change().unwrap();
    scene.until_programmed().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_agents_find_the_one_healthy_replica_of_three_and_stay_when_it_is_cut_off_too() {
    let outcome = run(Scenario {
        agents: 100,
        newcomers: 6,
        services: 100,
        cut_after: Duration::from_secs(8),
        cut: Mode::Refusing,
        calm: Duration::from_secs(8),
    });
    let outcome = outcome.await.unwrap();
    println!("{outcome:?}");
    assert!(outcome.most_moves <= 2, "{outcome:?}");
    assert_eq!((outcome.moves_in_calm, outcome.moves_while_all_cut_off), (0, 0), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_of_a_replica_that_never_lists_are_shown_as_waiting() {
    let mut scene = Scene::set(5, &[Mode::Refusing]).await.unwrap();
    scene.add_agents(3, &[0]).unwrap();
    let replica = &scene.replicas()[0];
    let limit = Instant::now() + LIMIT;
    while replica.status().await.unwrap().agents < 3 {
        assert!(Instant::now() < limit, "the agents do not connect");
        sleep(Duration::from_millis(20)).await;
    }
    let status = replica.status().await.unwrap();
    let fleet = status.fleet.unwrap();
    assert_eq!((fleet.up_to_date, fleet.waiting, status.source_state.as_str()), (0, 3, "unlisted"));
    assert!(!replica.is_ready().await.unwrap());
    for agent in replica.agents().await.unwrap() {
        assert_eq!(agent.state, "waiting");
        assert_eq!(agent.reason, "the replica has not listed its source; the node holds no state");
    }
    let headgatectl = |arguments: &[&str]| {
        let mut command = Command::new(program("headgatectl").unwrap());
        let output = command.args(["--server", &replica.inspect_url()]).args(arguments).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let text = headgatectl(&["agents"]);
    assert!(text.ends_with("fleet: 0 of 3 nodes up to date, 3 waiting\n"), "{text}");
    assert!(text.contains("node-0: waiting: the replica has not listed its source; the node holds no state"), "{text}");
    let text = headgatectl(&["agents", "--behind"]);
    assert!(text.contains("node-2"), "{text}");
    let text = headgatectl(&["wait", "ns/svc-0", "--timeout", "1s"]);
    assert!(text.contains("the source of the replica is unlisted"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_of_a_replica_that_is_cut_off_are_shown_as_cut_off() {
    let mut scene = Scene::set(5, &[Mode::Open]).await.unwrap();
    scene.add_agents(2, &[0]).unwrap();
    scene.until_programmed().await.unwrap();
    scene.replicas()[0].gate.set(Mode::Silent).await;
    scene.until_ready(0, false).await.unwrap();
    let replica = &scene.replicas()[0];
    let status = replica.status().await.unwrap();
    assert_eq!(status.source_state, "cut_off");
    assert!(
        status.source_problem.contains("silent") || status.source_problem.contains("cannot be watched"),
        "{status:?}"
    );
    let fleet = status.fleet.unwrap();
    assert_eq!((fleet.up_to_date, fleet.cut_off), (0, 2));
    assert_eq!(scene.moves(), [0, 0], "an agent moved although there is no other replica");
    scene.replicas()[0].gate.set(Mode::Open).await;
    scene.change().unwrap();
    scene.until_programmed().await.unwrap();
    scene.until_ready(0, true).await.unwrap();
    assert_eq!(scene.moves(), [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_cannot_watch_one_kind_is_cut_off_until_it_can() {
    let scene = Scene::set(5, &[Mode::Open]).await.unwrap();
    scene.until_ready(0, true).await.unwrap();
    let forbidden = RequestFault::status(403);
    scene.api().fail_all(RequestFilter::verb_of(Verb::Watch, Kind::EndpointSlice), forbidden);
    scene.api().order(Some(Kind::EndpointSlice), &Order::Close);
    scene.until_ready(0, false).await.unwrap();
    let status = scene.replicas()[0].status().await.unwrap();
    assert_eq!(status.source_state, "cut_off");
    assert!(status.source_problem.contains("cannot be watched") && status.source_problem.contains("403"), "{status:?}");
    scene.api().clear_faults();
    scene.until_ready(0, true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_agent_moves_when_the_api_server_stops_answering_all_replicas() {
    let mut scene = Scene::set(20, &[Mode::Open, Mode::Open]).await.unwrap();
    scene.add_agents(12, &[0, 1]).unwrap();
    scene.until_programmed().await.unwrap();
    for replica in scene.replicas() {
        replica.gate.set(Mode::Silent).await;
    }
    for replica in 0..2 {
        scene.until_ready(replica, false).await.unwrap();
    }
    // If another replica were better, agents would leave a cut-off replica in less time.
    sleep(Duration::from_secs(8)).await;
    assert_eq!(scene.moves(), [0; 12]);
}
