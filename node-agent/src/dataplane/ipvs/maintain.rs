//! What becomes due by time: draining, what the kernel rejected, and what its modules may bring.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use headgate_core::ipvs::{Object, Op, Plan};
use ipvs_netlink::DestinationEntry;
use tracing::info;

use super::{
    super::{DataplaneError, ErrorKind, Fault, Maintain},
    IpvsFamily, convert,
    kernel::{Kernel, of_ipvs},
    probe,
};

/// Time between two questions for the connections of draining destinations.
const DRAIN_INTERVAL: Duration = Duration::from_secs(5);

impl Maintain<Kernel> for IpvsFamily {
    fn due_at(&self) -> Option<Instant> {
        let Self { rejected, missing_schedulers, rules, drain_at, .. } = self;
        [rejected.next_due(), missing_schedulers.next_due(), rules.sctp.retry_at(), *drain_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn maintain(&mut self, kernel: &mut Kernel, now: Instant) -> Result<(), DataplaneError> {
        match self.look_for_schedulers(kernel, now) {
            Err(error) if error.kind != ErrorKind::PlanAgain => Err(error),
            found => DataplaneError::join(found, self.retry_all(kernel, now)),
        }
    }

    fn deferred(&mut self) -> Option<Vec<Fault>> {
        let revision = self.ledger.deferred_revision();
        (revision != self.told_revision).then(|| {
            self.told_revision = revision;
            self.deferred_parts()
        })
    }
}

impl IpvsFamily {
    /// Looks whether the kernel has schedulers by now that it did not have, so that the services
    /// that ask for them are to be planned.
    fn look_for_schedulers(&mut self, kernel: &mut Kernel, now: Instant) -> Result<(), DataplaneError> {
        let (mut found, mut services) = (Vec::new(), BTreeSet::new());
        for scheduler in self.missing_schedulers.due(now) {
            match probe::has_scheduler(kernel.ipvs()?, scheduler) {
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
        let message = format!(
            "the kernel has scheduler {}, which it did not have: services that ask for it get it",
            found.join(", ")
        );
        Err(DataplaneError::plan_again(message, services))
    }

    fn retry_all(&mut self, kernel: &mut Kernel, now: Instant) -> Result<(), DataplaneError> {
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

    /// Sets when the draining destinations are looked at next.
    pub(super) fn plan_drain(&mut self) {
        let is_draining = self.ledger.draining().next().is_some();
        self.drain_at = is_draining.then(|| self.drain_at.unwrap_or_else(|| Instant::now() + DRAIN_INTERVAL));
    }

    /// Asks how many connections draining destinations still have, and removes those without any.
    fn drain(&mut self, kernel: &mut Kernel) -> Result<(), DataplaneError> {
        let now_ms = self.now_ms();
        let draining: Vec<_> = self.ledger.draining().collect();
        let mut ops: Vec<Op> = Vec::new();
        for key in draining {
            let found = kernel.ipvs()?.destinations(convert::service_id(key)).map_err(of_ipvs)?;
            let count =
                |entry: &DestinationEntry| u64::from(entry.active_connections) + u64::from(entry.inactive_connections);
            let connections: BTreeMap<SocketAddr, u64> =
                found.iter().map(|entry| (entry.destination.address, count(entry))).collect();
            let Plan { before, after, .. } = self.ledger.drained(key, &connections, now_ms);
            ops.extend(before.into_iter().chain(after));
        }
        if ops.is_empty() { Ok(()) } else { self.run_steps(kernel, &ops) }
    }

    /// Tries once more what the kernel has rejected and is due. The cost is that of what is tried.
    fn retry_rejected(&mut self, kernel: &mut Kernel, now: Instant) -> Result<(), DataplaneError> {
        let due = self.rejected.due(now);
        if due.is_empty() {
            return Ok(());
        }
        let ops = self.ledger.retries(due.iter().copied());
        // What nobody wants at the moment is tried when somebody does.
        let tried: BTreeSet<Object> = ops.iter().filter_map(Op::object).collect();
        self.rejected.retain(|object| tried.contains(object) || !due.contains(object));
        self.run_steps(kernel, &ops)?;
        let taken = due.iter().filter(|object| !self.ledger.is_deferred(object)).count();
        if taken > 0 {
            info!(family = %self.ledger.config().family, taken, "the kernel takes what it had rejected");
        }
        Ok(())
    }
}
