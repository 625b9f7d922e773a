//! A reader that behaves like an agent.

use std::collections::BTreeMap;

use bytes::Bytes;
use headgate_core::{Change, Dirty, State, digest, reference::Referable};
use headgate_proto::{Decoder, MAX_SERVER_MESSAGE_BYTES, PREFIX_BYTES, v1};
use prost::Message as _;
use v1::server_message::Body;

use crate::store::{Cursor, Resume, ResumeMode, Store};

/// Applies messages like an agent, according to discovery.proto. Checks the guarantees that
/// discovery.proto gives to an agent.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) state: State,
    pub(super) version: u64,
    pub(super) staged: Vec<Change>,
    pub(super) by_digests: bool,
    pub(super) positions: BTreeMap<i32, u64>,
    pub(super) ends: Vec<v1::SnapshotEnd>,
    pub(super) decoder: Decoder,
}

impl Reader {
    /// A reader that has read everything, and its cursor.
    pub(super) fn following(store: &Store) -> (Self, Cursor) {
        let (mut reader, mut cursor) = (Self::default(), store.cursor(None).1);
        reader.read_all(store, &mut cursor);
        (reader, cursor)
    }

    pub(super) fn read(&mut self, frame: &Bytes) {
        assert!(frame.len() - PREFIX_BYTES <= MAX_SERVER_MESSAGE_BYTES, "{} bytes", frame.len());
        match v1::ServerMessage::decode(&frame[PREFIX_BYTES..]).unwrap().body.unwrap() {
            Body::Batch(batch) => {
                let previous = batch.follows().unwrap();
                assert_eq!(previous, self.version);
                self.positions.extend(batch.moved_positions().map(|position| (position.kind, position.position)));
                self.stage(batch.changes.unwrap());
                if batch.version != previous {
                    self.version = batch.version;
                    self.apply();
                }
            }
            Body::SnapshotChunk(chunk) => self.stage(chunk.changes.unwrap()),
            Body::SnapshotEnd(end) => self.end(end),
            other => panic!("{other:?}"),
        }
    }

    fn stage(&mut self, changes: v1::Changes) {
        let (changes, rejections) = self.decoder.changes(changes).unwrap();
        assert_eq!(rejections, []);
        self.staged.extend(changes);
    }

    fn apply(&mut self) {
        for change in std::mem::take(&mut self.staged) {
            self.state.apply(change, &mut Dirty::default());
        }
    }

    fn end(&mut self, end: v1::SnapshotEnd) {
        assert_eq!(end.resource_count, self.staged.len() as u64);
        // After a comparison of digests, an empty list means that no bucket differed.
        let is_all = end.buckets.is_empty() && !std::mem::take(&mut self.by_digests);
        let is_named = |bucket: u16| is_all || end.buckets.contains(&bucket.into());
        let mut gone = Vec::new();
        for (key, entry) in self.state.entries() {
            if is_named(digest::service_bucket(key)) {
                gone.extend(entry.service().map(|_| Change::RemoveService((**key).clone())));
                gone.extend(entry.endpoints().keys().map(|address| Change::RemoveEndpoint((**key).clone(), *address)));
            }
        }
        for cidr in self.state.service_cidrs().filter(|cidr| is_named(digest::service_cidr_bucket(&cidr.name))) {
            gone.push(Change::RemoveServiceCidr(cidr.name.clone()));
        }
        gone.into_iter().for_each(|change| _ = self.state.apply(change, &mut Dirty::default()));
        self.apply();
        self.version = end.version;
        self.positions.extend(end.positions.iter().map(|position| (position.kind, position.position)));
        self.ends.push(end);
        self.refer();
    }

    fn refer(&mut self) {
        self.decoder.refer_to(Referable::of(&self.state));
    }

    pub(super) fn read_all(&mut self, store: &Store, cursor: &mut Cursor) -> Vec<Bytes> {
        let mut frames = Vec::new();
        while let Some(frame) = store.next_frame(cursor) {
            self.read(&frame);
            frames.push(frame);
        }
        assert_eq!(cursor.version(), self.version);
        frames
    }

    pub(super) fn resume(&mut self, store: &Store, epoch: u64) -> (ResumeMode, Cursor) {
        self.staged.clear();
        let digests = Some(self.state.digests().clone());
        let resume = Resume { epoch, version: self.version, positions: BTreeMap::new(), digests };
        let (mode, cursor) = store.cursor(Some(&resume));
        self.by_digests = mode == ResumeMode::Digests;
        if mode == ResumeMode::Log {
            self.refer();
        }
        (mode, cursor)
    }

    pub(super) fn assert_holds_all_of(&self, store: &Store) {
        // `Store::version` changes shortly after readers can see a commit.
        assert_eq!(self.version, store.read().version);
        assert!(*self.state.digests() == store.digests(), "the reader's state differs from the store's");
    }
}
