//! Pods that wait for the readiness gate of Headgate (discovery.proto, section 20).

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Instant};

use headgate_core::ServiceKey;
use tokio::sync::watch;

use super::{Inner, Store};
use crate::{
    model::{GateChange, GatedPod},
    objects::PodId,
};

/// A pod that waits, and when this replica has seen first that it waits.
#[derive(Debug, Clone)]
pub(crate) struct WaitingPod {
    pub(crate) names: Arc<GatedPod>,
    pub(crate) since: Instant,
}

pub(super) type WaitingPods = HashMap<PodId, WaitingPod>;

impl Store {
    /// A receiver that wakes when a pod begins or ceases to wait.
    pub(crate) fn watch_gates(&self) -> watch::Receiver<()> {
        self.gates_changed.subscribe()
    }

    pub(crate) fn waiting_pods(&self) -> Vec<(PodId, WaitingPod)> {
        self.read().gates.iter().map(|(pod, waiting)| (*pod, waiting.clone())).collect()
    }

    pub(crate) fn is_waiting(&self, pod: PodId) -> bool {
        self.read().gates.contains_key(&pod)
    }

    /// The endpoints of a pod in Services that the nodes program.
    pub(crate) fn served_endpoints(&self, pod: PodId) -> Vec<(ServiceKey, IpAddr)> {
        let inner = self.read();
        let endpoints = inner.pods.present(pod).into_iter().filter(|(key, address)| inner.is_served(key, *address));
        endpoints.map(|(key, address)| ((*key).clone(), address)).collect()
    }
}

impl Inner {
    pub(super) fn apply_gate(&mut self, GateChange { pod, waiting }: GateChange) {
        match waiting {
            Some(names) => {
                self.gates.entry(pod).or_insert(WaitingPod { names, since: Instant::now() });
            }
            None => drop(self.gates.remove(&pod)),
        }
    }

    fn is_served(&self, key: &ServiceKey, address: IpAddr) -> bool {
        let entry = self.state.entry(key).filter(|entry| entry.service().is_some());
        entry.is_some_and(|entry| entry.endpoints().contains_key(&address))
    }
}
