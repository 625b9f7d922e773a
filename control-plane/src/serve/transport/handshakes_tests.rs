#![allow(clippy::unwrap_used)]
use std::future::{pending, ready};

use tokio::{sync::mpsc, task::JoinHandle};

use super::*;
use crate::{
    serve::context::Settings,
    store::{Limits, Store},
};

/// The clock of all tests is paused: time passes only while every task waits. So no handshake is
/// closed because the machine is slow.
const SMALL: HandshakeLimits = HandshakeLimits {
    running: 4,
    running_of_network: 2,
    waiting: [8; 2],
    waiting_of_node: 3,
    silence: Duration::from_millis(200),
    peers_time: Duration::from_secs(20),
};

struct Rig(Arc<Handshakes>);

/// The task of a handshake, with its result.
type Task<E> = JoinHandle<Result<Result<(), E>, Silent>>;

/// Runs all tasks until each of them waits.
async fn run_tasks() {
    for _ in 0..16 {
        yield_now().await;
    }
}

/// Begins a handshake and runs its task until it waits.
async fn begin<E: Send + 'static>(
    handshake: Handshake,
    steps: impl Future<Output = Result<(), E>> + Send + 'static,
) -> Task<E> {
    let task = tokio::spawn(handshake.run(|| true, || steps));
    run_tasks().await;
    task
}

impl Rig {
    fn new() -> Self {
        Self::with(SMALL)
    }

    fn with(limits: HandshakeLimits) -> Self {
        let store = Arc::new(Store::new(Limits::default(), Arc::default()));
        let context = Context::new(store, Arc::default(), Settings::default());
        Self(Handshakes::with_limits(limits, context, ["active", "waiting"]))
    }

    fn enter(&self, host: u8) -> Option<Handshake> {
        self.0.enter(Network::of([192, 0, 2, host].into()))
    }

    fn enter_as_node(&self, host: u8) -> Option<Handshake> {
        self.0.enter(Network::of_node([192, 0, 2, host].into()))
    }

    /// Begins `count` handshakes with a silent host.
    async fn silent(&self, host: u8, count: usize) -> Vec<Task<()>> {
        let mut tasks = Vec::new();
        for _ in 0..count {
            tasks.push(begin(self.enter(host).unwrap(), pending()).await);
        }
        tasks
    }

    /// The numbers of handshakes that run and that wait.
    fn counts(&self) -> (usize, usize) {
        let [strangers, _] = &self.0.shares;
        (SMALL.running - strangers.places.available_permits(), strangers.waiting.all())
    }

    /// The number of handshakes of a host that run.
    fn running(&self, host: u8) -> usize {
        let queues = self.0.queues();
        let of_host = queues.get(&Network::of([192, 0, 2, host].into()));
        of_host.map_or(0, |queue| SMALL.running_of_network - queue.places.available_permits())
    }

