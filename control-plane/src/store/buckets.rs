//! Buckets. Each bucket has its keys, the version of its last change, and its encoded resources.
//!
//! A snapshot, full or of some buckets, consists of the messages of its buckets. A bucket that does
//! not change between two snapshots is encoded once.

use std::{
    collections::BTreeSet,
    iter,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use compact_str::CompactString;
use headgate_core::{Change, ServiceKey, State, digest::BUCKETS};

use super::{encode, log::LogKey};

/// The resources of one bucket as `SnapshotChunk`s.
#[derive(Debug)]
pub(super) struct BucketFrames {
    pub(super) frames: Box<[Bytes]>,
    pub(super) resources: u64,
}

#[derive(Debug, Default)]
struct Bucket {
    services: BTreeSet<Arc<ServiceKey>>,
    cidrs: BTreeSet<CompactString>,
    changed: u64,
    frames: OnceLock<Arc<BucketFrames>>,
}

/// All buckets.
#[derive(Debug)]
pub(super) struct Buckets(Box<[Bucket]>);

impl Default for Buckets {
    fn default() -> Self {
        Self(iter::repeat_with(Bucket::default).take(BUCKETS).collect())
    }
}

impl Buckets {
    /// Records a change of `key` at `version`. `state` already contains the change.
    pub(super) fn record(&mut self, version: u64, key: &LogKey, state: &State) {
        let bucket = &mut self.0[usize::from(key.bucket()) % BUCKETS];
        bucket.changed = version;
        bucket.frames = OnceLock::new();
        match key {
            LogKey::Service(key) | LogKey::Endpoint(key, _) => match state.entry(key) {
                Some(_) if bucket.services.contains(key) => false,
                Some(_) => bucket.services.insert(Arc::clone(key)),
                None => bucket.services.remove(key),
            },
            LogKey::Cidr(name) => match state.service_cidr(name) {
                Some(_) => bucket.cidrs.insert(name.clone()),
                None => bucket.cidrs.remove(name),
            },
        };
    }

    /// The buckets that have changed after `version`, in ascending order.
    pub(super) fn changed_since(&self, version: u64) -> Vec<u16> {
        let changed = self.0.iter().enumerate().filter(|(_, bucket)| bucket.changed > version);
        changed.filter_map(|(index, _)| u16::try_from(index).ok()).collect()
    }

    /// True if a bucket has changed after `version`.
    pub(super) fn has_changed_since(&self, bucket: u16, version: u64) -> bool {
        self.0[usize::from(bucket) % BUCKETS].changed > version
    }

    /// The keys of a bucket that have a Service or endpoints, in order.
    pub(super) fn services(&self, bucket: u16) -> impl Iterator<Item = &Arc<ServiceKey>> {
        self.0[usize::from(bucket) % BUCKETS].services.iter()
    }

    /// The messages of a bucket in the present `state`, each of about `part_bytes`. The first
    /// caller after a change encodes them.
    pub(super) fn frames(&self, bucket: u16, state: &State, part_bytes: usize) -> Arc<BucketFrames> {
        let bucket = &self.0[usize::from(bucket) % BUCKETS];
        Arc::clone(bucket.frames.get_or_init(|| Arc::new(bucket.encode(state, part_bytes))))
    }
}

impl Bucket {
    fn encode(&self, state: &State, part_bytes: usize) -> BucketFrames {
        let cidrs = self.cidrs.iter().filter_map(|name| state.service_cidr(name)).cloned().map(Change::ServiceCidr);
        let mut resources = 0;
        let changes = cidrs.chain(self.services.iter().flat_map(|key| service_changes(state, key)));
        let frames = encode::chunk_frames(changes.inspect(|_| resources += 1), part_bytes);
        BucketFrames { frames, resources }
    }
}

fn service_changes<'a>(state: &'a State, key: &'a ServiceKey) -> impl Iterator<Item = Change> + 'a {
    state.entry(key).into_iter().flat_map(move |entry| {
        let endpoints = entry.endpoints().values().map(|endpoint| Change::Endpoint(key.clone(), endpoint.clone()));
        entry.service().cloned().map(Change::from).into_iter().chain(endpoints)
    })
}
