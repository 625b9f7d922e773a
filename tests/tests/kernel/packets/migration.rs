//! Nodes that move from kube-proxy to Headgate and back, and between modes on kernels that have
//! both IPVS and nftables.

use headgate_tests::cases::{from_kube_proxy, takeover};
use headgate_tests::testbed::kube_proxy::Mode;

use super::*;

fn there_and_back(from: Mode, to: Backend) {
    let bed = from_kube_proxy::services().and_then(|services| Testbed::machines_only(to, services));
    on(bed, |bed| from_kube_proxy::there_and_back(bed, from, to));
}

fn standby_and_back(from: Mode, to: Backend) {
    let bed = from_kube_proxy::services().and_then(|services| Testbed::machines_only(to, services));
    on(bed, |bed| from_kube_proxy::standby_and_back(bed, from, to));
}

#[test]
fn standby_beside_kube_proxy_ipvs() {
    uml::inside(|| standby_and_back(Mode::Ipvs, Backend::Ipvs));
}

#[test]
fn standby_beside_kube_proxy_nftables() {
    standby_and_back(Mode::Nftables, Backend::Nftables);
}

macro_rules! migrations {
    ($($name:ident: $from:expr, $to:expr;)*) => { $(
        #[test]
        fn $name() {
            there_and_back($from, $to);
        }
    )* };
}

#[test]
fn kube_proxy_iptables_to_ipvs_and_back() {
    uml::inside(|| there_and_back(Mode::IptablesLegacy, Backend::Ipvs));
}

#[test]
fn kube_proxy_ipvs_to_ipvs_and_back() {
    uml::inside(|| there_and_back(Mode::Ipvs, Backend::Ipvs));
}

#[test]
fn kube_proxy_ipvs_to_iptables_and_back() {
    uml::inside(|| there_and_back(Mode::Ipvs, Backend::IptablesLegacy));
}

#[test]
fn kube_proxy_ipvs_to_userspace_behind_iptables_and_back() {
    uml::inside(|| there_and_back(Mode::Ipvs, Backend::UserspaceIptables));
}

#[test]
fn kube_proxy_ipvs_to_nftables_and_back() {
    if from_kube_proxy::has_ipvs() {
        there_and_back(Mode::Ipvs, Backend::Nftables);
    }
}

#[test]
fn kube_proxy_ipvs_to_userspace_and_back() {
    if from_kube_proxy::has_ipvs() {
        there_and_back(Mode::Ipvs, Backend::Userspace);
    }
}

#[test]
fn kube_proxy_nftables_to_ipvs_and_back() {
    if from_kube_proxy::has_ipvs() {
        there_and_back(Mode::Nftables, Backend::Ipvs);
    }
}

migrations! {
    kube_proxy_iptables_to_iptables_and_back: Mode::Iptables, Backend::IptablesNft;
    kube_proxy_iptables_to_nftables_and_back: Mode::Iptables, Backend::Nftables;
    kube_proxy_iptables_to_userspace_and_back: Mode::Iptables, Backend::Userspace;
    kube_proxy_legacy_iptables_to_iptables_and_back: Mode::IptablesLegacy, Backend::IptablesLegacy;
    kube_proxy_legacy_iptables_to_nftables_and_back: Mode::IptablesLegacy, Backend::Nftables;
    kube_proxy_legacy_iptables_to_userspace_and_back: Mode::IptablesLegacy, Backend::Userspace;
    kube_proxy_legacy_iptables_to_userspace_behind_iptables_and_back: Mode::IptablesLegacy, Backend::UserspaceIptables;
    kube_proxy_nftables_to_iptables_and_back: Mode::Nftables, Backend::IptablesNft;
    kube_proxy_nftables_to_nftables_and_back: Mode::Nftables, Backend::Nftables;
    kube_proxy_nftables_to_userspace_and_back: Mode::Nftables, Backend::Userspace;
    kube_proxy_nftables_to_userspace_behind_iptables_and_back: Mode::Nftables, Backend::UserspaceIptables;
}

fn to_ipvs_and_back(from: Backend) {
    let bed = lifecycle::some_services().and_then(|services| Testbed::machines_only(Backend::Ipvs, services));
    on(bed, |bed| takeover::to_ipvs_and_back(bed, from));
}

#[test]
fn nftables_to_ipvs_and_back() {
    if from_kube_proxy::has_ipvs() {
        to_ipvs_and_back(Backend::Nftables);
    }
}

#[test]
fn userspace_to_ipvs_and_back() {
    if from_kube_proxy::has_ipvs() {
        to_ipvs_and_back(Backend::Userspace);
    }
}

#[test]
fn userspace_behind_iptables_to_ipvs_and_back() {
    uml::inside(|| to_ipvs_and_back(Backend::UserspaceIptables));
}
