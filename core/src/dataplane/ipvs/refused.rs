//! What the kernel refuses of services.
//!
//! Steps stand for themselves: where one is refused, all others are done. The ledger takes note of what the kernel lacks by that, and goes on
//! planning as if it were there; so nothing has to be read or planned anew because of it. It knows the steps that make up for it: they are part
//! of the plan whenever a service that wants them is planned, and whoever carries out plans may try them at any time ([`Ledger::again`]).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use super::{
    super::ipsets::{Element, Set},
    ledger::Ledger,
    plan::Op,
    server::ServerKey,
};
use crate::model::ServiceKey;

/// Something that steps make or change. In this order it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Object {
    /// An element of a set.
    Element(Set, Element),
    /// An address of our device.
    Address(IpAddr),
    /// A virtual server.
    Server(ServerKey),
    /// A destination of a virtual server.
    Destination(ServerKey, SocketAddr),
}

impl Op {
    /// What a step makes or changes; `None` for a step that removes, and for sets.
    #[must_use]
    pub fn object(&self) -> Option<Object> {
        match *self {
            Self::AddElement(set, element) => Some(Object::Element(set, element)),
            Self::Bind(address) => Some(Object::Address(address)),
            Self::AddServer(server, _) | Self::EditServer(server, _) => Some(Object::Server(server)),
            Self::AddDestination(server, address, _) | Self::EditDestination(server, address, _) => {
                Some(Object::Destination(server, address))
            }
            Self::CreateSet(_)
            | Self::DestroySet(_)
            | Self::DeleteElement(..)
            | Self::Unbind(_)
            | Self::DeleteServer(_)
            | Self::DeleteDestination(..) => None,
        }
    }
}

/// What is wanted, counts as programmed, and is not in the kernel, or is there as it was before, with a service that wants it.
#[derive(Debug, Default)]
pub(super) struct Lacking {
    objects: BTreeMap<Object, Arc<ServiceKey>>,
    revision: u64,
}

impl Lacking {
    pub(super) fn clear(&mut self) {
        if !self.objects.is_empty() {
            self.objects.clear();
            self.revision += 1;
        }
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

    /// Elements of a set that are lacking.
    pub(super) fn elements_of(&self, set: Set) -> usize {
        self.objects.keys().filter(|object| matches!(object, Object::Element(of, _) if *of == set)).count()
    }

    fn insert(&mut self, object: Object, service: Arc<ServiceKey>) {
        self.objects.insert(object, service);
        self.revision += 1;
    }

    /// A server and its destinations, as far as they are lacking.
    pub(super) fn of_server(&self, server: ServerKey) -> Vec<Object> {
        let least = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let is_of_server = |object: &&Object| matches!(object, Object::Destination(of, _) if *of == server);
        let own = Some(Object::Server(server)).filter(|own| self.contains(own));
        let destinations = self.objects.range(Object::Destination(server, least)..).map(|(object, _)| object);
        own.into_iter().chain(destinations.take_while(is_of_server).copied()).collect()
    }
}

impl Ledger {
    /// Takes note of what became of steps that were carried out: all are done but for `refused`. Returns those of the refused ones that no
    /// service asks for, be it that they remove something: of these it has taken no note, and only [`Self::full`] helps. Cost: the steps, if something is
    /// refused or was; and all services, if elements or addresses are refused.
    pub fn settle<'a>(&mut self, ops: impl IntoIterator<Item = &'a Op>, refused: &[Op]) -> Vec<Op> {
        let mut owners = self.owners(refused);
        if !self.lacking.is_empty() {
            for object in ops.into_iter().filter_map(Op::object) {
                if let Some(service) = self.lacking.remove(&object) {
                    // What drains may need what its service wanted.
                    owners.entry(object).or_insert(service);
                }
            }
        }
        let mut others = Vec::new();
        for op in refused {
            match op.object().and_then(|object| Some((object, Arc::clone(owners.get(&object)?)))) {
                Some((object, service)) => self.lacking.insert(object, service),
                None => others.push(*op),
            }
        }
        others
    }

    /// The services that want what these steps make.
    fn owners(&self, ops: &[Op]) -> HashMap<Object, Arc<ServiceKey>> {
        let mut owners = HashMap::new();
        let mut searched = BTreeSet::new();
        for object in ops.iter().filter_map(Op::object) {
            match object {
                Object::Server(server) | Object::Destination(server, _) => {
                    // What drains is not wanted.
                    let owner = self.owner(&server).filter(|_| self.step_to(object).is_some());
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
            let addresses = plan.bound.iter().flat_map(|address| {
                [Object::Address(*address), Object::Element(Set::BoundAddresses, Element::Ip(*address))]
            });
            for object in elements.chain(addresses).filter(|object| searched.contains(object)) {
                owners.insert(object, Arc::clone(service));
            }
        }
        owners
    }

    /// What the kernel lacks since it has refused it, and a service that wants it. Destinations of servers that are lacking are among them; what only
    /// virtual servers need that drain is not.
    pub fn lacking(&self) -> impl Iterator<Item = (Object, &Arc<ServiceKey>)> {
        self.lacking.objects.iter().filter_map(|(object, service)| {
            let owner = match object {
                Object::Server(server) | Object::Destination(server, _) => self.owner(server)?,
                Object::Element(..) | Object::Address(_) => {
                    Some(service).filter(|service| self.is_programmed(service))?
                }
            };
            Some((*object, owner))
        })
    }

    /// Whether the kernel lacks something that it has refused.
    #[must_use]
    pub fn lacks(&self, object: &Object) -> bool {
        self.lacking.contains(object)
    }

    /// A number that is another one when [`Self::lacking`] has changed.
    #[must_use]
    pub fn lacking_revision(&self) -> u64 {
        self.lacking.revision
    }

    /// The steps that make these objects, as far as they are lacking, in order; a server's with those of its destinations that are lacking. They are to be
    /// [settled](Self::settle) like others. Cost: their number.
    #[must_use]
    pub fn again(&self, objects: impl IntoIterator<Item = Object>) -> Vec<Op> {
        let mut all = BTreeSet::new();
        for object in objects {
            match object {
                Object::Server(server) => all.extend(self.lacking.of_server(server)),
                object => all.extend(Some(object).filter(|object| self.lacks(object))),
            }
        }
        all.into_iter().filter_map(|object| self.step_to(object)).collect()
    }
}
