//! Work that becomes due by time: draining destinations, rejected objects, missing kernel modules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use headgate_core::ipvs::{IpvsPlan, Object, Op};
use ipvs_netlink::DestinationEntry;
use tracing::info;

use super::{
    super::{DataplaneError, ErrorKind},
    IpvsFamily, convert,
    kernel::{IpvsKernel, of_ipvs},
    probe,
};

/// The interval at which the dataplane reads the number of connections of draining destinations.
const DRAIN_INTERVAL: Duration = Duration::from_secs(5);

impl IpvsFamily {
    /// Checks whether the kernel now has schedulers that were missing.
    /// Errors: [`ErrorKind::PlanAgain`] if the kernel has a scheduler that was missing. The error
    /// contains the services that ask for this scheduler. Other kinds mean that the check failed.
    pub(super) fn retry_schedulers(&mut self, kernel: &mut IpvsKernel, now: Instant) -> Result<(), DataplaneError> {
        let (mut found, mut services) = (Vec::new(), BTreeSet::new());
        for scheduler in self.missing_schedulers.due(now) {
            match probe::require_scheduler(kernel.ipvs()?, scheduler) {
                Ok(()) => {
                    self.missing_schedulers.retain(|missing| *missing != scheduler);
                    services.extend(self.ledger.set_available(scheduler, true));
                    found.push(scheduler.as_str());
                }
                Err(error) if error.kind == ErrorKind::Unavailable => {
                    self.missing_schedulers.note(scheduler, error.message, now);
                }
                Err(error) => return Err(error),
            }
        }
        if found.is_empty() {
            return Ok(());
        }
        let message =
            format!("the kernel now has scheduler {}: planning again the services that ask for it", found.join(", "));
        Err(DataplaneError::plan_again(message, services))
    }

    pub(super) fn retry_all(&mut self, kernel: &mut IpvsKernel, now: Instant) -> Result<(), DataplaneError> {
        if self.drain_at.is_some_and(|at| at <= now) {
            self.drain_at = None;
            let drained = self.drain(kernel);
            self.plan_drain();
            drained?;
        }
        self.retry_rejected(kernel, now)?;
        let retried = self.rules.retry_sctp(now);
        self.leave_out_sctp();
        retried
    }

    pub(super) fn plan_drain(&mut self) {
        let is_draining = self.ledger.draining().next().is_some();
        self.drain_at = is_draining.then(|| self.drain_at.unwrap_or_else(|| Instant::now() + DRAIN_INTERVAL));
    }

    /// Reads the connections of draining destinations, and removes those without any.
    fn drain(&mut self, kernel: &mut IpvsKernel) -> Result<(), DataplaneError> {
        let now_ms = self.now_ms();
        let draining: Vec<_> = self.ledger.draining().collect();
        let mut ops: Vec<Op> = Vec::new();
        for key in draining {
            let found = kernel.ipvs()?.destinations(convert::service_id(key)).map_err(of_ipvs)?;
            let count =
                |entry: &DestinationEntry| u64::from(entry.active_connections) + u64::from(entry.inactive_connections);
            let connections: BTreeMap<SocketAddr, u64> =
                found.iter().map(|entry| (entry.destination.address, count(entry))).collect();
            let IpvsPlan { before, after, .. } = self.ledger.drained(key, &connections, now_ms);
            ops.extend(before.into_iter().chain(after));
        }
        if ops.is_empty() { Ok(()) } else { self.run_steps(kernel, &ops) }
    }

    /// Writes the rejected objects that are due again. The cost depends only on these objects.
    fn retry_rejected(&mut self, kernel: &mut IpvsKernel, now: Instant) -> Result<(), DataplaneError> {
        let due = self.rejected.due(now);
        if due.is_empty() {
            return Ok(());
        }
        let ops = self.ledger.retries(due.iter().copied());
        // Forget the objects that no service needs now. If a service needs such an object again,
        // the next plan writes it.
        let tried: BTreeSet<Object> = ops.iter().filter_map(Op::object).collect();
        self.rejected.retain(|object| tried.contains(object) || !due.contains(object));
        self.run_steps(kernel, &ops)?;
        let accepted = due.iter().filter(|object| !self.ledger.is_deferred(object)).count();
        if accepted > 0 {
            info!(family = %self.ledger.config().family, accepted, "the kernel accepted objects that it had rejected");
        }
        Ok(())
    }
}
