//! Quarantine: if the kernel rejects the rules of a service, its last good rules stay, and the
//! rules of other services are programmed.
#![allow(clippy::unwrap_used)]

mod fake_kernel;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use fake_kernel::iptables::FakeKernel;
use headgate_core::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Protocol, Service,
    ServiceKey, ServicePort, State,
    iptables::{ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, Script, names::CANARY, ruleset},
};

/// A kernel that rejects the match `recent`, with a ledger.
struct Rig {
    kernel: FakeKernel,
    ledger: RulesLedger,
    state: State,
}

impl Rig {
    fn new(layout: Layout) -> Self {
        let ledger = RulesLedger::new(ruleset(RenderConfig { layout, ..RenderConfig::new(Family::V4) }));
        let mut rig = Self { kernel: FakeKernel::default(), ledger, state: State::default() };
        assert!(rig.full());
        rig
    }

    /// Runs a script. Returns false if the kernel rejects it. The part for one table takes effect
    /// completely or not at all.
    fn run(&mut self, script: &Script) -> bool {
        let parts = script.to_string();
        let mut parts = parts.split_inclusive("COMMIT\n");
        parts.all(|part| !part.contains("-m recent") && self.kernel.restore(part).is_ok())
    }

    fn run_and_confirm(&mut self, script: &Script) -> bool {
        let is_accepted = self.run(script);
        if is_accepted {
            self.ledger.confirm();
        }
        is_accepted
    }

    fn full(&mut self) -> bool {
        let existing = ExistingTables::parse(&RulesTable::ALL.map(|table| self.kernel.save(table)).concat());
        let (script, _) = self.ledger.full(&FixedState(&self.state, &node()), existing);
        self.run_and_confirm(&script)
    }

    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> bool {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut dirty));
        let (script, _) = self.ledger.changed(&self.state, &node(), &dirty);
        self.run_and_confirm(&script)
    }

    /// Returns whether the kernel accepts a trial of these services.
    fn accepts(&mut self, names: &[&str]) -> bool {
        let keys: Vec<Arc<ServiceKey>> = names.iter().map(|name| Arc::new(key(name))).collect();
        let trial = self.ledger.trial(&self.state, &node(), &keys);
        self.run(&trial)
    }

    fn quarantine(&mut self, names: &[&str]) {
        let services: BTreeSet<_> = names.iter().map(|name| Arc::new(key(name))).collect();
        self.ledger.set_quarantined(&services);
    }

    /// Returns the lines of the kernel's rules that contain a text.
    fn rules(&self, text: &str) -> Vec<String> {
        let saves = RulesTable::ALL.map(|table| self.kernel.save(table)).concat();
        saves.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Returns the lines with the addresses of a service, and the lines of the chains to which
    /// these rules jump. Lines of trials are not included.
    fn rules_of(&self, name: &str) -> Vec<String> {
        let mut lines = self.rules("");
        lines.retain(|line| !line.contains(CANARY));
        let mut words: BTreeSet<String> = addresses(name).map(|address| format!("{address}/32")).into();
        loop {
            let has_word = |line: &&String| line.split(' ').any(|word| words.contains(word.trim_start_matches(':')));
            let found: Vec<String> = lines.iter().filter(has_word).cloned().collect();
            let chains = found.iter().flat_map(|line| line.split(' ')).filter(|word| is_chain_of_service(word));
            let before = words.len();
            words = chains.map(str::to_owned).chain(words.clone()).collect();
            if words.len() == before {
                return found;
            }
        }
    }
}

fn node() -> NodeFacts {
    NodeFacts::named("n1")
}

fn key(name: &str) -> ServiceKey {
    ServiceKey::new("ns", name)
}

/// Returns the ClusterIP and the externalIP of a service.
fn addresses(name: &str) -> [IpAddr; 2] {
    let low = name.bytes().last().unwrap();
    [IpAddr::from([10, 96, 0, low]), IpAddr::from([192, 0, 2, low])]
}

/// Returns whether a word is the name of a chain that belongs to a single service.
fn is_chain_of_service(word: &str) -> bool {
    let prefixes = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"];
    // The names of dispatch groups contain another dash.
    prefixes.iter().find_map(|prefix| word.strip_prefix(prefix)).is_some_and(|hash| !hash.contains('-'))
}

