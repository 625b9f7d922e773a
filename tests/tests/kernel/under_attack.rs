//! The bench of attacks measures what it says. It asserts on no figure: the bench itself does.

use headgate_tests::{
    bench::under_attack::{self, AttackMode, Attacks},
    testbed::netns,
};

#[test]
fn the_bench_of_attacks_measures_the_honest_beside_an_attack() {
    netns::check_prerequisites().unwrap();
    netns::sweep_stale().unwrap();
    let options = Attacks {
        attacks: vec!["drain-page".to_owned()],
        attack_modes: vec![AttackMode::Nftables],
        full_attacks: false,
        attack_seconds: Some(1),
        agent_arguments: Vec::new(),
        control_plane_arguments: vec!["--replica-name=attacked".to_owned()],
    };
    let figures = under_attack::run(&options, Some(2)).unwrap();
    let value = |name: &str| {
        let name = format!("under-attack/nftables/drain-page/{name}");
        let found = figures.iter().find(|figure| figure.name == name);
        found.unwrap_or_else(|| panic!("no figure is called {name}: {figures:#?}")).value
    };
    for figure in ["change-p99", "changes", "probes", "drain-p99", "agent-memory", "replica-memory", "replica-cpu"] {
        assert!(value(figure) > 0.0, "{figure} is not measured: {figures:#?}");
    }
    assert!(figures.iter().filter(|figure| figure.goal.is_some()).count() >= 5, "{figures:#?}");
}
