#![allow(clippy::unwrap_used)]
use std::future::{pending, ready};

use tokio::{
    sync::oneshot,
    task::{JoinHandle, yield_now},
};

use super::*;

const SMALL: Limits = Limits { running: 4, running_of_network: 2, waiting: 6, waiting_of_network: 4 };

struct Rig(Arc<Handshakes>);

/// The task of a handshake, with its result.
type Task<E> = JoinHandle<Result<Result<(), E>, Evicted>>;

/// Runs all tasks until each of them waits.
async fn run_tasks() {
    for _ in 0..16 {
        yield_now().await;
    }
}

impl Rig {
    fn new() -> Self {
        Self(Handshakes::with_limits(SMALL, Arc::default(), Arc::default()))
    }

    fn enter(&self, host: u8) -> Option<Handshake> {
        self.0.enter([192, 0, 2, host].into())
    }

    /// Begins a handshake with a silent host.
    async fn silent(&self, host: u8) -> Task<()> {
        begin(self.enter(host).unwrap(), pending()).await
    }

    /// Begins `count` handshakes with a silent host.
    async fn many_silent(&self, host: u8, count: usize) -> Vec<Task<()>> {
        let mut tasks = Vec::new();
        for _ in 0..count {
            tasks.push(self.silent(host).await);
        }
        tasks
    }

    /// The hosts whose handshakes run, in the order in which they connected.
    fn running(&self) -> Vec<u8> {
        let connections = self.0.connections();
        let host = |network: Network| (0..=255).find(|host| Network::of([192, 0, 2, *host].into()) == network);
        connections.running.values().map(|running| host(running.network).unwrap()).collect()
    }

    fn waiting(&self) -> usize {
        self.0.connections().waiting
    }

    /// Ends all handshakes and checks that nothing is left of them.
    async fn end<E>(self, tasks: impl IntoIterator<Item = Task<E>>) {
        tasks.into_iter().for_each(|task| task.abort());
        run_tasks().await;
        let connections = self.0.connections();
        assert!(connections.running.is_empty() && connections.networks.is_empty() && connections.waiting == 0);
        assert_eq!(self.0.places.available_permits(), SMALL.running);
    }
}

/// Begins a handshake and runs its task until it waits.
async fn begin<E: Send + 'static>(
    handshake: Handshake,
    steps: impl Future<Output = Result<(), E>> + Send + 'static,
) -> Task<E> {
    let task = tokio::spawn(handshake.run(|| steps));
    run_tasks().await;
    task
}

#[tokio::test]
async fn places_of_a_network_are_bounded_and_networks_take_turns() {
    let rig = Rig::new();
    let mut tasks = rig.many_silent(1, 6).await;
    assert_eq!((rig.running(), rig.waiting()), (vec![1, 1], 4));
    assert!(rig.enter(1).is_none(), "two handshakes of the network run and four connections wait");
    tasks.extend(rig.many_silent(2, 3).await);
    assert_eq!(rig.running(), [1, 1, 2, 2]);
    tasks.extend(rig.many_silent(3, 1).await);
    assert_eq!(rig.running().len(), 4, "all places are taken");
    tasks.remove(0).abort();
    run_tasks().await;
    assert_eq!(rig.running().len(), 4);
    tasks.remove(0).abort();
    run_tasks().await;
    // Host 3 got its place although connections of other hosts waited for longer.
    assert!(rig.running().contains(&3), "{:?}", rig.running());
    rig.end(tasks).await;
}

#[tokio::test]
async fn if_too_many_connections_wait_the_newest_of_the_longest_queue_is_evicted() {
    let rig = Rig::new();
    let mut crowd = rig.many_silent(1, 6).await;
    let others = rig.many_silent(2, 4).await;
    assert_eq!(rig.waiting(), 6);
    assert!(rig.enter(1).is_none(), "no other network has a longer queue");
    let late = rig.silent(3).await;
    assert_eq!(rig.waiting(), 6);
    let newest = crowd.pop().unwrap();
    assert_eq!(newest.await.unwrap(), Err(Evicted::QueueFull), "the newest connection of the longest queue is evicted");
    rig.end(crowd.into_iter().chain(others).chain([late])).await;
}

#[tokio::test]
async fn a_silent_handshake_is_evicted_if_a_connection_can_use_its_place() {
    let rig = Rig::new();
    let silent = rig.silent(1).await;
    let (wake, woken) = oneshot::channel::<()>();
    let talking = begin(rig.enter(1).unwrap(), woken).await;
    let other = rig.silent(2).await;
    let later = Instant::now() + SILENCE_LIMIT;
    rig.0.evict_silent(later);
    run_tasks().await;
    assert!(!silent.is_finished(), "no connection waits");

    let waiting = rig.silent(1).await;
    rig.0.evict_silent(later);
    assert_eq!(silent.await.unwrap(), Err(Evicted::Silent), "the longest silent handshake is evicted");
    run_tasks().await;
    assert!(!other.is_finished(), "no connection can use this place");
    assert_eq!(rig.running(), [1, 2, 1], "the connection that waited runs");
    wake.send(()).unwrap();
    assert_eq!(talking.await.unwrap().map(|result| result.is_ok()), Ok(true));
    rig.end([waiting, other]).await;
}

#[tokio::test]
async fn a_peer_that_sends_something_is_not_silent() {
    let rig = Rig::new();
    let (message, processed) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (received, done) = (Arc::clone(&message), Arc::clone(&processed));
    let steps = async move {
        received.notified().await;
        done.notify_one();
        pending().await
    };
    let talking = begin::<()>(rig.enter(1).unwrap(), steps).await;
    let mute = rig.silent(1).await;
    let waiting = rig.silent(1).await;
    let began = Instant::now();
    rig.0.connections().running.values_mut().for_each(|running| running.heard_at = began - SILENCE_LIMIT);
    message.notify_one();
    processed.notified().await;
    rig.0.evict_silent(began);
    assert_eq!(mute.await.unwrap(), Err(Evicted::Silent));
    assert!(!talking.is_finished());
    rig.end([talking, waiting]).await;
}

#[tokio::test]
async fn a_network_whose_handshakes_fail_has_to_pause_and_other_networks_do_not() {
    let rig = Rig::new();
    let network = Network::of([192, 0, 2, 1].into());
    let mut failures = 0;
    while rig.0.failures.pause_end(network, Instant::now()).is_none() {
        assert_eq!(rig.enter(1).unwrap().run(|| ready(Err::<(), ()>(()))).await, Ok(Err(())));
        failures += 1;
    }
    assert!(failures > 10, "a few failures cost nothing");
    // With so many failures the pause lasts longer than the test.
    (0..200).for_each(|_| rig.0.failures.count(network, Instant::now()));
    let (pausing, other) = (rig.silent(1).await, rig.silent(2).await);
    assert_eq!(rig.running(), [2]);
    rig.end([pausing, other]).await;

    // After a short pause, the handshake begins without a further event.
    let rig = Rig::new();
    (0..21).for_each(|_| rig.0.failures.count(network, Instant::now()));
    let pausing = rig.enter(1).unwrap().run(|| ready(Ok::<(), ()>(())));
    assert_eq!(pausing.await, Ok(Ok(())));
    rig.end::<()>([]).await;
}
