//! The proxy without rules: its gate cannot be reached.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const NO_GATE: &str = "this test has no gate";

fn start(open_files: u64) -> Proxy {
    let settings = ProxySettings::default();
    Proxy::start_with(&[Family::V4], || Err(NO_GATE.to_owned()), settings, open_files).unwrap().0
}

#[test]
fn a_proxy_with_too_few_descriptors_leaves_the_gate_open_and_takes_no_datagrams() {
    let frontend: SocketAddr = "192.0.2.1:53".parse().unwrap();
    for (open_files, has_shortage) in [(2_003, true), (4_096, false)] {
        let (proxy, mut datagrams) = (start(open_files), datagrams::Listeners::new(Family::V4));
        proxy.execute(vec![Operation::SetAddress(1, Lookup::Service, Transport::Udp, frontend)], &mut datagrams);
        proxy.serve(Family::V4);
        let problem = proxy.problem().unwrap();
        assert_eq!(problem.contains("may open only 2003 files"), has_shortage, "{problem}");
        assert_eq!(problem.contains(NO_GATE), !has_shortage, "{problem}");
        assert_eq!(lock(&proxy.gate).families.is_empty(), has_shortage);
        assert_eq!(format!("{datagrams:?}").contains("192.0.2.1:53"), !has_shortage, "{datagrams:?}");
    }
}

#[test]
fn the_follower_learns_when_a_problem_begins_changes_and_ends() {
    let proxy = start(65_536);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    // Every second call would have to wait.
    proxy.follow_problems(Arc::new(move || count.fetch_add(1, Ordering::SeqCst) % 2 == 1));
    let keeper = |serves_by| Keeper {
        tcp: Arc::clone(&proxy.tcp),
        udp: Arc::clone(&proxy.udp),
        connect: || Err(NO_GATE.to_owned()),
        gate: Arc::default(),
        follower: Arc::clone(&proxy.follower),
        serves_by,
        has_news: false,
    };
    let turns = |keeper: &mut Keeper| {
        let before = woken.load(Ordering::SeqCst);
        (0..3).for_each(|_| keeper.turn(&mut None));
        (lock(&keeper.gate).problem.clone(), woken.load(Ordering::SeqCst) - before)
    };
    let later = Instant::now() + Duration::from_secs(3600);
    assert_eq!(turns(&mut keeper(Some(later))), (None, 0));
    assert_eq!(turns(&mut keeper(None)), (None, 0), "a proxy that carries nothing has another problem");
    let mut late = keeper(Some(Instant::now()));
    assert_eq!(turns(&mut late), (Some(NO_ANSWER.to_owned()), 2));
    lock(&late.gate).families.push(Family::V4);
    let (problem, count) = turns(&mut late);
    assert!(problem.unwrap().contains(NO_GATE) && count == 2);
    lock(&late.gate).families.clear();
    lock(&late.gate).is_draining = true;
    assert_eq!(turns(&mut late), (None, 2));
}
