//! The pods of endpoints, for the drain barrier. Agents do not receive pods.
//!
//! A pod may ask after its endpoint was removed, so the last removed endpoints are remembered too.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use compact_str::CompactString;
use headgate_core::ServiceKey;

use super::Store;
use crate::{model::PodChange, objects::PodId};

const MAX_REMOVED: usize = 16_384;

/// How a pod is named in a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PodName {
    /// By its namespace and one of its addresses. An empty namespace stands for all namespaces.
    Address(String, IpAddr),
    /// By namespace and name.
    Named(String, String),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct PodEndpoints {
    pub(crate) pod: PodId,
    /// Service and address of each endpoint, of both IP families.
    pub(crate) endpoints: BTreeSet<(Arc<ServiceKey>, IpAddr)>,
    /// The node of the pod, if the EndpointSlices name one.
    pub(crate) node: Option<Arc<str>>,
}

/// Why no pod has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoPod {
    /// No endpoint belongs to such a pod.
    Unknown,
    /// Only removed endpoints belong to such a pod. They may belong to an older pod of this name.
    OnlyRemoved,
    /// Several pods have endpoints with the address, as pods in the host network do.
    Ambiguous,
}

#[derive(Debug)]
struct PodEntry {
    service: Arc<ServiceKey>,
    pod: PodId,
    node: Option<Arc<str>>,
    is_removed: bool,
}

/// The pods of all endpoints.
#[derive(Debug, Default)]
pub(super) struct Pods {
    by_address: HashMap<IpAddr, Vec<PodEntry>>,
    /// The addresses of pods, by the hash of the pod's namespace and name.
    by_name: HashMap<u64, BTreeSet<IpAddr>>,
    /// The removed endpoints of each namespace, and their number in all.
    removed: HashMap<CompactString, VecDeque<(IpAddr, Arc<ServiceKey>, PodId)>>,
    removed_count: usize,
}

impl Pods {
    /// Applies a change of `service`. Returns the pods whose endpoints have changed.
    pub(super) fn apply(
        &mut self,
        service: &Arc<ServiceKey>,
        address: IpAddr,
        pod: Option<(PodId, Option<Arc<str>>)>,
    ) -> Vec<PodId> {
        let mut touched: Vec<PodId> = pod.iter().map(|(pod, _)| *pod).collect();
        let entries = self.by_address.entry(address).or_default();
        for entry in entries.iter_mut().filter(|entry| entry.service == *service && !entry.is_removed) {
            entry.is_removed = true;
            touched.push(entry.pod);
            let removed = self.removed.entry(service.namespace.clone()).or_default();
            removed.push_back((address, Arc::clone(service), entry.pod));
            self.removed_count += 1;
        }
        if let Some((pod, node)) = pod {
            self.by_name.entry(pod.name()).or_default().insert(address);
            entries.retain(|entry| !(entry.service == *service && entry.pod == pod));
            entries.push(PodEntry { service: Arc::clone(service), pod, node, is_removed: false });
        }
        // The fullest namespace forgets first, so that nobody can make others forget.
        while self.removed_count > MAX_REMOVED
            && let Some(most) = self.removed.values_mut().max_by_key(|removed| removed.len())
            && let Some((address, service, pod)) = most.pop_front()
        {
            self.removed_count -= 1;
            self.removed.retain(|_, removed| !removed.is_empty());
            self.forget(address, &service, pod);
        }
        touched
    }

    fn forget(&mut self, address: IpAddr, service: &ServiceKey, pod: PodId) {
        let Some(entries) = self.by_address.get_mut(&address) else { return };
        entries.retain(|entry| !(entry.is_removed && *entry.service == *service && entry.pod == pod));
        if !entries.iter().any(|entry| entry.pod.name() == pod.name())
            && let Some(addresses) = self.by_name.get_mut(&pod.name())
        {
            addresses.remove(&address);
            if addresses.is_empty() {
                self.by_name.remove(&pod.name());
            }
        }
        if self.by_address.get(&address).is_some_and(Vec::is_empty) {
            self.by_address.remove(&address);
        }
    }

