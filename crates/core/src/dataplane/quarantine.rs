//! Quarantined services: the kernel rejects their objects. Plans leave these services out, and
//! their last good objects stay in the kernel.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use crate::model::ServiceKey;

/// The quarantined services, and the objects that services had before unconfirmed plans. `T` is
/// what a ledger records for one service.
#[derive(Debug, Clone)]
pub(super) struct Quarantine<T> {
    /// For each service that plans changed since the last confirmation, its objects before the
    /// first of these changes.
    before: HashMap<Arc<ServiceKey>, T>,
    /// True if a full plan was made since the last confirmation. The older objects of services that
    /// are not in `before` are then unknown.
    is_after_full: bool,
    /// The quarantined services with their last good objects, or `None` if these are unknown.
    services: HashMap<Arc<ServiceKey>, Option<T>>,
}

impl<T> Default for Quarantine<T> {
    fn default() -> Self {
        Self { before: HashMap::new(), is_after_full: false, services: HashMap::new() }
    }
}

impl<T> Quarantine<T> {
    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        !self.services.is_empty() && self.services.contains_key(key)
    }

    /// Records that a plan changes a service whose objects were `before`.
    pub(super) fn changed(&mut self, key: &Arc<ServiceKey>, before: impl FnOnce() -> T) {
        if !self.is_after_full {
            self.before.entry(Arc::clone(key)).or_insert_with(before);
        }
    }

    /// Records that a full plan replaces the objects of all services.
    pub(super) fn begin_full(&mut self) {
        self.is_after_full = true;
    }

    /// The objects that services had before unconfirmed plans.
    pub(super) fn unconfirmed(&mut self) -> impl Iterator<Item = (&Arc<ServiceKey>, &mut T)> {
        self.before.iter_mut()
    }

    /// Records that the kernel has accepted all plans so far.
    pub(super) fn confirm(&mut self) {
        self.before.clear();
        self.is_after_full = false;
    }

    /// Quarantines these services and releases all others. Their last good objects are those before
    /// the unconfirmed plans. `programmed` returns the objects of a service that no such plan
    /// changed.
    pub(super) fn set(&mut self, services: &BTreeSet<Arc<ServiceKey>>, programmed: impl Fn(&ServiceKey) -> Option<T>) {
        self.services.retain(|key, _| services.contains(key));
        for key in services.iter().filter(|key| !self.services.contains_key(*key)).collect::<Vec<_>>() {
            let last_good = match self.before.remove(key) {
                None if self.is_after_full => None,
                None => programmed(key),
                before => before,
            };
            self.services.insert(Arc::clone(key), last_good);
        }
    }

    /// The last good objects of a quarantined service.
    pub(super) fn last_good(&mut self, key: &ServiceKey) -> Option<&mut Option<T>> {
        self.services.get_mut(key)
    }

    /// The quarantined services whose last good objects are known, with these objects.
    pub(super) fn all_last_good(&mut self) -> impl Iterator<Item = (&Arc<ServiceKey>, &mut T)> {
        self.services.iter_mut().filter_map(|(key, last_good)| Some((key, last_good.as_mut()?)))
    }
}
