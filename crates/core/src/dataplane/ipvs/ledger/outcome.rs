//! Records the outcome of operations. The kernel may reject some of them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    super::{
        super::ipsets::{IpSetElement, Set},
        objects::Object,
        plan::Op,
    },
    IpvsLedger,
};
use crate::model::ServiceKey;

impl IpvsLedger {
    /// Records that the kernel carried out all operations of `ops` except those in `rejected`. The
    /// objects of rejected operations become deferred if a service wants them. Returns the other
    /// rejected operations, such as removals. If the result is not empty, the caller must use
    /// [`Self::full`] for the next plan.
    ///
    /// The cost is linear in the number of operations if any operation is rejected or any object
    /// was deferred. It is linear in the number of services if elements or addresses are rejected.
    pub fn record<'a>(&mut self, ops: impl IntoIterator<Item = &'a Op>, rejected: &[Op]) -> Vec<Op> {
        let mut owners = self.owners(rejected);
        if !self.deferred.is_empty() {
            for object in ops.into_iter().filter_map(Op::object) {
                if let Some(service) = self.deferred.remove(&object) {
                    // A draining server may still need the object.
                    owners.entry(object).or_insert(service);
                }
            }
        }
        let mut unowned = Vec::new();
        for op in rejected {
            match op.object().and_then(|object| Some((object, Arc::clone(owners.get(&object)?)))) {
                Some((object, service)) => self.deferred.insert(object, service),
                None => unowned.push(*op),
            }
        }
        unowned
    }

    /// Returns the services that want the objects of these operations. The cost is linear in the
    /// number of services if an operation concerns an element or an address.
    #[must_use]
    pub fn owners(&self, ops: &[Op]) -> HashMap<Object, Arc<ServiceKey>> {
        let mut owners = HashMap::new();
        let mut searched = BTreeSet::new();
        for object in ops.iter().filter_map(Op::object) {
            match object {
                Object::Server(server) | Object::Destination(server, _) => {
                    // No service wants a draining destination.
                    let owner = self.owner(&server).filter(|_| self.op_for(object).is_some());
                    owners.extend(owner.map(|service| (object, Arc::clone(service))));
                }
                Object::Element(..) | Object::Address(_) => drop(searched.insert(object)),
            }
        }
        if searched.is_empty() {
            return owners;
        }
        for (service, plan) in self.plans() {
            let elements = plan.elements.iter().map(|(set, element)| Object::Element(*set, *element));
            let addresses = plan.device_addresses.iter().flat_map(|address| {
                [Object::Address(*address), Object::Element(Set::DeviceAddresses, IpSetElement::Ip(*address))]
            });
            for object in elements.chain(addresses).filter(|object| searched.contains(object)) {
                owners.insert(object, Arc::clone(service));
            }
        }
        owners
    }

    /// Returns the deferred objects, each with a service that wants it. They include destinations
    /// of deferred servers, but not objects that only draining servers need.
    pub fn deferred(&self) -> impl Iterator<Item = (Object, &Arc<ServiceKey>)> {
        self.deferred.objects.iter().filter_map(|(object, service)| {
            let owner = match object {
                Object::Server(server) | Object::Destination(server, _) => self.owner(server)?,
                Object::Element(..) | Object::Address(_) => {
                    Some(service).filter(|service| self.is_programmed(service))?
                }
            };
            Some((*object, owner))
        })
    }

    /// True if an object is deferred because the kernel rejected the operation that creates or
    /// changes it.
    #[must_use]
    pub fn is_deferred(&self, object: &Object) -> bool {
        self.deferred.contains(object)
    }

    /// Returns a number that changes whenever the result of [`Self::deferred`] changes.
    #[must_use]
    pub fn deferred_revision(&self) -> u64 {
        self.deferred.revision
    }

    /// Returns the operations that create `objects`, in order, without objects that are not
    /// deferred. The result for a server includes its deferred destinations. The caller tries the
    /// operations and [records](Self::record) their outcome. The cost is linear in the number of
    /// objects.
    #[must_use]
    pub fn retries(&self, objects: impl IntoIterator<Item = Object>) -> Vec<Op> {
        let mut all = BTreeSet::new();
        for object in objects {
            match object {
                Object::Server(server) => all.extend(self.deferred.of_server(server)),
                object => all.extend(Some(object).filter(|object| self.is_deferred(object))),
            }
        }
        all.into_iter().filter_map(|object| self.op_for(object)).collect()
    }
}
