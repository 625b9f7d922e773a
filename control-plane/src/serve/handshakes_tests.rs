#![allow(clippy::unwrap_used)]
use std::future::pending;

use super::*;

const SMALL: Bounds = Bounds { active: 4, active_of_source: 2, waiting: 6, waiting_of_source: 4 };

struct Rig {
    handshakes: Arc<Handshakes>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        Self { handshakes: Handshakes::with_bounds(SMALL, Arc::default()), now: Instant::now() }
    }

    fn enter(&self, host: u8) -> Option<Place> {
        self.handshakes.enter([192, 0, 2, host].into(), self.now)
    }

    /// Numbers of the hosts whose handshakes have begun, in the order in which they came.
    fn active(&self) -> Vec<u8> {
        let host = |active: &Active| match active.source.0 {
            IpAddr::V4(address) => address.octets()[3],
            IpAddr::V6(_) => 0,
        };
        self.handshakes.table().active.values().map(host).collect()
    }

    /// Nothing is left once everybody has gone.
    fn end(self) {
        let table = self.handshakes.table();
        assert!(table.active.is_empty() && table.sources.is_empty() && table.turns.is_empty());
        assert!(table.waiting == 0 && table.by_waiting.is_empty());
    }
}

#[test]
fn an_address_has_some_places_and_others_have_theirs() {
    let rig = Rig::new();
    let mut first: Vec<Place> = (0..6).filter_map(|_| rig.enter(1)).collect();
    assert_eq!((first.len(), rig.active()), (6, vec![1, 1]));
    assert!(rig.enter(1).is_none(), "two are active and four wait");
    let second: Vec<Place> = (0..3).filter_map(|_| rig.enter(2)).collect();
    assert_eq!(rig.active(), [1, 1, 2, 2]);
    let third = rig.enter(3);
    assert_eq!(rig.active().len(), 4, "all places are taken");
    drop(first.remove(0));
    assert_eq!(rig.active(), [1, 1, 2, 2]);
    // Its turn comes before the third and fourth of the first's, which were there earlier.
    drop(first.remove(0));
    assert_eq!(rig.active(), [1, 2, 2, 3]);
    drop((first, second, third));
    rig.end();
}

#[tokio::test]
async fn when_too_many_wait_the_longest_queue_gets_shorter() {
    let rig = Rig::new();
    let mut crowd: Vec<Place> = (0..6).filter_map(|_| rig.enter(1)).collect();
    let others: Vec<Place> = (0..4).filter_map(|_| rig.enter(2)).collect();
    assert_eq!((crowd.len(), others.len(), rig.handshakes.table().waiting), (6, 4, 6));
    let late = rig.enter(3).unwrap();
    assert_eq!(rig.handshakes.table().waiting, 6);
    let displaced = crowd.pop().unwrap().run(pending::<Result<(), ()>>).await;
    assert_eq!(displaced, Err(Displaced::Waiting), "the one that came last of those who are most");
    drop((crowd, others, late));
    rig.end();
}

/// What comes of a handshake.
type Ended<E> = tokio::task::JoinHandle<Result<Result<(), E>, Displaced>>;

/// A handshake whose task has run as far as it can.
async fn begun<E: Send + 'static>(
    place: Place,
    handshake: impl Future<Output = Result<(), E>> + Send + 'static,
) -> Ended<E> {
    let task = tokio::spawn(place.run(|| handshake));
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
    task
}

#[tokio::test]
async fn who_is_silent_goes_when_somebody_waits_for_just_that_place() {
    let rig = Rig::new();
    let silent = begun(rig.enter(1).unwrap(), pending::<Result<(), ()>>()).await;
    let (wake, woken) = oneshot::channel::<()>();
    let talking = begun(rig.enter(1).unwrap(), woken).await;
    let other = begun(rig.enter(2).unwrap(), pending::<Result<(), ()>>()).await;
    let later = Instant::now() + PATIENCE;
    rig.handshakes.make_room(later);
    tokio::task::yield_now().await;
    assert!(!silent.is_finished(), "nobody waits");

    let waiting = rig.enter(1).unwrap();
    rig.handshakes.make_room(later);
    assert_eq!(silent.await.unwrap(), Err(Displaced::Silent), "the longest silent");
    assert!(!other.is_finished(), "nobody waits for its place");
    assert_eq!(rig.active(), [1, 2, 1], "who waited has its turn");
    wake.send(()).unwrap();
    assert_eq!(talking.await.unwrap().map(|ended| ended.is_ok()), Ok(true));
    drop(waiting);
    other.abort();
    assert!(other.await.unwrap_err().is_cancelled());
    rig.end();
}

#[tokio::test]
async fn who_says_something_is_not_silent() {
    let mut rig = Rig::new();
    let now = Instant::now();
    rig.now = now.checked_sub(PATIENCE).unwrap();
    let (wake, said) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (told, says) = (Arc::clone(&wake), Arc::clone(&said));
    let talks = async move {
        told.notified().await;
        says.notify_one();
        pending().await
    };
    let talking = begun::<()>(rig.enter(1).unwrap(), talks).await;
    // Its turn has come, and it has not even begun.
    let mute = rig.enter(1).unwrap();
    let waiting = rig.enter(1).unwrap();
    wake.notify_one();
    said.notified().await;
    rig.handshakes.make_room(now);
    tokio::task::yield_now().await;
    assert!(!talking.is_finished());
    assert_eq!(mute.run(pending::<Result<(), ()>>).await, Err(Displaced::Silent));
    talking.abort();
    drop(waiting);
}

#[tokio::test]
async fn a_source_whose_handshakes_fail_rests_and_others_do_not() {
    let mut rig = Rig::new();
    rig.now = Instant::now();
    let fail = async |rig: &Rig, host| rig.enter(host).unwrap().run(|| std::future::ready(Err::<(), ()>(()))).await;
    let costless = OWED.as_millis() / REST.as_millis();
    for _ in 0..costless {
        assert_eq!(fail(&rig, 1).await, Ok(Err(())), "a few failures cost nothing");
    }
    rig.handshakes.table().owed.values_mut().for_each(|until| *until = rig.now + OWED + REST);
    let (resting, other) = (rig.enter(1).unwrap(), rig.enter(2).unwrap());
    assert_eq!(rig.active(), [2]);
    rig.handshakes.make_room(rig.now + REST / 2);
    assert_eq!(rig.active(), [2]);
    rig.handshakes.make_room(rig.now + REST);
    assert_eq!(rig.active(), [1, 2]);
    drop((resting, other));
    // One that goes while it rests leaves nothing.
    rig.handshakes.table().owed.values_mut().for_each(|until| *until = rig.now + OWED * 9);
    drop(rig.enter(1).unwrap());
    assert!(rig.handshakes.table().resting.is_empty());
    rig.end();
}

#[test]
fn an_ipv6_host_is_its_network() {
    let source = |text: &str| Source::of(text.parse().unwrap());
    assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:1"));
    assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
    assert_ne!(source("192.0.2.1"), source("192.0.2.2"));
}
