//! The iptables dataplane: runs scripts of [`headgate_core::iptables`] with `iptables-restore
//! --noflush`. Only a full sync reads the rules in the kernel.

mod config;
mod counters;

pub use config::IptablesOptions;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use headgate_core::{
    Demand, Dirty, Family, NodeFacts, ServiceKey, State, StateSource, forwarding,
    iptables::{
        RenderConfig, RulesLedger, RulesTable, Script, has_localnet_guard, localnet_guard_script,
        names::{GateChain, LOCALNET_GUARD},
        ruleset,
    },
};
use tracing::warn;

pub use super::xtables::Variant;
use super::{
    Dataplane, DataplaneError, Degradation, DualStack, ErrorKind, Fault, Finding, Report, RulesVerification,
    Statistics,
    xtables::{
        self, FamilyRules, Flushes, bisect,
        programs::{Programs, Restore},
    },
};
use crate::{node_inputs::NodeInputs, sysctl};

/// Sets the kernel parameter that NodePorts on 127.0.0.0/8 need, after it has written the chain
/// that protects 127.0.0.0/8. Without the programs of iptables, does nothing.
pub(crate) fn prepare(localhost_node_ports: bool, variant: Variant, inputs: &NodeInputs) -> Result<(), DataplaneError> {
    let mut config = RenderConfig { localhost_node_ports, ..RenderConfig::new(Family::V4) };
    config.node_port_addresses = inputs.node_ports(Family::V4).clone();
    if !has_localnet_guard(&config) {
        return Ok(());
    }
    let programs = match xtables::choose(variant) {
        Ok(variant) => Programs::new(Family::V4, variant),
        Err(error) if error.kind == ErrorKind::Unavailable => {
            warn!(
                "NodePorts do not answer on 127.0.0.1 unless the agent may set net.ipv4.conf.all.route_localnet itself: {error}"
            );
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if !programs.has_chain(RulesTable::Filter, LOCALNET_GUARD)? {
        programs.restore(&localnet_guard_script())?;
    }
    sysctl::route_localnet().map_err(|sentence| DataplaneError::new(ErrorKind::Fatal, sentence))
}

/// A warning about the kernel parameter `route_localnet`, if the parameter is set. A cleanup does
/// not reset the parameter, because other software may have set it.
pub fn left_settings() -> Option<&'static str> {
    sysctl::is_localnet_routed().then_some(
        "net.ipv4.conf.all.route_localnet stays 1. With this value, other hosts on the local network can reach services that listen on \
         127.0.0.1, unless rules such as the kubelet's chain KUBE-FIREWALL prevent it: set it to 0, if no other software needs it",
    )
}

/// The dataplane that programs the kernel with `iptables-restore`.
pub type IptablesDataplane = DualStack<IptablesFamily>;

/// One IP family of the dataplane.
#[derive(Debug)]
pub struct IptablesFamily {
    rules: FamilyRules,
    ledger: RulesLedger,
    /// True after a full sync, or after the kernel accepted a trial of rules that count packets.
    has_counted: bool,
}

impl DualStack<IptablesFamily> {
    /// Finds the programs that the configuration asks for. Changes nothing.
    /// Errors: [`ErrorKind::Unavailable`] if this machine does not have the programs.
    pub fn new(config: IptablesOptions) -> Result<Self, DataplaneError> {
        let variant = xtables::choose(config.variant)?;
        let name = if variant == Variant::Legacy { "iptables-legacy" } else { "iptables-nft" };
        let families = config.families.clone();
        let make = move |family| IptablesFamily::new(&config, family, variant);
        Ok(Self::assemble(name, Flushes::of(variant), xtables::leftovers(variant), families, make))
    }
}

impl Dataplane for IptablesFamily {
    type Kernel = Flushes;
    type Plan = (Script, u32);

    /// Each run of `iptables-restore` takes a time that grows with the number of all rules, so a
    /// large batch is cut into few runs.
    const OBJECTS_AT_ONCE: usize = 32_768;

    fn family(&self) -> Family {
        self.ledger.config().family
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        let mut config = self.ledger.config().clone();
        config.node_port_addresses = inputs.node_ports(config.family).clone();
        config.masquerade.detector_v4.clone_from(&inputs.detector_v4);
        config.masquerade.detector_v6.clone_from(&inputs.detector_v6);
        self.ledger.set_ruleset(ruleset(config))
    }

    fn sync(&mut self, _kernel: &mut Flushes, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        self.make_counters();
        let has_guard = has_localnet_guard(self.ledger.config());
        let failed = if has_guard { sysctl::route_localnet().err() } else { None };
        let mut report = match self.write_everything(source) {
            Err(error) if self.counters_are_rejected(&error)? => self.write_everything(source)?,
            result => result?,
        };
        self.has_counted = true;
        report.warnings.extend(failed);
        Ok(report)
    }

    fn verification(&mut self, _kernel: &mut Flushes) -> Result<RulesVerification, DataplaneError> {
        let existing = self.rules.programs.existing_tables()?;
        let (mut ledger, recorded) = (self.ledger.fresh(), self.ledger.prefix_length());
        let found = existing.get(RulesTable::Nat).prefix_length;
        Ok(Box::new(move |source| {
            let (script, _) = ledger.full(source, existing);
            xtables::differences(&script, recorded, found, ledger.prefix_length())
        }))
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Self::Plan {
        self.ledger.changed(state, node, dirty)
    }

    fn apply(&mut self, _: &mut Flushes, (script, services_planned): Self::Plan) -> Result<Report, DataplaneError> {
        self.rules.count(&script);
        let written = self.write(&script);
        self.finish(written, services_planned)
    }

    fn check(&mut self, _kernel: &mut Flushes) -> Result<Finding, DataplaneError> {
        self.rules.check(self.ledger.jumps()).map(Finding::of)
    }

    fn decode(&mut self, _kernel: &mut Flushes) -> Result<forwarding::Table, DataplaneError> {
        let RenderConfig { family, masquerade, leaves_out_sctp, listeners, .. } = self.ledger.config();
        let rules = self.rules.programs.for_decoder()?;
        let listeners = listeners.values().copied().collect();
        let table = headgate_oracle::iptables::decode(&rules, *family, masquerade.detector(*family), &listeners);
        Ok(forwarding::Table { leaves_out_sctp: *leaves_out_sctp, ..table })
    }

    fn statistics(&self) -> Statistics {
        self.rules.statistics(&self.ledger.tally(), self.ledger.config().counts_packets)
    }

    fn degraded(&self, demand: &Demand) -> Vec<Degradation> {
        self.rules.missing_sctp(demand, "ports of SCTP do not work").into_iter().collect()
    }

    fn due_at(&self) -> Option<Instant> {
        self.rules.sctp.retry_at()
    }

    fn maintain(&mut self, _kernel: &mut Flushes, now: Instant) -> Result<(), DataplaneError> {
        let retried = self.rules.retry_sctp(now);
        self.leave_out_sctp();
        retried
    }

    fn find_faults(
        &mut self,
        _kernel: &mut Flushes,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        bisect::find_faults(&self.rules.programs, &self.ledger, source, suspects)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.ledger.set_quarantined(services);
    }
}

impl IptablesFamily {
    /// Creates the dataplane of a family for a variant, which must not be `Auto`.
    pub(super) fn new(config: &IptablesOptions, family: Family, variant: Variant) -> Self {
        let render = RenderConfig {
            masquerade: config.masquerade.clone(),
            layout: config.layout,
            localhost_node_ports: config.localhost_node_ports && family == Family::V4,
            conntrack_tcp_be_liberal: config.conntrack_tcp_be_liberal,
            counts_packets: config.count_packets,
            ..RenderConfig::new(family)
        };
        Self { rules: FamilyRules::new(family, variant), ledger: RulesLedger::new(ruleset(render)), has_counted: false }
    }

    /// Makes the rules send TCP connections to the listeners of a proxy while the gate is closed.
    pub(super) fn set_listeners(&mut self, listeners: BTreeMap<GateChain, SocketAddr>) {
        self.ledger.set_ruleset(ruleset(RenderConfig { listeners, ..self.ledger.config().clone() }));
    }

    /// Leaves SCTP ports out of the rules while iptables cannot match SCTP on this machine.
    fn leave_out_sctp(&mut self) {
        let leaves_out_sctp = self.rules.sctp.is_missing();
        self.ledger.set_ruleset(ruleset(RenderConfig { leaves_out_sctp, ..self.ledger.config().clone() }));
    }

    fn write_everything(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let existing = self.rules.programs.existing_tables()?;
        let programs = &self.rules.programs;
        let mut parts: Option<Result<Restore, DataplaneError>> = None;
        let mut write = |script: &Script| {
            if let Ok(restore) = parts.get_or_insert_with(|| programs.start()) {
                restore.write(script);
            }
        };
        let write = programs.can_write_in_parts().then_some(&mut write as &mut dyn FnMut(&Script));
        let (script, services_planned) = self.ledger.full_in_parts(source, existing, write);
        self.rules.count(&script);
        let written = parts.map_or(Ok(()), |parts| parts?.finish(None));
        let written = written.and_then(|()| self.write(&script));
        self.finish(written, services_planned)
    }

    fn finish(
        &mut self,
        written: Result<Report, DataplaneError>,
        services_planned: u32,
    ) -> Result<Report, DataplaneError> {
        match written {
            Ok(report) => {
                self.ledger.confirm();
                Ok(Report { services_planned, ..report })
            }
            Err(error) => {
                let error = self.rules.explain(error);
                self.leave_out_sctp();
                Err(error)
            }
        }
    }

    fn write(&mut self, script: &Script) -> Result<Report, DataplaneError> {
        let mut report = Report::default();
        if !script.is_empty() {
            let kept = self.rules.programs.restore_leaving(script)?;
            xtables::note_written(&mut report, script, kept, |table, name| self.ledger.note_undeletable(table, name));
        }
        Ok(report)
    }
}
