#![allow(clippy::unwrap_used)]
use std::future::{pending, ready};

use tokio::{
    sync::oneshot,
    task::{JoinHandle, yield_now},
};

use super::*;

const SMALL: Limits = Limits { running: 4, running_of_network: 2, waiting: 6, waiting_of_network: 4 };

struct Rig(Arc<Handshakes>);

/// What comes of a handshake.
type Ended<E> = JoinHandle<Result<Result<(), E>, Evicted>>;

/// Lets every task run as far as it can.
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

    /// A handshake of a host that is silent.
    async fn silent(&self, host: u8) -> Ended<()> {
        begin(self.enter(host).unwrap(), pending()).await
    }

    /// As many as asked for.
    async fn all_silent(&self, host: u8, count: usize) -> Vec<Ended<()>> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(self.silent(host).await);
        }
        all
    }

    /// Numbers of the hosts whose handshakes run, in the order in which they came.
    fn running(&self) -> Vec<u8> {
        let connections = self.0.connections();
        let host = |network: Network| (0..=255).find(|host| Network::of([192, 0, 2, *host].into()) == network);
        connections.running.values().map(|running| host(running.network).unwrap()).collect()
    }

    fn waiting(&self) -> usize {
        self.0.connections().waiting
    }

    /// Nothing is left once everybody has gone.
    async fn end<E>(self, all: impl IntoIterator<Item = Ended<E>>) {
        all.into_iter().for_each(|ended| ended.abort());
        run_tasks().await;
        let connections = self.0.connections();
        assert!(connections.running.is_empty() && connections.networks.is_empty() && connections.waiting == 0);
        assert_eq!(self.0.places.available_permits(), SMALL.running);
    }
}

/// A handshake whose task has run as far as it can.
async fn begin<E: Send + 'static>(
    handshake: Handshake,
    steps: impl Future<Output = Result<(), E>> + Send + 'static,
) -> Ended<E> {
    let task = tokio::spawn(handshake.run(|| steps));
    run_tasks().await;
    task
}

#[tokio::test]
async fn a_network_has_some_places_and_networks_take_turns() {
    let rig = Rig::new();
    let mut all = rig.all_silent(1, 6).await;
    assert_eq!((rig.running(), rig.waiting()), (vec![1, 1], 4));
    assert!(rig.enter(1).is_none(), "two run and four wait");
    all.extend(rig.all_silent(2, 3).await);
    assert_eq!(rig.running(), [1, 1, 2, 2]);
    all.extend(rig.all_silent(3, 1).await);
    assert_eq!(rig.running().len(), 4, "all places are taken");
    all.remove(0).abort();
    run_tasks().await;
    assert_eq!(rig.running().len(), 4);
    all.remove(0).abort();
    run_tasks().await;
    // Its turn came before those of connections that were there earlier.
    assert!(rig.running().contains(&3), "{:?}", rig.running());
    rig.end(all).await;
}

#[tokio::test]
async fn when_too_many_wait_the_longest_queue_gets_shorter() {
    let rig = Rig::new();
    let mut crowd = rig.all_silent(1, 6).await;
    let others = rig.all_silent(2, 4).await;
    assert_eq!(rig.waiting(), 6);
    assert!(rig.enter(1).is_none(), "no other network has more");
    let late = rig.silent(3).await;
    assert_eq!(rig.waiting(), 6);
    let newest = crowd.pop().unwrap();
    assert_eq!(newest.await.unwrap(), Err(Evicted::QueueFull), "the newest one of the longest queue");
    rig.end(crowd.into_iter().chain(others).chain([late])).await;
}

#[tokio::test]
async fn who_is_silent_goes_when_a_connection_waits_for_just_that_place() {
    let rig = Rig::new();
    let silent = rig.silent(1).await;
    let (wake, woken) = oneshot::channel::<()>();
    let talking = begin(rig.enter(1).unwrap(), woken).await;
    let other = rig.silent(2).await;
    let later = Instant::now() + PATIENCE;
    rig.0.evict_silent(later);
    run_tasks().await;
    assert!(!silent.is_finished(), "no connection waits");

    let waiting = rig.silent(1).await;
    rig.0.evict_silent(later);
    assert_eq!(silent.await.unwrap(), Err(Evicted::Silent), "the longest silent");
    run_tasks().await;
    assert!(!other.is_finished(), "no connection waits for its place");
    assert_eq!(rig.running(), [1, 2, 1], "the one that waited has its turn");
    wake.send(()).unwrap();
    assert_eq!(talking.await.unwrap().map(|ended| ended.is_ok()), Ok(true));
    rig.end([waiting, other]).await;
}

#[tokio::test]
async fn who_says_something_is_not_silent() {
    let rig = Rig::new();
    let (wake, said) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (told, says) = (Arc::clone(&wake), Arc::clone(&said));
    let talks = async move {
        told.notified().await;
        says.notify_one();
        pending().await
    };
    let talking = begin::<()>(rig.enter(1).unwrap(), talks).await;
    let mute = rig.silent(1).await;
    let waiting = rig.silent(1).await;
    let began = Instant::now();
    rig.0.connections().running.values_mut().for_each(|running| running.heard = began - PATIENCE);
    wake.notify_one();
    said.notified().await;
    rig.0.evict_silent(began);
    assert_eq!(mute.await.unwrap(), Err(Evicted::Silent));
    assert!(!talking.is_finished());
    rig.end([talking, waiting]).await;
}

#[tokio::test]
async fn a_network_whose_handshakes_fail_pauses_and_others_do_not() {
    let rig = Rig::new();
    let network = Network::of([192, 0, 2, 1].into());
    let mut failures = 0;
    while rig.0.failures.pause_end(network, Instant::now()).is_none() {
        assert_eq!(rig.enter(1).unwrap().run(|| ready(Err::<(), ()>(()))).await, Ok(Err(())));
        failures += 1;
    }
    assert!(failures > 10, "a few failures cost nothing");
    // A pause that does not end while the test looks.
    (0..200).for_each(|_| rig.0.failures.count(network, Instant::now()));
    let (pausing, other) = (rig.silent(1).await, rig.silent(2).await);
    assert_eq!(rig.running(), [2]);
    rig.end([pausing, other]).await;

    // One that ends: the connection gets its place without being asked.
    let rig = Rig::new();
    (0..21).for_each(|_| rig.0.failures.count(network, Instant::now()));
    let pausing = rig.enter(1).unwrap().run(|| ready(Ok::<(), ()>(())));
    assert_eq!(pausing.await, Ok(Ok(())));
    rig.end::<()>([]).await;
}
