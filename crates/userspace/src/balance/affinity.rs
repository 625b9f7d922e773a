//! ClientIP affinity: a bounded table of clients and their endpoints.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, SocketAddr},
};

/// The most clients that a Service remembers. When the table is full, the client that was added or
/// checked the longest time ago is forgotten.
pub const MAX_CLIENTS: usize = 65_536;

/// Clients and their endpoints. An entry is renewed by use.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    entries: HashMap<IpAddr, (SocketAddr, u64)>,
    /// Every client once, with the time at which to check the client. The check puts a client with
    /// a renewed entry at the end of the queue.
    queue: VecDeque<(u64, IpAddr)>,
    /// Clients that were forgotten early, because the table was full.
    pub(super) evicted: u64,
}

impl Affinity {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The endpoint of a client, if its entry has not expired.
    pub(super) fn get(&self, client: IpAddr, now_ms: u64) -> Option<SocketAddr> {
        let (endpoint, expires_ms) = self.entries.get(&client)?;
        (now_ms < *expires_ms).then_some(*endpoint)
    }

    /// Remembers or renews the endpoint of a client, and forgets expired clients.
    pub(super) fn put(&mut self, client: IpAddr, endpoint: SocketAddr, now_ms: u64, timeout_ms: u64, limit: usize) {
        // Two checks for each new entry empty the queue faster than it fills.
        self.check(now_ms, timeout_ms);
        self.check(now_ms, timeout_ms);
        let expires_ms = now_ms + timeout_ms;
        if self.entries.insert(client, (endpoint, expires_ms)).is_none() {
            self.queue.push_back((expires_ms, client));
            while self.entries.len() > limit.max(1) {
                let Some((_, oldest)) = self.queue.pop_front() else { break };
                self.entries.remove(&oldest);
                self.evicted += 1;
            }
        }
    }

    /// Checks the first client of the queue, if its time has come.
    fn check(&mut self, now_ms: u64, timeout_ms: u64) {
        let Some((due_ms, client)) = self.queue.front().copied() else { return };
        if now_ms < due_ms {
            return;
        }
        self.queue.pop_front();
        match self.entries.get(&client) {
            // A shorter timeout may have been set since.
            Some((_, expires_ms)) if now_ms < *expires_ms => {
                self.queue.push_back(((*expires_ms).min(now_ms + timeout_ms), client));
            }
            _ => {
                self.entries.remove(&client);
            }
        }
    }
}
