//! `--cleanup-stay`: what a pod of the cleanup does on its node.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use super::rig::{Rig, eventually};

const IS_CLEAN: &str = "/tmp/headgate-is-clean";
const STAY: [&str; 2] = ["--cleanup", "--cleanup-stay=beside-proxy"];

#[test]
fn a_pod_of_the_cleanup_waits_for_the_rules_of_another_proxy_and_says_why_it_ends() {
    let _ = std::fs::remove_file(IS_CLEAN);
    let rig = Rig::web(10);
    let agent = rig.agent(&["--proxy-mode=nftables"]);
    rig.until_programmed();
    let (status, log) = rig.run_agent(&STAY);
    assert!(!status.success() && log.contains("no other service proxy says in its metrics"), "{log}");
    assert!(agent.terminate().0.success());
    let tables = || rig.tool("nft", &["list", "tables"]);
    assert!(tables().contains("table ip headgate"), "{}", tables());

    // kube-proxy answers before it has written its rules.
    let has_synced = Arc::new(AtomicBool::new(false));
    let (proxy, synced) = (rig.listen(10249), Arc::clone(&has_synced));
    thread::spawn(move || {
        for connection in proxy.incoming().map_while(Result::ok) {
            let lines = BufReader::new(&connection).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let at = u8::from(synced.load(Ordering::Relaxed));
            let page = match head.first().and_then(|line| line.split(' ').nth(1)) {
                Some("/metrics") => format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds {at}\n"),
                _ => "iptables".to_owned(),
            };
            let _ = write!(&connection, "HTTP/1.0 200 OK\r\n\r\n{page}");
        }
    });
    let mut pod = rig.agent(&STAY);
    thread::sleep(std::time::Duration::from_secs(2));
    assert!(pod.is_running() && tables().contains("table ip headgate"), "{}", pod.log());
    has_synced.store(true, Ordering::Relaxed);
    eventually("the node is clean", || Path::new(IS_CLEAN).exists().then_some(()).ok_or_else(|| pod.log()));
    assert!(!tables().contains("headgate"), "{}", tables());
    assert!(pod.is_running(), "the pod stays: {}", pod.log());
    std::fs::remove_file(IS_CLEAN).unwrap();
}
