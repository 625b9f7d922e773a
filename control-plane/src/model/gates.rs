//! Pods that lack only the readiness gate of Headgate. Their endpoints count as ready and serving
//! for all nodes (discovery.proto, section 20).
//!
//! The API shows a pod that becomes ready in three steps, which arrive over two watches: the
//! condition of the gate, the condition `Ready`, and the endpoint in the EndpointSlice. A pod is
//! *held* from the beginning until the last step, so that its endpoints do not change in between.
//! An endpoint that has been serving, and stops to serve, is never held.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use headgate_core::Conditions;

use crate::{
    objects::{GateState, ObjectKey, PodId},
    transaction::{GateChange, GatedPod},
};

/// A slice, and an address in the slice.
pub(super) type EndpointPlace = (Arc<ObjectKey>, IpAddr);

#[derive(Debug)]
struct HeldPod {
    id: PodId,
    /// The names; `None` once the condition of the gate is true.
    waiting: Option<Arc<GatedPod>>,
}

/// The held pods, and the endpoints that are not ready.
#[derive(Debug, Default)]
pub(super) struct Gates {
    held: HashMap<ObjectKey, HeldPod>,
    keys: HashMap<PodId, ObjectKey>,
    /// The endpoints of each pod that are neither ready, serving nor terminating.
    unready: HashMap<PodId, BTreeSet<EndpointPlace>>,
    /// The pods whose names have changed since the last call of [`Gates::take`].
    changed: BTreeMap<ObjectKey, Vec<GateChange>>,
}

/// True if an endpoint counts as ready when its pod is held.
pub(super) fn is_unready(conditions: Conditions) -> bool {
    !(conditions.ready || conditions.serving || conditions.terminating)
}

impl Gates {
    /// The keys of the held pods.
    pub(super) fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.held.keys()
    }

    /// The held pod of this name.
    pub(super) fn id(&self, key: &ObjectKey) -> Option<PodId> {
        self.held.get(key).map(|held| held.id)
    }

    /// The endpoints of a pod that are not ready.
    pub(super) fn places(&self, id: PodId) -> impl Iterator<Item = &EndpointPlace> {
        self.unready.get(&id).into_iter().flatten()
    }

    /// True if an endpoint counts as ready although its slice says that it is not.
    pub(super) fn holds(&self, id: PodId, slice: &Arc<ObjectKey>, address: IpAddr) -> bool {
        let is_unready = |places: &BTreeSet<EndpointPlace>| places.contains(&(Arc::clone(slice), address));
        self.keys.contains_key(&id) && self.unready.get(&id).is_some_and(is_unready)
    }

    /// Applies a version of a pod with the gate.
    pub(super) fn set(&mut self, key: &ObjectKey, id: PodId, uid: &str, state: GateState) {
        let is_held = self.id(key).is_some();
        let waiting = match state {
            GateState::Waiting => {
                let names = GatedPod { namespace: key.namespace.clone(), name: key.name.clone(), uid: uid.into() };
                Some(Arc::new(names))
            }
            GateState::Programmed => None,
            GateState::Ready if is_held && self.unready.contains_key(&id) => None,
            GateState::Ready | GateState::Unready => return self.release(key),
        };
        let was_waiting = self.held.get(key).is_some_and(|held| held.waiting.is_some());
        if was_waiting != waiting.is_some() {
            self.note(key, GateChange { pod: id, waiting: waiting.clone() });
        }
        self.keys.insert(id, key.clone());
        self.held.insert(key.clone(), HeldPod { id, waiting });
    }

    /// Ends the hold of a pod.
    pub(super) fn release(&mut self, key: &ObjectKey) {
        let Some(held) = self.held.remove(key) else { return };
        self.keys.remove(&held.id);
        if held.waiting.is_some() {
            self.note(key, GateChange { pod: held.id, waiting: None });
        }
    }

    fn note(&mut self, key: &ObjectKey, change: GateChange) {
        self.changed.entry(key.clone()).or_default().push(change);
    }

    /// Notes that an endpoint of a pod has become unready.
    pub(super) fn add(&mut self, id: PodId, place: EndpointPlace) {
        self.unready.entry(id).or_default().insert(place);
    }

    /// Notes that an endpoint of a pod is not unready any more, or was removed.
    pub(super) fn remove(&mut self, id: PodId, slice: &Arc<ObjectKey>, address: IpAddr) {
        let Some(places) = self.unready.get_mut(&id) else { return };
        places.remove(&(Arc::clone(slice), address));
        if !places.is_empty() {
            return;
        }
        self.unready.remove(&id);
        // The API has shown the last step.
        if let Some(key) = self.keys.get(&id).cloned()
            && self.held.get(&key).is_some_and(|held| held.waiting.is_none())
        {
            self.release(&key);
        }
    }

    /// The changes of waiting pods since the last call.
    pub(super) fn take(&mut self) -> Vec<GateChange> {
        std::mem::take(&mut self.changed).into_values().flatten().collect()
    }
}