    fn entries_of(&self, addresses: impl IntoIterator<Item = IpAddr>) -> impl Iterator<Item = (IpAddr, &PodEntry)> {
        addresses
            .into_iter()
            .flat_map(|address| self.by_address.get(&address).into_iter().flatten().map(move |entry| (address, entry)))
    }

    fn entries_of_pod(&self, pod: PodId) -> impl Iterator<Item = (IpAddr, &PodEntry)> {
        let addresses = self.by_name.get(&pod.name()).into_iter().flatten().copied();
        self.entries_of(addresses).filter(move |(_, entry)| entry.pod == pod)
    }

    /// The present endpoints of a pod.
    pub(super) fn present(&self, pod: PodId) -> BTreeSet<(Arc<ServiceKey>, IpAddr)> {
        let present = self.entries_of_pod(pod).filter(|(_, entry)| !entry.is_removed);
        present.map(|(address, entry)| (Arc::clone(&entry.service), address)).collect()
    }

    /// The endpoints of a pod, present and removed.
    fn all(&self, pod: PodId) -> PodEndpoints {
        let mut found = PodEndpoints { pod, ..PodEndpoints::default() };
        for (address, entry) in self.entries_of_pod(pod) {
            found.endpoints.insert((Arc::clone(&entry.service), address));
            found.node = found.node.or_else(|| entry.node.clone());
        }
        found
    }

    /// Finds a pod. Without a UID, removed endpoints count only for an address, and only if no pod
    /// has it now. EndpointSlices of other namespaces do not matter, whatever address, name or UID
    /// they name: anybody may write them.
    fn get(&self, name: &PodName, uid: &str) -> Result<PodEndpoints, NoPod> {
        let (candidates, hash): (Vec<IpAddr>, _) = match name {
            PodName::Address(_, address) => (vec![*address], None),
            PodName::Named(namespace, pod) => {
                let hash = PodId::name_hash(namespace, pod);
                (self.by_name.get(&hash).into_iter().flatten().copied().collect(), Some(hash))
            }
        };
        let uid = (!uid.is_empty()).then(|| PodId::new(uid, "").uid());
        let is_named = |entry: &PodEntry| match name {
            PodName::Address(namespace, _) => namespace.is_empty() || entry.service.namespace == *namespace,
            PodName::Named(..) => Some(entry.pod.name()) == hash,
        };
        let is_meant = |entry: &PodEntry| is_named(entry) && uid.is_none_or(|uid| entry.pod.uid() == uid);
        let meant = self.entries_of(candidates).map(|(_, entry)| entry).filter(|entry| is_meant(entry));
        let (removed, live): (Vec<&PodEntry>, Vec<&PodEntry>) = meant.partition(|entry| entry.is_removed);
        let pod = match (live.first(), removed.last()) {
            (Some(first), _) if live.iter().all(|entry| entry.pod == first.pod) => first.pod,
            (Some(_), _) => return Err(NoPod::Ambiguous),
            (None, Some(last)) if uid.is_some() || matches!(name, PodName::Address(..)) => last.pod,
            (None, Some(_)) => return Err(NoPod::OnlyRemoved),
            (None, None) => return Err(NoPod::Unknown),
        };
        Ok(self.all(pod))
    }
}

impl super::Inner {
    pub(super) fn apply_pod(&mut self, change: PodChange) -> Vec<PodId> {
        let PodChange { service, address, pod } = change;
        let service = self.state.key(&service).map_or_else(|| Arc::new(service), Arc::clone);
        self.pods.apply(&service, address, pod)
    }
}

impl Store {
    /// Finds a pod, with endpoints that were removed lately. `uid` is empty if it is not known. A
    /// retry helps only if the endpoints of the pod change.
    pub(crate) fn pod(&self, name: &PodName, uid: &str) -> Result<PodEndpoints, NoPod> {
        self.read().pods.get(name, uid)
    }