fn service(name: &str, has_affinity: bool) -> Change {
    let port = ServicePort { name: "a".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let [cluster_ip, external_ip] = addresses(name);
    let mut service = Service::new(key(name), vec![cluster_ip], vec![port]);
    service.external_ips = vec![external_ip];
    service.session_affinity = has_affinity.then_some(ClientIpAffinity { timeout_seconds: 10 });
    Change::from(service)
}

fn endpoint(name: &str, low: u8) -> Change {
    let ports = [EndpointPort::new("a", Protocol::Tcp, 8080)];
    Change::Endpoint(key(name), Endpoint::new(IpAddr::from([10, 244, 0, low]), ports.into()))
}

const LAYOUTS: [Layout; 2] = [Layout::Classic, Layout::Compact];

#[test]
fn a_rejected_service_keeps_its_last_good_rules_and_other_services_change() {
    for layout in LAYOUTS {
        let mut rig = Rig::new(layout);
        assert!(rig.step([service("web", false), endpoint("web", 1), service("api", false), endpoint("api", 2)]));
        let good = rig.rules_of("web");
        assert!(good.iter().any(|rule| rule.contains("-d 10.96.0.98/32")), "{good:?}");
        assert!(good.iter().any(|rule| rule.contains("--to-destination 10.244.0.1:8080")), "{good:?}");
        assert!(!rig.step([service("web", true), endpoint("web", 3), endpoint("api", 4)]), "the kernel accepted it");

        assert!(!rig.accepts(&["web", "api"]) && !rig.accepts(&["web"]) && rig.accepts(&["api"]));
        assert_eq!(rig.rules_of("web"), good, "{layout:?}");
        rig.quarantine(&["web"]);
        assert!(rig.full());
        assert_eq!(rig.rules_of("web"), good, "{layout:?}");
        assert_eq!(rig.rules("--to-destination 10.244.0.1:8080").len(), 1);
        assert!(rig.rules("--to-destination 10.244.0.3:8080").is_empty());
        assert_eq!(rig.rules("--to-destination 10.244.0.4:8080").len(), 1);

        // Steps skip the quarantined service, and dispatch chains keep its lines.
        assert!(rig.step([endpoint("web", 5), service("new", false), endpoint("new", 6)]));
        assert_eq!(rig.rules_of("web"), good);
        assert!(rig.full() && rig.rules_of("web") == good);

        // The service changes, and the kernel accepts its rules again.
        assert!(!rig.accepts(&["web"]));
        let mut dirty = Dirty::default();
        rig.state.apply(service("web", false), &mut dirty);
        assert!(rig.accepts(&["web"]) && rig.run(&RulesLedger::end_of_trials()));
        rig.quarantine(&[]);
        assert!(rig.step([endpoint("web", 7), service("web", false)]));
        assert_eq!(rig.rules("--to-destination 10.244.0.7:8080").len(), 1);
        let mut fresh = Rig::new(layout);
        fresh.state = std::mem::take(&mut rig.state);
        assert!(fresh.full());
        assert_eq!(
            rig.kernel.save(RulesTable::Nat),
            fresh.kernel.save(RulesTable::Nat),
            "no rules of trials must be left"
        );
        assert_eq!(rig.kernel.save(RulesTable::Filter), fresh.kernel.save(RulesTable::Filter));
    }
}

#[test]
fn a_rejected_service_without_good_rules_has_no_rules() {
    for layout in LAYOUTS {
        let mut rig = Rig::new(layout);
        for change in [service("web", true), endpoint("web", 1), service("api", false), endpoint("api", 2)] {
            rig.state.apply(change, &mut Dirty::default());
        }
        assert!(!rig.full());
        assert!(rig.accepts(&["api"]) && !rig.accepts(&["web"]));
        rig.quarantine(&["web"]);
        assert!(rig.full());
        assert!(rig.rules_of("web").is_empty() && rig.rules("--to-destination 10.244.0.1:").is_empty());
        assert_eq!(rig.rules("--to-destination 10.244.0.2:8080").len(), 1);
        // Removing the service leaves no rules.
        rig.quarantine(&[]);
        assert!(rig.step([Change::RemoveService(key("web"))]));
        assert!(rig.rules_of("web").is_empty());
    }
}

#[test]
fn last_good_rules_that_are_no_longer_in_the_kernel_are_forgotten() {
    let mut rig = Rig::new(Layout::Classic);
    assert!(rig.step([service("web", false), endpoint("web", 1), service("api", false), endpoint("api", 2)]));
    assert!(!rig.step([service("web", true)]));
    rig.quarantine(&["web"]);
    let fresh = Rig::new(Layout::Classic);
    rig.kernel = fresh.kernel;
    assert!(rig.full());
    assert!(rig.rules_of("web").is_empty() && rig.rules_of("api").len() > 1);
}
