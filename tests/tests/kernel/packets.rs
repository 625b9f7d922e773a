//! Packet cases for every backend. Each test runs the real programs and sockets in a cluster of
//! network namespaces.

mod migration;

use anyhow::Result;
use headgate_tests::cases::{
    self, affinity, explained, health, lifecycle, lifecycle::some_services, payloads, raw, rollout, rules, settings,
    shared, table,
};
use headgate_tests::testbed::{Backend, Manifests, Testbed};
use headgate_tests::uml;

/// Panics with the whole error, one cause per line. After a panic the testbed keeps its logs.
fn check(result: Result<()>) {
    if let Err(error) = result {
        panic!("{error:?}");
    }
}

/// Runs a scenario on a running cluster with `manifests`.
fn on_testbed(backend: Backend, manifests: Result<Manifests>, scenario: impl FnOnce(&Testbed) -> Result<()>) {
    where_it_runs(backend, || on(manifests.and_then(|manifests| Testbed::start(backend, manifests)), scenario));
}

/// Runs a scenario that starts the programs itself.
fn on_machines(backend: Backend, manifests: Result<Manifests>, scenario: impl FnOnce(&Testbed) -> Result<()>) {
    where_it_runs(backend, || on(manifests.and_then(|manifests| Testbed::machines_only(backend, manifests)), scenario));
}

fn where_it_runs(backend: Backend, test: impl FnOnce()) {
    if backend.runs_in_uml() { uml::inside(test) } else { test() }
}

/// Runs a scenario. Panics on failure while the testbed still exists, so that the logs are kept.
fn on(bed: Result<Testbed>, scenario: impl FnOnce(&Testbed) -> Result<()>) {
    match bed {
        Ok(bed) => check(scenario(&bed)),
        Err(error) => check(Err(error)),
    }
}

/// The parts of a test that share a cluster. Each part has a cluster of its own in User-Mode Linux,
/// whose kernel tracks few connections, and in mode userspace, whose agents carry few UDP sessions
/// with the limit of open files of a test.
fn sharing<T>(backend: Backend, parts: &[T]) -> std::slice::Chunks<'_, T> {
    let is_small = backend.runs_in_uml() || backend == Backend::Userspace;
    parts.chunks(if is_small { 1 } else { parts.len() })
}

/// Runs the case table with agents that have the rights of the manifests. The agents must also
/// explain the packets of all cases.
fn whole_table(backend: Backend) {
    where_it_runs(backend, || {
        for groups in sharing(backend, &table::GROUPS) {
            on(table::services().and_then(|services| Testbed::start_in_containers(backend, services)), |bed| {
                let cases: Vec<_> = groups.iter().flat_map(|(_, cases)| cases()).collect();
                cases::run(bed, &cases)?;
                explained::agree(bed, &cases)
            });
        }
    });
}

/// Runs the scenarios of a test of `shared::TESTS`.
fn in_turn(backend: Backend, test: &str) {
    let (_, scenarios) = shared::TESTS.iter().find(|(name, _)| *name == test).unwrap();
    where_it_runs(backend, || {
        for scenarios in sharing(backend, scenarios) {
            on(Testbed::start(backend, Manifests::default()), |bed| shared::in_turn(bed, scenarios));
        }
    });
}

fn nothing() -> Result<Manifests> {
    Ok(Manifests::default())
}

/// Declares a test for each scenario: the function in `headgate_tests::cases`, which names the
/// test, how it runs, and the manifests.
macro_rules! scenarios {
    ($backend:expr; $($module:ident::$name:ident: $run:ident($manifests:expr);)*) => { $(
        #[test]
        fn $name() {
            $run($backend, $manifests, $module::$name);
        }
    )* };
}

macro_rules! packet_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            const BACKEND: Backend = $backend;

            #[test]
            fn the_table() {
                whole_table(BACKEND);
            }

            #[test]
            fn objects_change() {
                in_turn(BACKEND, "objects_change");
            }

            #[test]
            fn services_change_in_use() {
                in_turn(BACKEND, "services_change_in_use");
            }

            // rows: 73, 74, 75, 77, 78
            // rows of iptables: 76
            #[test]
            fn affinity() {
                on_testbed(BACKEND, table::services(), |bed| {
                    affinity::a_client_stays_with_its_server(bed)?;
                    affinity::affinity_ends_after_its_timeout(bed)?;
                    affinity::affinity_can_be_turned_on_and_off(bed)
                });
            }

            // rows: 22, 38, 52, 53, 54, 73, 75, 76, 77
            #[test]
            fn affinity_with_local_policies() {
                on_testbed(BACKEND, nothing(), affinity::with_local_policies);
            }

            scenarios! { BACKEND;
                // rows: 37
                payloads::large_payloads: on_testbed(table::services());
                // rows: 31, 32, 33, 34, 35, 51, 54, 55, 90
                settings::masquerading: on_machines(settings::services());
                rules::host_bits_of_ranges_are_cleared: on_machines(some_services());
                // rows: 57
                raw::a_node_gets_an_icmp_refusal: on_testbed(nothing());
                // rows: 17
                rules::no_sctp_sockets: on_machines(some_services());
                // rows: 87, 109
                raw::a_packet_outside_the_window_does_not_end_a_connection: on_testbed(nothing());
                rollout::pods_that_ask_before_they_stop_lose_no_connection: on_machines(nothing());
            }

            #[test]
            fn health_checks() {
                on_testbed(BACKEND, nothing(), health::refusing_endpoints_are_left_out);
            }
        }
    )* };
}

