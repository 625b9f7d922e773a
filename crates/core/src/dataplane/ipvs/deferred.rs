//! Objects that services want and that the kernel rejected.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use super::{
    super::ipsets::Set,
    objects::{Object, ServerKey},
};
use crate::model::ServiceKey;

/// Objects that the ledger counts as programmed, although the kernel rejected an operation on them:
/// the kernel lacks them or has their old values. Each object is stored with a service that wants
/// the object. If only a draining server needs the object, the stored service is a service that
/// wanted the object before.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    pub(super) objects: BTreeMap<Object, Arc<ServiceKey>>,
    pub(super) revision: u64,
}

impl Deferred {
    /// Returns the value without objects, as a change of this value.
    pub(super) fn cleared(&self) -> Self {
        Self { objects: BTreeMap::new(), revision: self.revision + u64::from(!self.is_empty()) }
    }

    pub(super) fn remove(&mut self, object: &Object) -> Option<Arc<ServiceKey>> {
        let service = self.objects.remove(object);
        self.revision += u64::from(service.is_some());
        service
    }

    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    pub(super) fn contains(&self, object: &Object) -> bool {
        self.objects.contains_key(object)
    }

    /// Number of deferred elements of a set.
    pub(super) fn elements_of(&self, set: Set) -> usize {
        self.objects.keys().filter(|object| matches!(object, Object::Element(of, _) if *of == set)).count()
    }

    pub(super) fn insert(&mut self, object: Object, service: Arc<ServiceKey>) {
        self.objects.insert(object, service);
        self.revision += 1;
    }

    /// Returns the deferred objects among a server and its destinations.
    pub(super) fn of_server(&self, server: ServerKey) -> Vec<Object> {
        let least = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let is_of_server = |object: &&Object| matches!(object, Object::Destination(of, _) if *of == server);
        let own = Some(Object::Server(server)).filter(|own| self.contains(own));
        let destinations = self.objects.range(Object::Destination(server, least)..).map(|(object, _)| object);
        own.into_iter().chain(destinations.take_while(is_of_server).copied()).collect()
    }
}
