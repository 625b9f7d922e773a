//! Chooses and configures the dataplane for the settings, and prepares the machine for it.

use headgate_core::{Family, view::MasqueradeConfig};
use headgate_settings::{DetectLocal, ProxyMode, Settings};
use tracing::{error, info};

use crate::{
    dataplane::{
        Dataplane, DataplaneError, DualStack, ErrorKind, Leftover, NodeDataplane, firewalls, iptables, ipvs, nftables,
        userspace, xtables,
    },
    interfaces,
    node_inputs::{NodeInputs, NodeSettings},
    options::Options,
    sysctl,
};

/// Returns the dataplane of the configured mode. If this machine cannot run the mode, returns
/// iptables, and [`NodeDataplane::degraded`] says what is missing. Changes no rules.
/// Errors: this machine cannot run iptables either. The message names the missing program.
pub fn build(options: &Options, settings: &Settings) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    let (mode, chosen) = match settings.mode {
        ProxyMode::Auto => return automatic(options, settings),
        ProxyMode::Iptables => return Ok(Box::new(iptables(options, settings)?)),
        ProxyMode::Ipvs => ("ipvs", boxed(ipvs::IpvsDataplane::new(ipvs_config(options, settings)), options, settings)),
        ProxyMode::Nftables => (
            "nftables",
            boxed(nftables::NftablesDataplane::new(&nftables_config(options, settings)), options, settings),
        ),
        ProxyMode::Userspace => ("userspace", userspace(options, settings)),
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
    let dataplane = iptables::IptablesDataplane::new(iptables_config(options, settings))?;
    Ok(dataplane.with_leftovers(leftovers(settings, None), options.takeover_limit))
}

fn boxed<D: Dataplane + 'static>(
    chosen: Result<DualStack<D>, DataplaneError>,
    options: &Options,
    settings: &Settings,
) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    Ok(Box::new(chosen?.with_leftovers(leftovers(settings, None), options.takeover_limit)))
}

/// Returns mode userspace with the rules that the options ask for. With `auto`, these are rules of
/// nftables, or of iptables if this machine cannot run those of nftables.
fn userspace(options: &Options, settings: &Settings) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    let proxy = userspace::ProxySettings {
        has_access_log: options.userspace_access_log,
        connect_timeout: options.userspace_connect_timeout,
        idle_timeout: options.userspace_idle_timeout,
        udp_idle_timeout: options.userspace_udp_timeout,
    };
    let over_iptables = || userspace::over_iptables(&iptables_config(options, settings), proxy);
    let obstacle = match options.userspace_rules {
        userspace::Rules::Iptables => return boxed(over_iptables(), options, settings),
        rules => match userspace::over_nftables(nftables_config(options, settings), proxy) {
            Err(error) if error.kind == ErrorKind::Unavailable && rules == userspace::Rules::Auto => error,
            chosen => return boxed(chosen, options, settings),
        },
    };
    let chosen =
        over_iptables().map_err(|error| DataplaneError { message: format!("{obstacle}; {error}"), ..error })?;
    let reason = format!("mode userspace uses rules of iptables on this node: {obstacle}");
    info!(backend = chosen.name(), reason, "chose the rules of mode userspace");
    Ok(Box::new(chosen.with_leftovers(leftovers(settings, None), options.takeover_limit).because(reason)))
}

/// Returns nftables if this machine can run this mode without a difference to iptables. Otherwise
/// returns iptables. Runs nftables without iptables if iptables is not installed.
fn automatic(options: &Options, settings: &Settings) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    // The search for an obstacle comes first, because the kernel loads modules for the expressions
    // that `NftablesDataplane::new` tries.
    let obstacle = obstacle(settings);
    let instead = obstacle.as_ref().map(|reason| (reason, iptables(options, settings)));
    let nftables = || nftables::NftablesDataplane::new(&nftables_config(options, settings));
    let chosen: Box<dyn NodeDataplane> = match instead {
        Some((reason, Ok(iptables))) => Box::new(iptables.because(reason.clone())),
        Some((reason, Err(error))) => {
            let sentence = format!("mode nftables runs although iptables suits this node better: {reason}; {error}");
            let nftables = nftables()?.with_leftovers(leftovers(settings, None), options.takeover_limit);
            Box::new(nftables.in_place_of(sentence))
        }
        None => match nftables() {
            Err(error) if error.kind == ErrorKind::Unavailable => {
                Box::new(iptables(options, settings)?.because(error.message))
            }
            nftables => {
                let reason =
                    "this kernel has all expressions that mode nftables needs, and no firewall needs accept rules";
                let nftables = nftables?.with_leftovers(leftovers(settings, None), options.takeover_limit);
                Box::new(nftables.because(reason.to_owned()))
            }
        },
    };
    info!(backend = chosen.name(), reason = chosen.reason(), "mode auto chose the backend");
    Ok(chosen)
}

/// Why mode nftables would serve Services on this node differently than mode iptables, if it would.
fn obstacle(settings: &Settings) -> Option<String> {
    if matches!(settings.detect_local, DetectLocal::BridgeInterface(_) | DetectLocal::InterfaceNamePrefix(_)) {
        return Some("mode nftables needs Linux 5.7 to recognise local pods by their interface".to_owned());
    }
    match firewalls::dropping_chain() {
        Ok(chain) => chain.map(|chain| {
            format!("{chain} drops packets that no rule accepts; mode iptables adds rules that accept packets of Services, and mode nftables cannot do this")
        }),
        Err(error) => Some(format!("it is unknown whether a firewall drops packets of Services: {error}")),
    }
}