/// Tests of connections that survive the agent. In mode userspace, the agent carries connections.
macro_rules! survival_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            const BACKEND: Backend = $backend;

            scenarios! { BACKEND;
                // rows: 89, 92
                lifecycle::connections_survive: on_testbed(some_services());
                // rows: 89, 92
                lifecycle::control_plane_outage: on_machines(some_services());
                // rows: 89, 92, 98
                lifecycle::agent_crash: on_testbed(some_services());
            }
        }
    )* };
}

/// Tests of rules that accept packets. The backend nftables does not run these tests, because a
/// table of nftables cannot accept a packet that another table drops.
macro_rules! accept_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            const BACKEND: Backend = $backend;

            scenarios! { BACKEND;
                // rows: 36
                settings::a_pod_reaches_itself_where_forwarding_is_denied: on_testbed(nothing());
            }
        }
    )* };
}

/// Tests of behaviour that only iptables has.
macro_rules! rule_tests {
    ($($module:ident: $backend:expr;)*) => { $(
        mod $module {
            use super::*;

            const BACKEND: Backend = $backend;

            scenarios! { BACKEND;
                // rows of iptables: 93, 98, 100
                rules::a_change_writes_only_chains_of_its_service: on_machines(some_services());
                // rows of iptables: 96
                rules::flushed_rules_are_restored: on_machines(some_services());
                // rows of iptables: 18, 31, 32, 33, 45, 46, 47, 48, 54, 112, 113
                settings::addresses_and_pods: on_machines(settings::services());
                // rows of iptables: 103
                rules::rules_of_the_other_variant_are_removed: on_machines(some_services());
                rules::kube_proxy_takes_over_again: on_machines(some_services());
                // rows of iptables: 50
                raw::neighbours_cannot_reach_loopback: on_testbed(nothing());
                // rows of iptables: 50, 72
                raw::health_checks_do_not_open_loopback: on_machines(nothing());
                // rows of iptables: 97, 103
                lifecycle::foreign_rules_and_cleanup: on_machines(some_services());
            }
        }
    )* };
}

// The text of iptables rules does not depend on the variant (rule_text.rs). So two of the four
// combinations of variant and layout cover each variant and each layout.
packet_tests! {
    iptables_legacy: Backend::IptablesLegacy;
    iptables_nft_compact: Backend::IptablesNftCompact;
    ipvs: Backend::Ipvs;
    nftables: Backend::Nftables;
    userspace: Backend::Userspace;
}

/// Tests of connections that survive the agent.
mod surviving {
    use super::*;

    survival_tests! {
        iptables_legacy: Backend::IptablesLegacy;
        iptables_nft_compact: Backend::IptablesNftCompact;
        ipvs: Backend::Ipvs;
        nftables: Backend::Nftables;
    }
}

/// Tests of rules that accept packets.
mod accepting {
    use super::*;

    accept_tests! {
        iptables_legacy: Backend::IptablesLegacy;
        iptables_nft_compact: Backend::IptablesNftCompact;
        ipvs: Backend::Ipvs;
    }
}

/// Tests of rules, for each iptables backend.
mod rules_of {
    use super::*;

    rule_tests! {
        iptables_legacy: Backend::IptablesLegacy;
        iptables_nft_compact: Backend::IptablesNftCompact;
    }
}

/// Tests of behaviour that only IPVS has.
mod virtual_servers {
    use headgate_tests::cases::ipvs;

    use super::*;

    const BACKEND: Backend = Backend::Ipvs;

