//! Compares mode nftables on node-a with mode iptables on node-b. See [`crate::mirrored`].

use std::collections::BTreeSet;

use headgate_tests::testbed::manifests::{Service, Via};
use headgate_tests::testbed::{AgentSetup, Backend, Manifests, Testbed, netns};

use crate::mirrored::{self, Question, Seen};

/// The number of random Services. Each random Service also has a mirror image.
const PAIRS: usize = 10;

#[test]
fn nftables_and_iptables_serve_random_services_alike() {
    netns::check_prerequisites().unwrap();
    let mut rng = mirrored::rng();
    let mut manifests = Manifests::default();
    let names = mirrored::add_pairs(&mut manifests, PAIRS, &mut rng);
    let bed = Testbed::machines_only(Backend::Nftables, manifests.clone()).unwrap();
    bed.start_control_plane().unwrap();
    bed.start_agent("node-a").unwrap();
    let setup = AgentSetup { backend: Some(Backend::IptablesLegacy), ..AgentSetup::default() };
    bed.start_agent_with("node-b", &setup).unwrap();
    bed.wait_programmed().unwrap();
    mirrored::compare_all(bed.machines(), &manifests, &names, &mut rng, is_outside_of_ranges);
}

/// Rules of nftables check the ranges of a load balancer's clients also without endpoints, as in
/// kube-proxy's modes.
fn is_outside_of_ranges(
    service: &Service,
    question: Question,
    nftables: &BTreeSet<Seen>,
    iptables: &BTreeSet<Seen>,
) -> bool {
    let has_ranges = question.via == Via::LoadBalancerIp && !service.source_ranges.is_empty();
    has_ranges && *nftables == [Seen::TimedOut].into() && *iptables == [Seen::Refused].into()
}