/// Sets the kernel parameters of the dataplane, for `--init-only`. A process that runs with
/// `--init-only` may have privileges that the agent lacks later. Errors: a parameter cannot be set.
pub fn prepare(settings: &Settings, variant: iptables::Variant) -> Result<(), DataplaneError> {
    let node = NodeSettings::of(settings);
    let interfaces = if node.needs_interfaces() { interfaces::list() } else { Ok(Vec::new()) };
    let interfaces = interfaces.map_err(|error| {
        DataplaneError::new(ErrorKind::Retry, format!("the addresses of the interfaces cannot be read: {error}"))
    })?;
    let inputs = node.resolve(None, &interfaces);
    let prepare_iptables = || iptables::prepare(settings.localhost_node_ports, variant, &inputs);
    match settings.mode {
        ProxyMode::Auto | ProxyMode::Iptables | ProxyMode::Nftables | ProxyMode::Userspace => prepare_iptables(),
        ProxyMode::Ipvs => match ipvs::prepare(settings.ipvs.strict_arp) {
            Err(error) if error.kind == ErrorKind::Unavailable => {
                error!("mode ipvs was asked for but cannot run on this machine; the agent will run iptables: {error}");
                prepare_iptables()
            }
            result => result,
        },
    }
}

/// Stands for the mode of a proxy that is not kube-proxy: it may have virtual servers of its own.
pub const OTHER_PROGRAM: &str = "other";

/// Everything that an earlier run may have left, in the order of removal: rules before the sets and
/// counters that they refer to. Leaves out what a proxy in the mode `running` uses, because
/// kube-proxy's objects have the same names.
pub fn leftovers(settings: &Settings, running: Option<&str>) -> Vec<Leftover> {
    let variants = [iptables::Variant::Legacy, iptables::Variant::Nft];
    let mut leftovers = vec![nftables::tables(), userspace::routes()];
    match running {
        Some("iptables") => {}
        Some("ipvs") => leftovers.extend(variants.map(xtables::rules_beside_ipvs)),
        _ => leftovers.extend(variants.map(xtables::rules_of)),
    }
    if running != Some("iptables") {
        leftovers.push(xtables::packet_counters());
    }
    leftovers.push(userspace::gates());
    if running != Some("nftables") {
        leftovers.push(nftables::kube_proxys_tables());
    }
    match running {
        Some(OTHER_PROGRAM) => {}
        Some("ipvs") => leftovers.push(ipvs::sets_beside_kube_proxys()),
        _ => leftovers.push(ipvs::servers_and_sets(settings.ipvs.exclude_cidrs.clone())),
    }
    leftovers
}

/// Removes [`leftovers`], and logs each. Returns the names of those of which something may remain.
pub fn remove_leftovers(settings: &Settings, running: Option<&str>) -> Vec<&'static str> {
    let mut failed = Vec::new();
    for leftover in leftovers(settings, running) {
        let backend = leftover.name;
        match leftover.remove() {
            Ok(()) => info!(backend, "no rules or other objects of this backend remain"),
            Err(error) if error.kind == ErrorKind::Unavailable => {
                info!(backend, %error, "this machine does not support the backend, so nothing had to be removed");
            }
            Err(error) => {
                error!(backend, %error, "cannot remove everything");
                failed.push(backend);
            }
        }
    }
    failed
}

fn masquerade(settings: &Settings) -> MasqueradeConfig {
    let NodeInputs { detector_v4, detector_v6, .. } = NodeSettings::of(settings).resolve(None, &[]);
    MasqueradeConfig { all: settings.masquerade_all, bit: settings.masquerade_bit, detector_v4, detector_v6 }
}

fn nftables_config(options: &Options, settings: &Settings) -> nftables::NftablesOptions {
    nftables::NftablesOptions {
        owns_tables: options.own_nftables_tables,
        replies_to_ping: options.nftables_reply_to_ping,
        unused_features: Vec::new(),
        families: Family::BOTH.into(),
        masquerade: masquerade(settings),
        localhost_node_ports: settings.localhost_node_ports,
        conntrack_tcp_be_liberal: sysctl::is_tcp_liberal(),
        counts_services: options.nftables_service_counters,
        has_proxy: false,
    }
}

fn ipvs_config(options: &Options, settings: &Settings) -> ipvs::IpvsOptions {
    ipvs::IpvsOptions {
        variant: options.iptables_variant,
        masquerade: masquerade(settings),
        settings: settings.ipvs.clone(),
        ..ipvs::IpvsOptions::default()
    }
}

fn iptables_config(options: &Options, settings: &Settings) -> iptables::IptablesOptions {
    iptables::IptablesOptions {
        variant: options.iptables_variant,
        layout: options.iptables_layout,
        masquerade: masquerade(settings),
        localhost_node_ports: settings.localhost_node_ports,
        conntrack_tcp_be_liberal: sysctl::is_tcp_liberal(),
        count_packets: true,
        ..iptables::IptablesOptions::default()
    }
}