    scenarios! { BACKEND;
        // rows of ipvs: 92, 93, 98, 100
        ipvs::a_change_writes_only_changed_objects: on_machines(some_services());
        // rows of ipvs: 96
        ipvs::flushed_state_is_restored: on_machines(some_services());
        // rows of ipvs: 96
        ipvs::a_change_restores_objects_that_were_removed: on_machines(some_services());
        ipvs::changes_of_other_programs_are_reverted: on_machines(some_services());
        ipvs::ipv6_is_turned_on_for_the_device: on_machines(some_services());
        ipvs::a_device_that_is_up_is_replaced: on_machines(some_services());
        // rows of ipvs: 31, 40, 58
        ipvs::rules_of_others_for_host_ports_do_not_get_service_traffic: on_machines(some_services());
        // rows of ipvs: 97, 101, 103
        ipvs::foreign_state_and_cleanup: on_machines(some_services());
        // rows of ipvs: 103
        ipvs::modes_switch: on_machines(some_services());
        // rows of ipvs: 92, 98, 100
        ipvs::kube_proxys_state_is_taken_over: on_machines(some_services());
        // rows of ipvs: 89, 102
        ipvs::destinations_drain: on_testbed(some_services());
        // rows of ipvs: 41, 43, 46, 59
        ipvs::addresses: on_machines(nothing());
        ipvs::a_rejected_destination_affects_no_other: on_testbed(some_services());
        ipvs::a_missing_scheduler_is_replaced_until_its_module_loads: on_testbed(some_services());
        ipvs::rules_for_sctp_are_left_out_if_iptables_cannot_match_sctp: on_machines(some_services());
        ipvs::kernel_parameters_can_be_set_by_init_only: on_machines(some_services());
        // rows of ipvs: 108
        ipvs::falls_back_to_iptables: on_machines(some_services());
    }
}

/// Tests of behaviour that only nftables has.
mod tables {
    use headgate_tests::cases::{nftables, takeover, unserved};

    use super::*;

    const BACKEND: Backend = Backend::Nftables;

    scenarios! { BACKEND;
        // rows of nftables: 41, 42, 59
        unserved::addresses: on_machines(nothing());
        unserved::a_new_address_of_the_node_answers_node_ports: on_machines(nothing());
        unserved::a_node_answers_pings_if_told_to: on_machines(nothing());
        // rows of nftables: 50
        unserved::neighbours_cannot_reach_loopback: on_machines(nothing());
        // rows of nftables: 92, 93, 100
        nftables::a_change_writes_a_handful_of_elements: on_machines(some_services());
        nftables::nft_lists_services_of_every_shape: on_testbed(table::services());
        nftables::the_address_of_a_client_selects_its_endpoint: on_machines(nftables::hashed_services());
        // rows of nftables: 92, 96, 97, 103
        nftables::the_table_survives_a_flush_and_is_repaired_after_a_change: on_machines(some_services());
        // rows of nftables: 96
        nftables::changes_of_other_programs_are_repaired_at_once: on_machines(some_services());
        nftables::a_change_is_found_after_notifications_were_lost: on_machines(some_services());
        nftables::a_new_agent_waits_for_the_old_one: on_machines(some_services());
        takeover::auto_chooses_a_mode_that_changes_no_outcome: on_machines(some_services());
        // rows of nftables: 103
        takeover::modes_switch_without_losing_connections: on_machines(some_services());
    }
}

/// Tests of mode userspace behind rules of iptables. The rules are those of mode iptables, and the
/// proxy is the one behind rules of nftables, so these tests cover what joins them.
mod carried_behind_iptables {
    use headgate_tests::cases::{forms, userspace};

    use super::*;

    const BACKEND: Backend = Backend::UserspaceIptables;

    #[test]
    fn the_table() {
        whole_table(BACKEND);
    }

    scenarios! { BACKEND;
        userspace::new_connections_need_no_agent: on_testbed(some_services());
        userspace::an_upgrade_loses_no_connection: on_testbed(some_services());
        forms::forms_switch_without_losing_connections: on_machines(some_services());
    }

    // The kernel with IPVS has no nftables.
    #[test]
    fn iptables_where_nftables_is_missing_as_beside_ipvs() {
        on_machines(Backend::Ipvs, some_services(), forms::iptables_where_nftables_is_missing);
    }
}

/// Tests of connections that the agent carries.
mod carried {
    use headgate_tests::cases::{datagrams, userspace};

    use super::*;

    const BACKEND: Backend = Backend::Userspace;

    scenarios! { BACKEND;
        // rows of userspace: 92, 98
        userspace::new_connections_need_no_agent: on_testbed(some_services());
        // rows of userspace: 89, 92
        userspace::an_upgrade_loses_no_connection: on_testbed(some_services());
        userspace::half_open_connections_hinder_nobody: on_testbed(some_services());
        userspace::a_dead_endpoint_loses_no_connection: on_testbed(some_services());
    }

    #[test]
    fn rules_lose_connections_to_a_dead_endpoint() {
        let body = userspace::rules_lose_connections_to_a_dead_endpoint;
        on_testbed(Backend::IptablesNft, some_services(), body);
    }

    scenarios! { BACKEND;
        datagrams::replies_need_no_connection_tracking: on_testbed(some_services());
        datagrams::a_client_learns_that_nobody_listens: on_testbed(some_services());
        // rows of userspace: 83
        datagrams::sessions_of_a_removed_endpoint_move_at_once: on_testbed(some_services());
        // rows of userspace: 92
        datagrams::open_flows_need_no_agent: on_testbed(some_services());
        // rows of userspace: 92
        datagrams::an_upgrade_loses_no_datagram: on_testbed(some_services());
    }
}
