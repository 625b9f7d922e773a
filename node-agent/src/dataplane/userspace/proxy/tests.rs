//! The proxy without rules: its gate cannot be reached.
#![allow(clippy::unwrap_used)]

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
