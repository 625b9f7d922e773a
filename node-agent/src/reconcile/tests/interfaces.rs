//! Tests changes of the addresses of the node's interfaces.

use std::net::IpAddr;

use headgate_core::iptables::NodePortAddresses;

use super::*;
use headgate_settings::NodePortSelector;

#[test]
fn new_addresses_of_interfaces_are_used_at_once() {
    let node_ports = NodePortSelector { primary: false, cidrs: vec!["10.0.0.0/8".parse().unwrap()] };
    let (addresses, interfaces) = watch::channel(None);
    let shared = Arc::new(AgentState::new("node-1"));
    let dataplane = Box::new(in_memory::dataplane().0);
    let (mut reconciler, _progress) = Reconciler::new(dataplane, Arc::clone(&shared), SyncMetrics::default(), timing());
    let settings = NodeSettings { node_ports, ..NodeSettings::default() };
    (reconciler.node_settings, reconciler.interfaces) = (settings, interfaces);
    let mut inputs = reconciler.inputs();
    let thread = std::thread::spawn(|| reconciler.run());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for known in [&["10.0.0.1"][..], &["10.0.0.1", "10.0.0.2", "192.0.2.1"], &[]] {
        let known: Vec<IpAddr> = known.iter().map(|address| address.parse().unwrap()).collect();
        let selected = known.iter().copied().filter(|address| address.to_string().starts_with("10.")).collect();
        addresses.send_replace(Some(known.into()));
        shared.signal(Wake::Interfaces);
        let expected = NodePortAddresses::Only(selected);
        let resolved = inputs.wait_for(|inputs| inputs.node_ports_v4 == expected);
        runtime.block_on(async { tokio::time::timeout(GUARD, resolved).await.unwrap().map(drop) }).unwrap();
    }
    shared.stop();
    thread.join().unwrap();
}
