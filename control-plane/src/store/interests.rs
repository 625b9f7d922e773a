//! Who waits for a change of a Service, of an endpoint or of a pod. A commit wakes only those whose
//! keys it changes, so its work is proportional to its changes.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use headgate_core::{Change, ServiceKey};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use super::Store;
use crate::objects::PodId;

/// The shortest time between two looks at the store.
const PACE: Duration = Duration::from_millis(50);

/// What can be waited for.
#[derive(Debug, Hash)]
pub(crate) enum Topic<'a> {
    /// The Service itself, not its endpoints.
    Service(&'a ServiceKey),
    /// An endpoint of a Service.
    Endpoint(&'a ServiceKey, IpAddr),
    /// The endpoints that belong to a pod.
    Pod(PodId),
}

/// All waiters, by the hash of each topic. An equal hash of another topic wakes a waiter in vain.
#[derive(Debug, Default)]
pub(super) struct Interests {
    hasher: RandomState,
    waiters: Mutex<HashMap<u64, Vec<Arc<Notify>>>>,
}

/// The interest of one waiter, until it is dropped.
#[derive(Debug)]
pub(crate) struct Interest {
    interests: Arc<Interests>,
    topics: Vec<u64>,
    changed: Arc<Notify>,
}

impl Interests {
    /// The hashes of the topics of changes; nothing if nobody waits.
    pub(super) fn touched<'a>(&self, topics: impl Iterator<Item = Topic<'a>>) -> Vec<u64> {
        if self.lock().is_empty() { Vec::new() } else { topics.map(|topic| self.hasher.hash_one(topic)).collect() }
    }

    pub(super) fn wake(&self, touched: &[u64]) {
        if touched.is_empty() {
            return;
        }
        let waiters = self.lock();
        touched.iter().filter_map(|topic| waiters.get(topic)).flatten().for_each(|waiter| waiter.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Vec<Arc<Notify>>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interest {
    /// Waits for a change since the interest began, or since the last call.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits for a change or until `deadline`, and at least for [`PACE`].
    pub(crate) async fn changed_until(&self, deadline: Instant) {
        let next = Instant::now() + PACE;
        // An error means that the deadline has come.
        let _ = timeout_at(deadline, self.changed()).await;
        sleep_until(next.min(deadline)).await;
    }

    /// Also waits for changes of these topics.
    pub(crate) fn add<'a>(&mut self, topics: impl IntoIterator<Item = Topic<'a>>) {
        let topics: Vec<u64> = topics.into_iter().map(|topic| self.interests.hasher.hash_one(topic)).collect();
        let mut waiters = self.interests.lock();
        for topic in &topics {
            waiters.entry(*topic).or_default().push(Arc::clone(&self.changed));
        }
        drop(waiters);
        self.topics.extend(topics);
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let mut waiters = self.interests.lock();
        for topic in &self.topics {
            if let Some(of_topic) = waiters.get_mut(topic) {
                of_topic.retain(|waiter| !Arc::ptr_eq(waiter, &self.changed));
                if of_topic.is_empty() {
                    waiters.remove(topic);
                }
            }
        }
    }
}

impl<'a> Topic<'a> {
    /// The topic of a change.
    pub(super) fn of(change: &'a Change) -> Option<Self> {
        match change {
            Change::Service(service) => Some(Topic::Service(&service.key)),
            Change::RemoveService(key) => Some(Topic::Service(key)),
            Change::Endpoint(key, endpoint) => Some(Topic::Endpoint(key, endpoint.address)),
            Change::RemoveEndpoint(key, address) => Some(Topic::Endpoint(key, *address)),
            Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => None,
        }
    }
}

impl Store {
    /// Begins to wait for changes of topics. Commits look at the waiters first, so the caller looks
    /// at the store after this call.
    pub(crate) fn interest<'a>(&self, topics: impl IntoIterator<Item = Topic<'a>>) -> Interest {
        let (interests, changed) = (Arc::clone(&self.interests), Arc::new(Notify::new()));
        let mut interest = Interest { interests, topics: Vec::new(), changed };
        interest.add(topics);
        interest
    }
}
