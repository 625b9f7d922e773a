//! Scripts that run on the fake kernel.

use std::net::SocketAddr;

use super::*;
use crate::iptables::names::GateChain;

/// The configuration of mode userspace.
fn with_proxy() -> RenderConfig {
    let listener = |(chain, port): (GateChain, u16)| (chain, SocketAddr::new(ip("169.254.77.1"), port));
    let listeners = GateChain::ALL.into_iter().zip(10245..).map(listener).collect();
    RenderConfig { listeners, layout: Layout::Classic, ..config() }
}

/// The time of `iptables-nft-restore` for a step grows with the square of the number of chain names
/// in the step.
#[test]
fn steps_of_a_first_sync_are_bounded_and_produce_the_same_rules() {
    let changes = (0..3000_u32).flat_map(|i| {
        let key = ServiceKey::new("ns", &format!("svc{i}"));
        let mut service = Service { key: key.clone(), ..service("svc1", "172.30.0.41") };
        service.cluster_ips = vec![IpAddr::from((0x0a60_0000 + i).to_be_bytes())];
        service.ports[0].node_port = 30000 + i as u16;
        [Change::from(service), Change::Endpoint(key, endpoint("10.180.0.1"))]
    });
    let (state, _) = state(changes);
    for (layout, base) in [
        (Layout::Classic, config()),
        (Layout::Compact, config()),
        (Layout::Classic, with_proxy()),
        (Layout::Compact, with_proxy()),
    ] {
        let config = RenderConfig { layout, ..base };
        let mut ledger = RulesLedger::new(ruleset(config.clone()));
        let nothing = ExistingTables::default();
        let mut text = String::new();
        let mut write = |script: &Script| text.push_str(&script.to_string());
        let (script, _) = ledger.full_in_parts(&FixedState(&state, &node()), nothing, Some(&mut write));
        text.push_str(&script.to_string());
        let (mut kernel, mut at_once) = (FakeKernel::default(), FakeKernel::default());
        kernel.restore(&text).unwrap();
        at_once.restore(&full(config, &state).1).unwrap();
        assert!(kernel == at_once, "{layout:?}");
        let nat = text.split("COMMIT\n").filter(|step| step.contains("*nat\n"));
        let longest = nat.map(|step| step.lines().filter(|line| line.contains(" -j ")).count()).max().unwrap();
        assert!(longest < 3000, "{layout:?}: a step has {longest} rules");
        assert_eq!(script.rules_written(RulesTable::Nat), kernel.rule_count(RulesTable::Nat), "{layout:?}");
    }
}

// rows of iptables: 50, 72
#[test]
fn jumps_in_the_wrong_order_are_inserted_again() {
    let mut kernel = FakeKernel::default();
    let saved = |kernel: &FakeKernel| ExistingTables::parse(&RulesTable::ALL.map(|table| kernel.save(table)).concat());
    let sync = |kernel: &mut FakeKernel| {
        let mut ledger = RulesLedger::new(ruleset(config()));
        let (script, _) = ledger.full(&FixedState(&State::default(), &node()), saved(kernel));
        kernel.restore(&script.to_string()).unwrap();
        script
    };
    sync(&mut kernel);
    let input = |kernel: &FakeKernel| {
        let saved = kernel.save(RulesTable::Filter);
        saved.lines().filter_map(|line| line.strip_prefix("-A INPUT ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let wanted = input(&kernel);
    assert!(wanted[0].ends_with("-j KUBE-LOCALNET-GUARD") && wanted.len() == 4, "{wanted:?}");

    // Move the guard behind the rule that accepts health checks. Add a foreign rule, which must
    // stay.
    let move_guard = format!("*filter\n-D INPUT {0}\n-A INPUT -j ACCEPT\n-A INPUT {0}\nCOMMIT\n", wanted[0]);
    kernel.restore(&move_guard).unwrap();
    sync(&mut kernel);
    assert_eq!(input(&kernel), [&wanted[..], &["-j ACCEPT".to_owned()]].concat());

    // A missing jump is not inserted before the guard.
    kernel.restore(&format!("*filter\n-D INPUT {}\nCOMMIT\n", wanted[2])).unwrap();
    sync(&mut kernel);
    assert_eq!(input(&kernel), [&wanted[..], &["-j ACCEPT".to_owned()]].concat());
    let script = sync(&mut kernel);
    assert!(script.is_empty(), "{script}");
}
