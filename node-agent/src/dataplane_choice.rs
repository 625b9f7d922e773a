//! Chooses and configures the backend that the options ask for, prepares the machine for it, and removes
//! the traces of all backends.

use headgate_core::masquerade::MasqueradeConfig;
use tracing::error;

use crate::{
    dataplane::{DataplaneError, ErrorKind, NodeDataplane, iptables, ipvs},
    node_inputs::{NodeInputs, NodeSettings, interface_addresses},
    options::Options,
    settings::{IpvsSettings, ProxyMode, Settings},
    sysctl::Sysctls,
};

/// The backend that the options ask for, or iptables where this machine cannot run it: then
/// [`NodeDataplane::degraded`] says what is missing. Changes no rule.
///
/// # Errors
/// When this machine cannot run it, or the options contradict each other; the message says what to change.
pub fn build(options: &Options, settings: &Settings) -> Result<Box<dyn NodeDataplane>, DataplaneError> {
    let iptables = || iptables::IptablesDataplane::new(iptables_config(options, settings, options.iptables_variant));
    match settings.mode {
        ProxyMode::Auto | ProxyMode::Iptables => Ok(Box::new(iptables()?)),
        ProxyMode::Ipvs => match ipvs::IpvsDataplane::new(ipvs_config(options, settings)) {
            Ok(backend) => Ok(Box::new(backend)),
            Err(error) if error.kind == ErrorKind::Unavailable => {
                let sentence =
                    format!("mode ipvs was asked for and cannot run here, so iptables does its work: {error}");
                error!("{sentence}");
                Ok(Box::new(iptables()?.in_place_of(sentence)))
            }
            Err(error) => Err(error),
        },
    }
}

/// Sets the kernel parameters that the backend otherwise sets by itself, for `--init-only`: that run may
/// have privileges that the agent after it lacks.
///
/// # Errors
/// A parameter cannot be set.
pub fn prepare(settings: &Settings) -> Result<(), DataplaneError> {
    let node = NodeSettings::of(settings);
    let interfaces = if node.needs_interfaces() { interface_addresses() } else { Ok(Vec::new()) };
    let interfaces = interfaces.map_err(|error| {
        DataplaneError::new(ErrorKind::Retry, format!("the addresses of the interfaces cannot be read: {error}"))
    })?;
    let inputs = node.resolve(None, &interfaces);
    let of_iptables = || iptables::prepare(settings.localhost_node_ports, &inputs);
    match settings.mode {
        ProxyMode::Auto | ProxyMode::Iptables => of_iptables(),
        ProxyMode::Ipvs => match ipvs::prepare(settings.ipvs.strict_arp) {
            Err(error) if error.kind == ErrorKind::Unavailable => {
                error!("mode ipvs was asked for and cannot run here, so that the agent will run iptables: {error}");
                of_iptables()
            }
            result => result,
        },
    }
}

/// What [`cleanup_all`] found of one way to program the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cleanup {
    /// Such as "iptables-nft".
    pub backend: String,
    /// Removed, or nothing was there, or why not. [`ErrorKind::Unavailable`] means that this machine
    /// cannot run the backend, so that there is no trace of it.
    pub outcome: Result<(), DataplaneError>,
}

impl Cleanup {
    /// Something may have been left behind.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(&self.outcome, Err(error) if error.kind != ErrorKind::Unavailable)
    }
}

/// Removes the traces of every backend and variant that this machine can run. After a failure it goes
/// on with the others.
#[must_use]
pub fn cleanup_all(options: &Options, settings: &Settings) -> Vec<Cleanup> {
    let variants = [("iptables-legacy", iptables::Variant::Legacy), ("iptables-nft", iptables::Variant::Nft)];
    let clean = |(name, variant): (&str, iptables::Variant)| {
        let config = iptables_config(options, settings, variant);
        let outcome = iptables::IptablesDataplane::new(config).and_then(|mut backend| backend.cleanup());
        Cleanup { backend: name.to_owned(), outcome }
    };
    let mut cleaned: Vec<Cleanup> = variants.into_iter().map(clean).collect();
    // Rules refer to sets, so the sets are removed last.
    let outcome = ipvs::remove_all(&settings.ipvs.exclude_cidrs);
    cleaned.push(Cleanup { backend: "ipvs".to_owned(), outcome });
    cleaned
}

fn masquerade(settings: &Settings) -> MasqueradeConfig {
    let NodeInputs { detector_v4, detector_v6, .. } = NodeSettings::of(settings).resolve(None, &[]);
    MasqueradeConfig { all: settings.masquerade_all, bit: settings.masquerade_bit, detector_v4, detector_v6 }
}

fn ipvs_config(options: &Options, settings: &Settings) -> ipvs::Config {
    let IpvsSettings { scheduler, exclude_cidrs, strict_arp, tcp_timeout, tcp_fin_timeout, udp_timeout } =
        settings.ipvs.clone();
    ipvs::Config {
        variant: options.iptables_variant,
        masquerade: masquerade(settings),
        scheduler,
        exclude_cidrs,
        strict_arp,
        tcp_timeout,
        tcp_fin_timeout,
        udp_timeout,
        ..ipvs::Config::default()
    }
}

fn iptables_config(options: &Options, settings: &Settings, variant: iptables::Variant) -> iptables::Config {
    iptables::Config {
        variant,
        layout: options.iptables_layout,
        masquerade: masquerade(settings),
        localhost_node_ports: settings.localhost_node_ports,
        conntrack_tcp_be_liberal: Sysctls::default().is_tcp_liberal(),
        ipvs_exclude_cidrs: settings.ipvs.exclude_cidrs.clone(),
        count_packets: true,
        ..iptables::Config::default()
    }
}
