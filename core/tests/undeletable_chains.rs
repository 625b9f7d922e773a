//! Chains of Headgate to which foreign rules jump. The kernel does not delete these chains, so they
//! stay empty until the foreign rules are removed. Verification does not report these chains.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Protocol, Service, ServiceKey, ServicePort,
    State,
    iptables::{ExistingTables, Ledger, RenderConfig, Script, Table, fake_kernel::FakeKernel, ruleset},
};

struct Rig {
    kernel: FakeKernel,
    ledger: Ledger,
    state: State,
}

impl Rig {
    fn existing(&self) -> ExistingTables {
        ExistingTables::parse(&Table::ALL.map(|table| self.kernel.save(table)).concat())
    }

    /// Runs a script as the agent does: if the kernel rejects the deletion of a chain, records that
    /// the chain is undeletable. Returns the chains that were not recorded before.
    fn run(&mut self, script: &Script) -> Vec<String> {
        if self.kernel.restore(&script.to_string()).is_ok() {
            return Vec::new();
        }
        let (writes, deletions) = script.clone().split_deletions();
        self.kernel.restore(&writes.to_string()).unwrap();
        let mut newly_recorded = Vec::new();
        for (table, name) in deletions {
            let is_rejected = self.kernel.restore(&Script::deleting(&[(table, name.clone())]).to_string()).is_err();
            if is_rejected && self.ledger.note_undeletable(table, &name) {
                newly_recorded.push(name);
            }
        }
        newly_recorded
    }

    /// Returns the number of chains written or deleted, and the chains that are newly recorded as
    /// undeletable.
    fn full(&mut self) -> (u32, Vec<String>) {
        let (script, _) = self.ledger.full(&FixedState(&self.state, &NodeFacts::named("n1")), self.existing());
        (script.chains_written() + script.chains_deleted(), self.run(&script))
    }

    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<String> {
        let mut dirty = Dirty::default();
        for change in changes {
            self.state.apply(change, &mut dirty);
        }
        let (script, _) = self.ledger.changed(&self.state, &NodeFacts::named("n1"), &dirty);
        self.run(&script)
    }

    /// True if a full script has nothing to write.
    fn is_intact(&mut self) -> bool {
        self.ledger.full(&FixedState(&self.state, &NodeFacts::named("n1")), self.existing()).0.is_empty()
    }

    /// Changes nat as another program would.
    fn change_by_hand(&mut self, rule: &str) {
        self.kernel.restore(&format!("*nat\n{rule}\nCOMMIT\n")).unwrap();
    }
}

fn web() -> [Change; 2] {
    let port = ServicePort { name: "a".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let key = ServiceKey::new("ns", "web");
    let service = Service::new(key.clone(), vec![IpAddr::from([10, 96, 0, 1])], vec![port]);
    let port = EndpointPort::new("a", Protocol::Tcp, 8080);
    [Change::from(service), Change::Endpoint(key, Endpoint::new(IpAddr::from([10, 244, 0, 1]), [port].into()))]
}

fn removal() -> [Change; 2] {
    let key = ServiceKey::new("ns", "web");
    [Change::RemoveService(key.clone()), Change::RemoveEndpoint(key, IpAddr::from([10, 244, 0, 1]))]
}

#[test]
fn an_undeletable_chain_is_reported_once_and_deleted_when_possible() {
    let config = RenderConfig::new(Family::V4);
    let mut rig =
        Rig { kernel: FakeKernel::default(), ledger: Ledger::new(ruleset(config.clone())), state: State::default() };
    rig.full();
    rig.step(web());
    let save = rig.kernel.save(Table::Nat);
    let chain = save.lines().find_map(|line| line.strip_prefix(":KUBE-SVC-")?.split(' ').next()).unwrap();
    let chain = format!("KUBE-SVC-{chain}");
    rig.change_by_hand(&format!(":SOMEBODY - [0:0]\n-A SOMEBODY -j {chain}"));
    assert!(rig.is_intact(), "a foreign rule must not be reported");
    assert_eq!(rig.step(removal()), [chain.as_str()]);
    for _ in 0..2 {
        assert!(rig.is_intact(), "an undeletable chain must not be reported");
        assert_eq!(rig.full(), (0, Vec::new()), "the deletion must not be tried again while the foreign rule exists");
    }
    // After a restart, the agent tries the deletion once.
    rig.ledger = Ledger::new(ruleset(config));
    assert_eq!(rig.full(), (1, vec![chain.clone()]));
    assert!(rig.is_intact());

    rig.change_by_hand(&format!("-A {chain} -j RETURN"));
    assert_eq!(rig.full(), (1, Vec::new()), "an undeletable chain must be empty");

    // The service is created again, and its chain has rules again.
    rig.step(web());
    assert!(rig.is_intact());
    rig.step(removal());
    assert!(rig.is_intact());

    rig.change_by_hand(&format!("-D SOMEBODY -j {chain}"));
    assert_eq!(rig.full(), (1, Vec::new()), "the chain can be deleted now");
    assert!(rig.is_intact() && !rig.kernel.save(Table::Nat).contains(&chain));
}