    /// Ends all handshakes and checks that nothing is left of them.
    async fn end<E>(self, tasks: impl IntoIterator<Item = Task<E>>) {
        tasks.into_iter().for_each(|task| task.abort());
        run_tasks().await;
        assert_eq!(self.counts(), (0, 0));
        assert!(self.0.queues().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn places_of_a_network_are_bounded_and_networks_take_turns() {
    let rig = Rig::new();
    let mut tasks = rig.silent(1, 6).await;
    assert_eq!((rig.running(1), rig.counts()), (2, (2, 4)));
    tasks.extend(rig.silent(2, 3).await);
    let (starts, mut started) = mpsc::channel(1);
    let steps = async move {
        starts.try_send(()).unwrap();
        pending().await
    };
    tasks.push(begin(rig.enter(3).unwrap(), steps).await);
    assert_eq!((rig.counts(), started.try_recv().is_ok()), ((4, 6), false));
    tasks.remove(0).abort();
    run_tasks().await;
    // Host 3 got the place although connections of other hosts waited for longer.
    assert_eq!((rig.counts(), started.try_recv().is_ok()), ((4, 5), true));
    rig.end(tasks).await;
}

#[tokio::test(start_paused = true)]
async fn a_network_can_use_a_part_of_the_space_that_is_left() {
    let rig = Rig::new();
    let mut tasks = rig.silent(1, 2 + 6).await;
    assert!(rig.enter(1).is_none(), "six of eight connections wait");
    tasks.extend(rig.silent(2, 2 + 1).await);
    assert_eq!(rig.counts(), (4, 7));
    tasks.extend(rig.silent(3, 1).await);
    assert!(rig.enter(4).is_none(), "no space is left");
    rig.end(tasks).await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_handshake_is_closed_if_a_connection_can_use_its_place() {
    let rig = Rig::new();
    let (messages, mut received) = mpsc::channel::<()>(1);
    let steps = async move {
        while received.recv().await.is_some() {}
        Err(())
    };
    let talking = begin(rig.enter(1).unwrap(), steps).await;
    let [mute, other] = [rig.silent(1, 1).await.remove(0), rig.silent(2, 1).await.remove(0)];
    // Each handshake looks once in `silence` whether a connection waits. Count between two looks.
    sleep(SMALL.silence * 5 / 2).await;
    assert_eq!(rig.counts(), (3, 0), "no connection waits");
    let waiting = rig.silent(1, 1).await.remove(0);
    assert_eq!(rig.counts(), (3, 1));
    while !mute.is_finished() {
        messages.send(()).await.unwrap();
        sleep(SMALL.silence / 20).await;
    }
    assert_eq!(mute.await.unwrap(), Err(Silent));
    run_tasks().await;
    assert_eq!((rig.running(1), rig.counts()), (2, (3, 0)), "the connection that waited runs");
    assert!(!talking.is_finished(), "this peer has sent something");
    assert!(!other.is_finished(), "no connection can use this place");
    rig.end([talking, waiting, other]).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_never_silent_cannot_keep_a_place_that_another_connection_can_use() {
    let limits =
        HandshakeLimits { silence: Duration::from_secs(3_600), peers_time: Duration::from_millis(100), ..SMALL };
    let rig = Rig::with(limits);
    let (messages, mut received) = mpsc::channel::<()>(1);
    let steps = async move {
        while received.recv().await.is_some() {}
        Err(())
    };
    let talking = begin(rig.enter(1).unwrap(), steps).await;
    let waits = tokio::spawn(rig.enter(1).unwrap().run(|| false, pending::<Result<(), ()>>));
    run_tasks().await;
    let waiting = rig.silent(1, 1).await.remove(0);
    assert_eq!(rig.counts(), (2, 1));
    while messages.send(()).await.is_ok() {
        sleep(limits.peers_time / 20).await;
    }
    assert_eq!(talking.await.unwrap(), Err(Silent));
    rig.end([waits, waiting]).await;
}

#[tokio::test(start_paused = true)]
async fn a_network_whose_handshakes_fail_has_to_pause_and_other_networks_do_not() {
    let rig = Rig::new();
    let network = Network::of([192, 0, 2, 1].into());
    let mut failures = 0;
    while rig.0.context.failures.pause_end(network, Instant::now()).is_none() {
        assert_eq!(rig.enter(1).unwrap().run(|| true, || ready(Err::<(), ()>(()))).await, Ok(Err(())));
        failures += 1;
    }
    assert!(failures > 10, "a few failures cost nothing");
    // With so many failures the pause lasts longer than the test.
    (0..200).for_each(|_| rig.0.context.failures.count(network, Instant::now()));
    let tasks = [rig.silent(1, 1).await, rig.silent(2, 1).await];
    assert_eq!((rig.running(2), rig.counts()), (1, (1, 1)));
    rig.end(tasks.into_iter().flatten()).await;

    // After a short pause, the handshake begins without a further event.
    let rig = Rig::new();
    (0..21).for_each(|_| rig.0.context.failures.count(network, Instant::now()));
    let pausing = rig.enter(1).unwrap().run(|| true, || ready(Ok::<(), ()>(())));
    assert_eq!(pausing.await, Ok(Ok(())));
    rig.end::<()>([]).await;
}

#[tokio::test(start_paused = true)]
async fn nodes_have_places_of_their_own_and_strangers_take_none_of_them() {
    let rig = Rig::new();
    let mut tasks = rig.silent(1, 8).await;
    tasks.extend(rig.silent(2, 4).await);
    assert!(rig.enter(3).is_none(), "strangers have no space left");
    let node = rig.enter_as_node(1).unwrap().run(|| true, || ready(Ok::<(), ()>(())));
    assert_eq!(node.await, Ok(Ok(())), "the Node has the address of a stranger of before");
    rig.end(tasks).await;
}

#[tokio::test(start_paused = true)]
async fn of_too_many_connections_of_a_node_the_longest_silent_one_is_closed() {
    let rig = Rig::new();
    let listening = |handshake: Handshake| tokio::spawn(async move { handshake.until_heard(pending::<()>()).await });
    let mut silent = Vec::new();
    for _ in 0..SMALL.waiting_of_node {
        silent.push(listening(rig.enter_as_node(1).unwrap()));
        run_tasks().await;
    }
    let other = listening(rig.enter_as_node(2).unwrap());
    let agent = rig.enter_as_node(1).unwrap();
    assert_eq!(silent.remove(0).await.unwrap(), Err(Silent), "the first has been silent for longest");
    assert_eq!(agent.until_heard(ready(())).await, Ok(()));
    assert_eq!(agent.run(|| true, || ready(Ok::<(), ()>(()))).await, Ok(Ok(())));
    run_tasks().await;
    assert!(silent.iter().chain([&other]).all(|task| !task.is_finished()));
    // A client that has sent something waits for its turn, and is not closed for another one.
    let mut talking = Vec::new();
    for _ in 0..SMALL.running_of_network + 1 {
        talking.push(begin(rig.enter_as_node(1).unwrap(), pending::<Result<(), ()>>()).await);
    }
    for task in silent.iter().chain([&other]) {
        task.abort();
    }
    run_tasks().await;
    talking.push(begin(rig.enter_as_node(1).unwrap(), pending()).await);
    talking.push(begin(rig.enter_as_node(1).unwrap(), pending()).await);
    assert!(rig.enter_as_node(1).is_none(), "three clients of the Node wait, and none of them is silent");
    rig.end(talking).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_waits_for_this_side_is_not_silent() {
    let rig = Rig::new();
    let waits = tokio::spawn(rig.enter(1).unwrap().run(|| false, pending::<Result<(), ()>>));
    run_tasks().await;
    let mut tasks = rig.silent(1, 2).await;
    while !tasks[0].is_finished() {
        sleep(SMALL.silence / 20).await;
    }
    assert!(!waits.is_finished());
    tasks.push(waits);
    rig.end(tasks).await;
}
