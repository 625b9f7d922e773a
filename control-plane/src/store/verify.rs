//! Compares what an agent has with this store (discovery.proto, section 19). Each function holds
//! the lock for one bucket at a time.
//!
//! The store may have moved on since the agent's version. A bucket is compared only if it has not
//! changed since then, so a change that is on its way is never a difference.

use std::{collections::BTreeSet, sync::Arc};

use headgate_core::{
    ServiceKey,
    digest::{BucketDigest, Digests},
};
use headgate_proto::{NodeView, ServiceDigests};

use super::{Store, encode::LogKey, log};

/// The maximum number of log entries that [`Store::owners_changed_since`] reads.
const MAX_SCANNED: usize = 16_384;

impl Store {
    /// Those of the buckets that have not changed since `version`, with digests.
    pub(crate) fn digests_since(&self, version: u64, buckets: &BTreeSet<u16>) -> Vec<(u16, BucketDigest)> {
        let inner = self.read();
        let unchanged = buckets.iter().filter(|bucket| !inner.buckets.has_changed_since(**bucket, version));
        unchanged.map(|bucket| (*bucket, inner.state.digests().bucket(*bucket))).collect()
    }

    /// As [`Self::digests_since`], with the table of a node with this view, at a cost by Services.
    pub(crate) fn table_digests_since(
        &self,
        version: u64,
        buckets: &BTreeSet<u16>,
        view: &NodeView,
        has_sctp: bool,
    ) -> Vec<(u16, BucketDigest)> {
        let (mut digests, mut unchanged) = (Digests::default(), Vec::new());
        for bucket in buckets {
            let inner = self.read();
            if !inner.buckets.has_changed_since(*bucket, version) {
                let services = inner.buckets.services(*bucket);
                services.for_each(|key| view.add_table(&inner.state, key, has_sctp, &mut digests));
                unchanged.push(*bucket);
            }
        }
        unchanged.into_iter().map(|bucket| (bucket, digests.bucket(bucket))).collect()
    }

    /// Each Service's digests, with the table for this view; `None` if the bucket has changed.
    pub(crate) fn services_since(
        &self,
        version: u64,
        bucket: u16,
        view: &NodeView,
    ) -> Option<Vec<(Arc<ServiceKey>, ServiceDigests)>> {
        let inner = self.read();
        let digests = |key: &Arc<ServiceKey>| (Arc::clone(key), view.digests_of(&inner.state, key, bucket));
        let is_changed = inner.buckets.has_changed_since(bucket, version);
        (!is_changed).then(|| inner.buckets.services(bucket).map(digests).collect())
    }

    /// True if a Service, and so the owner of a frontend, may have changed since `version`.
    pub(crate) fn owners_changed_since(&self, version: u64) -> bool {
        let inner = self.read();
        if version >= inner.version {
            return false;
        }
        let mut entries = inner.log.since(log::after(version)).take(MAX_SCANNED + 1).enumerate();
        let may_own = |(index, key): (usize, &LogKey)| index == MAX_SCANNED || matches!(key, LogKey::Service(_));
        version < inner.log.floor() || entries.any(|(index, (_, entry))| may_own((index, &entry.key)))
    }
}
