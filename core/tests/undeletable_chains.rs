//! Chains of ours that somebody else's rules lead to: they stay as long as that is so, empty, and
//! are nothing to repair.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, Protocol, Service, ServiceKey, ServicePort, State,
    iptables::{ExistingTables, Ledger, RenderConfig, Script, Table, fake_kernel::FakeKernel, ruleset},
    view::NodeFacts,
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

    /// Runs a script as a backend does: what the kernel does not delete is left, and noted. Returns
    /// the chains that are news.
    fn run(&mut self, script: &Script) -> Vec<String> {
        if self.kernel.restore(&script.to_string()).is_ok() {
            return Vec::new();
        }
        let (writes, deletions) = script.clone().split_deletions();
        self.kernel.restore(&writes.to_string()).unwrap();
        let mut news = Vec::new();
        for (table, name) in deletions {
            let refused = self.kernel.restore(&Script::deleting(&[(table, name.clone())]).to_string()).is_err();
            if refused && self.ledger.note_undeletable(table, &name) {
                news.push(name);
            }
        }
        news
    }

    /// Returns the chains written or deleted, and the chains that are left and were not known to
    /// be.
    fn full(&mut self) -> (u32, Vec<String>) {
        let (script, _) = self.ledger.full(&self.state, &NodeFacts::named("n1"), &self.existing());
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

    fn is_intact(&self) -> bool {
        self.ledger.matches(&self.existing())
    }

    fn by_hand(&mut self, rule: &str) {
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
fn a_chain_that_somebody_else_leads_to_is_named_once_and_goes_when_it_can() {
    let config = RenderConfig::new(Family::V4);
    let mut rig =
        Rig { kernel: FakeKernel::default(), ledger: Ledger::new(ruleset(config.clone())), state: State::default() };
    rig.full();
    rig.step(web());
    let save = rig.kernel.save(Table::Nat);
    let chain = save.lines().find_map(|line| line.strip_prefix(":KUBE-SVC-")?.split(' ').next()).unwrap();
    let chain = format!("KUBE-SVC-{chain}");
    rig.by_hand(&format!(":SOMEBODY - [0:0]\n-A SOMEBODY -j {chain}"));
    assert!(rig.is_intact(), "a rule of somebody else's is nothing to repair");
    assert_eq!(rig.step(removal()), [chain.as_str()]);
    for _ in 0..2 {
        assert!(rig.is_intact(), "a chain that cannot be deleted is nothing to repair");
        assert_eq!(rig.full(), (0, Vec::new()), "it is not tried again as long as the rule is there");
    }
    // An agent that starts anew finds out for itself, once.
    rig.ledger = Ledger::new(ruleset(config));
    assert_eq!(rig.full(), (1, vec![chain.clone()]));
    assert!(rig.is_intact());

    rig.by_hand(&format!("-A {chain} -j RETURN"));
    assert!(!rig.is_intact(), "a chain that is left has to be empty");
    assert_eq!(rig.full(), (1, Vec::new()));

    // The service comes back, and its chain is an ordinary one again.
    rig.step(web());
    assert!(rig.is_intact());
    rig.step(removal());
    assert!(rig.is_intact());

    rig.by_hand(&format!("-D SOMEBODY -j {chain}"));
    assert!(!rig.is_intact(), "nothing keeps the chain any more");
    assert_eq!(rig.full(), (1, Vec::new()));
    assert!(rig.is_intact() && !rig.kernel.save(Table::Nat).contains(&chain));
}
