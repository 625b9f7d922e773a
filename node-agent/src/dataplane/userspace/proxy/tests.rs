//! The proxy without rules: its gate cannot be reached.
#![allow(clippy::unwrap_used)]

use std::{
    io::Write,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::*;

const NO_GATE: &str = "this test has no gate";

fn start(open_files: u64) -> Proxy {
    let settings = ProxySettings::default();
    Proxy::start_with(&[Family::V4], || Err(NO_GATE.to_owned()), settings, open_files).unwrap().0
}

/// The problem of a proxy that serves. The wait in `serve` has a limit, which a slow machine may
/// exceed.
fn problem_of(proxy: &Proxy) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match proxy.problem() {
            Some(problem) if problem != NO_ANSWER => return problem,
            other => assert!(Instant::now() < until, "{other:?}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_proxy_with_too_few_descriptors_leaves_the_gate_open_and_takes_no_datagrams() {
    let frontend: SocketAddr = "192.0.2.1:53".parse().unwrap();
    for (open_files, has_shortage) in [(2_003, true), (4_096, false)] {
        let (proxy, mut datagrams) = (start(open_files), datagrams::DatagramListeners::new(Family::V4));
        proxy.execute(vec![Operation::SetAddress(1, Lookup::Service, Transport::Udp, frontend)], &mut datagrams);
        proxy.serve(Family::V4);
        let problem = problem_of(&proxy);
        assert_eq!(problem.contains("may open only 2003 files"), has_shortage, "{problem}");
        assert_eq!(problem.contains(NO_GATE), !has_shortage, "{problem}");
        assert_eq!(lock(&proxy.gate).families.is_empty(), has_shortage);
        assert_eq!(format!("{datagrams:?}").contains("192.0.2.1:53"), !has_shortage, "{datagrams:?}");
    }
}

#[test]
fn the_follower_learns_when_a_problem_begins_changes_and_ends() {
    // With so few files, the proxy's own thread finds no problem, however long the test takes.
    let proxy = start(2_003);
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
        (lock(&keeper.gate).problem.clone().map(|(sentence, _)| sentence), woken.load(Ordering::SeqCst) - before)
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

/// Collects the lines of the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_log_says_when_the_gate_is_closed_again() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        let problems = [None, Some("IPv4: busy"), Some("IPv4: busy"), Some("IPv6: busy"), None, None];
        let mut gate = GateState::default();
        let changes = problems.map(|problem| gate.record(problem.map(str::to_owned)));
        assert_eq!(changes, [false, true, false, true, true, false]);
        // The gate of an agent that stops is open.
        gate.is_draining = true;
        assert!(gate.record(Some("IPv4: gone".to_owned())) && gate.record(None));
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let [begins, ends, last] = lines[..] else { panic!("{text}") };
    assert!(begins.contains("WARN") && begins.ends_with("IPv4: busy"), "{text}");
    let (_, ending) = ends.split_once("the gate of the proxy is closed again, ").unwrap();
    let seconds = ending.strip_suffix(" s after the agent noticed the problem").unwrap();
    assert!(ends.contains("INFO") && seconds.parse::<f64>().is_ok(), "{text}");
    assert!(last.ends_with("IPv4: gone"), "{text}");
}