    /// The endpoints of a pod that was found before, with endpoints that were removed lately.
    pub(crate) fn endpoints_of(&self, pod: PodId) -> PodEndpoints {
        self.read().pods.all(pod)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn service(name: &str) -> Arc<ServiceKey> {
        Arc::new(ServiceKey::new("prod", name))
    }

    fn address(host: u16) -> IpAddr {
        let [high, low] = host.to_be_bytes();
        [10, 0, high, low].into()
    }

    fn id(uid: &str, name: &str) -> PodId {
        PodId::new(uid, name).in_namespace("prod")
    }

    fn at(address: IpAddr) -> PodName {
        PodName::Address("prod".into(), address)
    }

    fn put(pods: &mut Pods, name: &str, host: u16, pod: &str) {
        pods.apply(&service(name), address(host), Some((id(pod, pod), Some("n1".into()))));
    }

    #[test]
    fn a_new_pod_takes_the_address_of_a_removed_pod_and_pods_in_the_host_network_share_one() {
        let mut pods = Pods::default();
        put(&mut pods, "web", 1, "old");
        put(&mut pods, "web", 1, "new");
        let found = pods.get(&at(address(1)), "");
        assert_eq!(found, pods.get(&PodName::Named("prod".into(), "new".into()), ""));
        put(&mut pods, "dns", 1, "host-pod");
        assert_eq!(pods.get(&at(address(1)), ""), Err(NoPod::Ambiguous));
        let named = pods.get(&PodName::Named("prod".into(), "host-pod".into()), "").unwrap();
        assert_eq!(named.endpoints, [(service("dns"), address(1))].into());
    }

    #[test]
    fn slices_of_other_namespaces_do_not_matter_whatever_they_name() {
        let (mut pods, hostile) = (Pods::default(), Arc::new(ServiceKey::new("hostile", "web")));
        put(&mut pods, "web", 1, "a");
        let (by_name, by_address) = (PodName::Named("prod".into(), "a".into()), at(address(1)));
        let found = pods.get(&by_name, "a").unwrap();
        // The slice names the address, the name and the UID of the pod, with another node.
        for host in [1, 7] {
            let foreign = PodId::new("a", "a").in_namespace("hostile");
            pods.apply(&hostile, address(host), Some((foreign, Some("other".into()))));
        }
        for (name, uid) in [(&by_name, "a"), (&by_name, ""), (&by_address, "a"), (&by_address, "")] {
            assert_eq!(pods.get(name, uid), Ok(found.clone()), "{name:?} {uid}");
        }
        assert_eq!(pods.all(found.pod), found);
        // A pod without a Service of its own namespace stays one.
        assert_eq!(pods.get(&at(address(7)), "a"), Err(NoPod::Unknown));
        // Removed endpoints stay known while another namespace churns.
        pods.apply(&service("web"), address(1), None);
        for host in 0..u16::MAX {
            let foreign = PodId::new("x", &host.to_string()).in_namespace("hostile");
            pods.apply(&hostile, address(host), Some((foreign, None)));
            pods.apply(&hostile, address(host), None);
        }
        assert_eq!(pods.get(&by_address, ""), Ok(found));
    }

    #[test]
    fn only_the_last_removed_endpoints_are_remembered() {
        let mut pods = Pods::default();
        for host in 0..20_000 {
            put(&mut pods, "web", host, &format!("pod-{host}"));
            pods.apply(&service("web"), address(host), None);
        }
        assert_eq!((pods.by_address.len(), pods.by_name.len()), (MAX_REMOVED, MAX_REMOVED));
        assert_eq!(pods.get(&at(address(0)), ""), Err(NoPod::Unknown));
        assert!(pods.get(&at(address(19_999)), "").is_ok());
    }
}
