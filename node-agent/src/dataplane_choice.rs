//! Chooses and configures the dataplane for the settings, and prepares the machine for it.

use headgate_core::{Family, masquerade::MasqueradeConfig};
use tracing::error;

use crate::{
    dataplane::{
        Dataplane, DataplaneError, DualStack, ErrorKind, Leftover, NodeDataplane, iptables, ipvs, nftables, xtables,
    },
    interfaces,
    node_inputs::{NodeInputs, NodeSettings},
    options::Options,
    settings::{ProxyMode, Settings},
    sysctl::Sysctls,
};

/// Returns the dataplane of the configured mode. If this machine cannot run the mode, returns
/// iptables, and [`NodeDataplane::degraded`] says what is missing. Changes no rules.
///
/// # Errors
/// This machine cannot run iptables either. The message names the missing program.
pub fn build(options: &Options, settings: &Settings) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    let (mode, chosen) = match settings.mode {
        ProxyMode::Iptables => return Ok(Box::new(iptables(options, settings)?)),
        ProxyMode::Ipvs => ("ipvs", boxed(ipvs::IpvsDataplane::new(ipvs_config(options, settings)), settings)),
        ProxyMode::Nftables => {
            ("nftables", boxed(nftables::NftablesDataplane::new(&nftables_config(options, settings)), settings))
        }
    };
    match chosen {
        Err(error) if error.kind == ErrorKind::Unavailable => {
            let sentence =
                format!("mode {mode} was asked for but cannot run on this machine; iptables runs instead: {error}");
            error!("{sentence}");
            Ok(Box::new(iptables(options, settings)?.in_place_of(sentence)))
        }
        chosen => chosen,
    }
}

fn iptables(options: &Options, settings: &Settings) -> Result<iptables::IptablesDataplane, DataplaneError> {
    Ok(iptables::IptablesDataplane::new(iptables_config(options, settings))?.with_leftovers(leftovers(settings)))
}

fn boxed<D: Dataplane + 'static>(
    chosen: Result<DualStack<D>, DataplaneError>,
    settings: &Settings,
) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    Ok(Box::new(chosen?.with_leftovers(leftovers(settings))))
}

/// Sets the kernel parameters of the dataplane, for `--init-only`. A process that runs with
/// `--init-only` may have privileges that the agent lacks later.
///
/// # Errors
/// A parameter cannot be set.
pub fn prepare(settings: &Settings) -> Result<(), DataplaneError> {
    let node = NodeSettings::of(settings);
    let interfaces = if node.needs_interfaces() { interfaces::list() } else { Ok(Vec::new()) };
    let interfaces = interfaces.map_err(|error| {
        DataplaneError::new(ErrorKind::Retry, format!("the addresses of the interfaces cannot be read: {error}"))
    })?;
    let inputs = node.resolve(None, &interfaces);
    let prepare_iptables = || iptables::prepare(settings.localhost_node_ports, &inputs);
    match settings.mode {
        ProxyMode::Iptables | ProxyMode::Nftables => prepare_iptables(),
        ProxyMode::Ipvs => match ipvs::prepare(settings.ipvs.strict_arp) {
            Err(error) if error.kind == ErrorKind::Unavailable => {
                error!("mode ipvs was asked for but cannot run on this machine; the agent will run iptables: {error}");
                prepare_iptables()
            }
            result => result,
        },
    }
}

/// Everything that an earlier run may have left in the kernel, in the order of removal. Rules are
/// removed first, because the kernel does not delete a set or a counter that a rule refers to.
#[must_use]
pub fn leftovers(settings: &Settings) -> Vec<Leftover> {
    vec![
        xtables::rules_of(iptables::Variant::Legacy),
        xtables::rules_of(iptables::Variant::Nft),
        xtables::packet_counters(),
        nftables::tables(),
        nftables::kube_proxys_tables(),
        ipvs::servers_and_sets(settings.ipvs.exclude_cidrs.clone()),
    ]
}

fn masquerade(settings: &Settings) -> MasqueradeConfig {
    let NodeInputs { detector_v4, detector_v6, .. } = NodeSettings::of(settings).resolve(None, &[]);
    MasqueradeConfig { all: settings.masquerade_all, bit: settings.masquerade_bit, detector_v4, detector_v6 }
}

fn nftables_config(options: &Options, settings: &Settings) -> nftables::Config {
    nftables::Config {
        owns_tables: options.own_nftables_tables,
        replies_to_ping: options.nftables_reply_to_ping,
        unused_features: Vec::new(),
        families: Family::BOTH.into(),
        masquerade: masquerade(settings),
        localhost_node_ports: settings.localhost_node_ports,
        conntrack_tcp_be_liberal: Sysctls::default().is_tcp_liberal(),
    }
}

fn ipvs_config(options: &Options, settings: &Settings) -> ipvs::Config {
    ipvs::Config {
        variant: options.iptables_variant,
        masquerade: masquerade(settings),
        settings: settings.ipvs.clone(),
        ..ipvs::Config::default()
    }
}

fn iptables_config(options: &Options, settings: &Settings) -> iptables::Config {
    iptables::Config {
        variant: options.iptables_variant,
        layout: options.iptables_layout,
        masquerade: masquerade(settings),
        localhost_node_ports: settings.localhost_node_ports,
        conntrack_tcp_be_liberal: Sysctls::default().is_tcp_liberal(),
        count_packets: true,
        ..iptables::Config::default()
    }
}
