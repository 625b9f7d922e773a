//! What the kernel refuses of services: it is left out of their plans, and the rest of them is programmed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{ledger::Ledger, plan::Op, service::ServicePlan};
use crate::model::ServiceKey;

/// Steps that the kernel refuses, by the service that asks for what they make.
#[derive(Debug, Default)]
pub(super) struct Barred(BTreeMap<Arc<ServiceKey>, Vec<Op>>);

impl Barred {
    /// Takes out of a service's plan what the kernel refuses.
    pub(super) fn strip(&self, key: &ServiceKey, plan: &mut ServicePlan) {
        for op in self.0.get(key).into_iter().flatten() {
            match op {
                Op::AddElement(set, element) => {
                    plan.elements.remove(&(*set, *element));
                    plan.servers.retain(|_, (_, wanted)| wanted.mark != (*set, *element));
                }
                Op::Bind(address) => {
                    plan.bound.remove(address);
                    plan.servers.retain(|server, _| server.address != *address);
                }
                Op::AddServer(server, _) | Op::EditServer(server, _) => drop(plan.servers.remove(server)),
                Op::AddDestination(server, refused, _) | Op::EditDestination(server, refused, _) => {
                    if let Some((_, wanted)) = plan.servers.get_mut(server) {
                        let others = wanted.destinations.iter().filter(|(address, _)| address != refused);
                        wanted.destinations = others.copied().collect();
                    }
                }
                _ => {}
            }
        }
    }
}

impl Ledger {
    /// Services that want what a step makes. Cost: the number of all.
    #[must_use]
    pub fn services_that_want(&self, op: &Op) -> BTreeSet<Arc<ServiceKey>> {
        let wants = |plan: &ServicePlan| match op {
            Op::AddElement(set, element) => plan.elements.contains(&(*set, *element)),
            Op::Bind(address) => plan.bound.contains(address),
            Op::AddServer(server, _) | Op::EditServer(server, _) => plan.servers.contains_key(server),
            Op::AddDestination(server, ..) | Op::EditDestination(server, ..) => plan.servers.contains_key(server),
            _ => false,
        };
        self.plans().filter(|(_, plan)| wants(plan)).map(|(key, _)| Arc::clone(key)).collect()
    }

    /// Leaves out of services' plans what these steps make, and of no others. The next step has to be [`Self::full`], or plan those services
    /// that are not among them any more as changed.
    pub fn bar(&mut self, refused: BTreeMap<Arc<ServiceKey>, Vec<Op>>) {
        self.set_barred(Barred(refused));
    }
}
