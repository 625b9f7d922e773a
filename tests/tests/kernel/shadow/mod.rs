//! The oracle reads the rules of kube-proxy (`docs/shadow.md`): recorded ones in namespaces, and
//! those of a live one after random changes.
//!
//! The live tests need `kube-proxy` beside `etcd` and `kube-apiserver` in the folder that
//! `KUBEBUILDER_ASSETS` names. `HEADGATE_CHANGES` sets the number of changes, and `HEADGATE_SEED`
//! the random numbers. `HEADGATE_RECORD` names a folder for the rules of the services of
//! [`catalogue`].

mod world;

use std::{
    env, fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use headgate_core::{Family, NodeFacts, State};
use headgate_node_agent::dataplane::other_rules::OtherRules;
use headgate_oracle::{Comparison, compare, iptables};
use headgate_tests::testbed::{
    Machines, Manifests, Namespace,
    kube_proxy::{self, Mode, RealKubeProxies},
    manifests::{Service, ServiceType},
};

use self::world::{NODE, World, catalogue, facts, settings, state_of_catalogue};
use crate::mirrored;

/// The number of random changes without `HEADGATE_CHANGES`, and how many kube-proxy gets at once.
const CHANGES: usize = 60;
const AT_ONCE: usize = 10;

/// How long kube-proxy may take to write its rules.
const PATIENCE: Duration = Duration::from_secs(60);

/// Compares the rules of kube-proxy in the calling thread's namespace.
fn verify(rules: &mut OtherRules, state: &State, facts: &NodeFacts) -> Result<Comparison> {
    let (settings, mut all) = (settings(), Comparison::default());
    for family in Family::BOTH {
        let table = rules.decode(family, settings.masquerade.detector(family))?;
        all.merge(compare(state, facts, &settings, table, &|_| true));
    }
    Ok(all)
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    let differences = comparison.differences.iter().map(ToString::to_string);
    differences.chain(comparison.not_understood.iter().cloned()).collect()
}

/// A live kube-proxy.
struct Live {
    machines: Machines,
    world: World,
    rules: OtherRules,
    kube_proxy: headgate_tests::testbed::process::Process,
    // Fields are dropped in order, so the API server stops last.
    _server: RealKubeProxies,
}

impl Live {
    fn start(assets: &Path, mode: Mode) -> Result<Self> {
        let mut manifests = Manifests::default();
        // The API server assigns the first address of the range to the Service `kubernetes`.
        manifests.add(Service { service_type: ServiceType::ExternalName, ..Service::new("first", &[]) })?;
        let machines = Machines::start()?;
        let server = RealKubeProxies::start(&machines, assets, &manifests)?;
        let world = World::new(&machines, &fs::read_to_string(server.kubeconfig())?)?;
        let kube_proxy = server.run(&machines, NODE, mode)?;
        Ok(Self { machines, world, rules: OtherRules::default(), kube_proxy, _server: server })
    }

    fn node(&self) -> Result<&Namespace> {
        self.machines.machine(NODE)
    }

    fn verify(&mut self) -> Result<Comparison> {
        let Self { machines, world, rules, .. } = self;
        machines.machine(NODE)?.run(|| verify(rules, &world.state, &facts()))
    }

    /// Waits until the rules agree with the state. Returns how long this took.
    fn agree(&mut self, what: &str) -> Result<(Duration, Comparison)> {
        let started = Instant::now();
        loop {
            let read = self.verify();
            let (is_late, is_equal) = (started.elapsed() > PATIENCE, read.as_ref().is_ok_and(is_equal));
            match read {
                Ok(comparison) if is_equal => return Ok((started.elapsed(), comparison)),
                // kube-proxy may remove a set while it is read.
                Err(error) if is_late => return Err(error).with_context(|| what.to_owned()),
                Ok(comparison) => ensure!(!is_late, "{what}: {:#?}", sentences(&comparison)),
                Err(_) => {}
            }
            self.kube_proxy.check_running()?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs a command on the node that breaks the rules, which must be found.
    fn corrupt(&mut self, what: &str, command: &str) -> Result<()> {
        self.node()?.tool("sh", &["-c", command]).with_context(|| what.to_owned())?;
        let comparison = self.verify()?;
        let named: Vec<String> = comparison.services().iter().map(ToString::to_string).collect();
        ensure!(named == ["shop/svc0"], "{what}: {named:?} {:#?}", sentences(&comparison));
        println!("{what}: {}", sentences(&comparison).join("; "));
        Ok(())
    }
}

fn is_equal(comparison: &Comparison) -> bool {
    comparison.total == 0 && comparison.not_understood.is_empty()
}

/// Random changes, after which the rules agree, and then rules that somebody else changes.
fn audit(mode: Mode, name: &str, corruptions: &[(&str, &str)]) {
    let Some(assets) = kube_proxy::assets() else { return };
    let mut live = Live::start(&assets, mode).unwrap();
    let mut rng = mirrored::rng();
    for (number, bits, endpoints) in catalogue() {
        live.world.set_service(number, bits).unwrap();
        live.world.set_endpoints(number, endpoints).unwrap();
    }
    let (_, comparison) = live.agree("the catalogue").unwrap();
    assert!(comparison.by_design_total > 0, "{comparison:?}");
    if let Some(folder) = env::var_os("HEADGATE_RECORD") {
        record(&live, mode, name, Path::new(&folder)).unwrap();
    }
    let count = env::var("HEADGATE_CHANGES").map_or(CHANGES, |count| count.parse().unwrap());
    let (mut done, mut frontends, mut by_design, mut longest) = (0, 0, 0, Duration::ZERO);
    while done < count {
        let changes: Vec<String> =
            (0..AT_ONCE.min(count - done)).map(|_| live.world.change(&mut rng).unwrap()).collect();
        done += changes.len();
        let (took, comparison) = live.agree(&format!("{done} changes, the last {changes:?}")).unwrap();
        frontends += comparison.frontends;
        by_design += comparison.by_design_total;
        longest = longest.max(took);
    }
    println!(
        "{name}: {done} changes, {frontends} comparisons of addresses and NodePorts, no false alarm, {by_design} differences by design, at most {longest:?} until the rules agreed"
    );
    for (number, bits, endpoints) in catalogue().into_iter().take(1) {
        live.world.set_service(number, bits).unwrap();
        live.world.set_endpoints(number, endpoints).unwrap();
    }
    live.agree("before rules are changed").unwrap();
    for (what, command) in corruptions {
        live.corrupt(what, command).unwrap();
    }
}

fn record(live: &Live, mode: Mode, name: &str, folder: &Path) -> Result<()> {
    for family in Family::BOTH {
        let command = match (mode, family) {
            (Mode::Nftables, Family::V4) => "nft list table ip kube-proxy",
            (Mode::Nftables, Family::V6) => "nft list table ip6 kube-proxy",
            (Mode::IptablesLegacy, Family::V4) => "iptables-legacy-save",
            (Mode::IptablesLegacy, Family::V6) => "ip6tables-legacy-save",
            (_, Family::V4) => "iptables-nft-save",
            (_, Family::V6) => "ip6tables-nft-save",
        };
        let text = live.node()?.tool("sh", &["-c", command])?;
        let words = env::var("HEADGATE_RECORD_VERSION").unwrap_or_default();
        let text = format!("# {words}, mode {}, recorded from a live kube-proxy by `{command}`\n{text}", mode.name());
        fs::write(folder.join(format!("{name}-{}.rules", family.to_string().to_lowercase())), text)?;
    }
    Ok(())
}

/// The rules of `svc0` lose an endpoint, keep one that is gone, and answer another NodePort. `IPT`
/// and `SAVE` are the programs.
const OF_IPTABLES: [(&str, &str); 3] = [
    (
        "a rule that is gone",
        "chain=$($SAVE -t nat | grep -o 'shop/svc0:web -> .* -j KUBE-SEP-[A-Z0-9]*' | grep -o 'KUBE-SEP.*' | head -n 1); \
         $IPT -t nat -F $chain",
    ),
    (
        "a stale endpoint",
        "chain=$($SAVE -t nat | grep -o 'shop/svc0:web -> .* -j KUBE-SEP-[A-Z0-9]*' | grep -o 'KUBE-SEP.*' | head -n 1); \
         $IPT -t nat -A $chain -p tcp -j DNAT --to-destination 10.244.99.99:8080",
    ),
    (
        "a wrong NodePort",
        "rule=$($SAVE -t nat | grep -e '-A KUBE-NODEPORTS .*shop/svc0:web' | grep -v 127.0.0.0 | sed 's/-A KUBE-NODEPORTS//'); \
         eval $IPT -t nat -D KUBE-NODEPORTS $rule; \
         eval $IPT -t nat -A KUBE-NODEPORTS $(echo \"$rule\" | sed 's/--dport [0-9]*/--dport 32123/')",
    ),
];

fn with_programs(programs: &str) -> Vec<(&'static str, String)> {
    OF_IPTABLES.iter().map(|(what, command)| (*what, format!("{programs}; {command}"))).collect()
}

fn audit_iptables(mode: Mode, name: &str, programs: &str) {
    let corruptions = with_programs(programs);
    let corruptions: Vec<(&str, &str)> = corruptions.iter().map(|(what, command)| (*what, &**command)).collect();
    audit(mode, name, &corruptions);
}

#[test]
fn rules_of_a_live_kube_proxy_are_verified_in_mode_iptables() {
    audit_iptables(Mode::Iptables, "iptables-nft", "IPT=iptables-nft SAVE=iptables-nft-save");
}

#[test]
fn rules_of_a_live_kube_proxy_are_verified_in_mode_iptables_with_the_legacy_programs() {
    audit_iptables(Mode::IptablesLegacy, "iptables-legacy", "IPT=iptables-legacy SAVE=iptables-legacy-save");
}

#[test]
fn rules_of_a_live_kube_proxy_are_verified_in_mode_nftables() {
    let chain = "chain=$(nft list chains ip | grep -o 'service-[^ ]*shop/svc0/tcp/web' | head -n 1)";
    let stale = format!(
        "{chain}; nft flush chain ip kube-proxy \"$chain\"; \
         nft add rule ip kube-proxy \"$chain\" meta l4proto tcp dnat to 10.244.99.99:8080"
    );
    let port = "chain=$(nft list map ip kube-proxy service-nodeports | grep -o 'tcp . 30000[^,}]*goto [^ ,}]*' | grep -o 'external-[^ ]*'); \
                nft delete element ip kube-proxy service-nodeports { tcp . 30000 }; \
                nft add element ip kube-proxy service-nodeports { tcp . 32123 : goto \"$chain\" }";
    let rule = format!("{chain}; nft flush chain ip kube-proxy \"$chain\"");
    let corruptions = [("a rule that is gone", &*rule), ("a stale endpoint", &*stale), ("a wrong NodePort", port)];
    audit(Mode::Nftables, "nftables", &corruptions);
}

/// Verifies recorded rules of the catalogue, and changed ones.
fn verify_text(text: &str, family: Family) -> Comparison {
    let mut rules = iptables::Rules::default();
    text.lines().for_each(|line| rules.line(line));
    let settings = settings();
    let table = iptables::decode_kube_proxy(&rules, family, settings.masquerade.detector(family));
    compare(&state_of_catalogue(), &facts(), &settings, table, &|_| true)
}

fn recorded(name: &str, family: Family) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel/shadow");
    fs::read_to_string(folder.join(format!("{name}-{}.rules", family.to_string().to_lowercase()))).unwrap()
}

#[test]
fn recorded_rules_of_mode_iptables_agree_and_changed_ones_do_not() {
    for name in ["iptables-nft", "iptables-legacy"] {
        for family in Family::BOTH {
            let text = recorded(name, family);
            let comparison = verify_text(&text, family);
            assert!(is_equal(&comparison) && comparison.frontends > 20, "{name} {:#?}", sentences(&comparison));
            assert!(comparison.by_design_total > 0, "{name} {family}");
            // Without a line of the table nat or filter that decides about packets, some Service
            // differs. These variants are made by hand.
            let lines: Vec<&str> = text.lines().collect();
            for (number, line) in lines.iter().enumerate() {
                let decides =
                    ["-j KUBE-S", "-j KUBE-EXT", "-j KUBE-FW", "-j DNAT"].iter().any(|part| line.contains(part));
                // These decide nothing: loopback addresses, recorded clients, and load balancer
                // addresses as sources.
                let is_idle =
                    ["127.0.0.0/8", "--rcheck", "-s 203.0.11", "-s 2001:db8:b:"].iter().any(|part| line.contains(part));
                if !line.starts_with("-A KUBE") || !decides || is_idle {
                    continue;
                }
                let without: Vec<&str> = [&lines[..number], &lines[number + 1..]].concat();
                let comparison = verify_text(&without.join("\n"), family);
                assert!(comparison.total > 0, "{name} {family} without {line}");
            }
        }
    }
}

#[test]
fn recorded_rules_of_mode_nftables_agree_and_changed_ones_do_not() {
    let namespace = Namespace::for_test("shadow").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let load = |text: &str| {
        let file = folder.path().join("rules");
        fs::write(&file, text).unwrap();
        namespace.tool("nft", &["-f", file.to_str().unwrap()]).unwrap();
    };
    let both = || Family::BOTH.map(|family| recorded("nftables", family)).concat();
    let verified = || {
        let (mut rules, state) = (OtherRules::default(), state_of_catalogue());
        namespace.run(|| verify(&mut rules, &state, &facts())).unwrap()
    };
    load(&both());
    let comparison = verified();
    assert!(is_equal(&comparison) && comparison.frontends > 40, "{:#?}", sentences(&comparison));
    assert!(comparison.by_design_total > 0, "{comparison:?}");
    // These variants are made by hand.
    for (what, old, new) in [
        ("an endpoint", "10.244.10.1 . 8080", "10.244.10.9 . 8080"),
        ("a source range", "198.51.100.0/24", "198.51.101.0/24"),
        ("an element", "10.96.1.0 . tcp . 80", "10.96.1.0 . tcp . 81"),
        ("a NodePort", "tcp . 30000", "tcp . 32000"),
    ] {
        let text = both();
        assert!(text.contains(old), "{what}");
        load(&("flush ruleset\n".to_owned() + &text.replace(old, new)));
        assert!(verified().total > 0, "{what}");
    }
}
