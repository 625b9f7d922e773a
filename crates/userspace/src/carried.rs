//! What TCP connections and UDP sessions have in common: their data, their tokens and their list.

use std::{cmp::Reverse, net::SocketAddr, sync::Arc};

use slab::Slab;

use crate::{
    balance::{EndpointKey, Picked},
    list::{ConnectionInfo, ConnectionList, ConnectionState, ListFilter},
    relay::Side,
    services::{Protocol, Service},
    stats::Stats,
    threads::EventLoop,
};

/// A connection or session of a client. Until it is dropped, account and endpoint count it.
#[derive(Debug)]
pub(crate) struct Carried {
    pub(crate) service: Arc<Service>,
    pub(crate) picked: Picked,
    /// Tells the tokens from those of earlier connections in the same slot.
    pub(crate) generation: u32,
    pub(crate) client: SocketAddr,
    /// The address of the Service that the client used.
    pub(crate) destination: SocketAddr,
    pub(crate) opened_ms: u64,
    pub(crate) active_ms: u64,
    /// The bytes to the endpoint, and to the client.
    pub(crate) bytes: [u64; 2],
    /// The datagrams to the endpoint, and to the client.
    pub(crate) datagrams: [u64; 2],
}

impl Carried {
    /// Chooses an endpoint for a connection that the account counts. `None` if there is none.
    pub(crate) fn begin(
        service: Arc<Service>,
        client: SocketAddr,
        destination: SocketAddr,
        event_loop: &mut EventLoop,
    ) -> Option<Self> {
        let (now_ms, random) = (event_loop.now_ms, event_loop.random());
        let Some(picked) = service.pick(client.ip(), &[], now_ms, random) else {
            service.account.stats.open.subtract(1);
            service.account.stats.without_endpoint.add(1);
            return None;
        };
        Some(Self {
            service,
            picked,
            generation: event_loop.next_generation(),
            client,
            destination,
            opened_ms: now_ms,
            active_ms: now_ms,
            bytes: [0; 2],
            datagrams: [0; 2],
        })
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.service.account.stats
    }

    /// Chooses an endpoint that was not tried. Pass it to [`Self::move_to`] or release it.
    pub(crate) fn pick(&self, tried: &[EndpointKey], event_loop: &mut EventLoop) -> Option<Picked> {
        self.service.pick(self.client.ip(), tried, event_loop.now_ms, event_loop.random())
    }

    /// Leaves the endpoint for another one.
    pub(crate) fn move_to(&mut self, next: Picked) {
        self.service.state().pool.release(self.picked.key);
        self.picked = next;
        self.stats().retries.add(1);
    }

    pub(crate) fn endpoint_failed(&self, now_ms: u64) {
        self.service.state().pool.failed(self.picked.key, now_ms);
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.service.state().pool.release(self.picked.key);
        self.stats().open.subtract(1);
    }
}

/// What a thread carries and lists.
pub(crate) trait Listed {
    const PROTOCOL: Protocol;

    fn carried(&self) -> &Carried;

    fn state(&self) -> ConnectionState;

    /// What lists and logs show.
    fn info(&self, now_ms: u64) -> ConnectionInfo {
        let carried = self.carried();
        ConnectionInfo {
            protocol: Self::PROTOCOL,
            service: Arc::clone(&carried.service.state().settings.name),
            client: carried.client,
            destination: carried.destination,
            endpoint: carried.picked.address,
            state: self.state(),
            bytes_to_endpoint: carried.bytes[0],
            bytes_to_client: carried.bytes[1],
            datagrams_to_endpoint: carried.datagrams[0],
            datagrams_to_client: carried.datagrams[1],
            age_ms: now_ms.saturating_sub(carried.opened_ms),
            idle_ms: now_ms.saturating_sub(carried.active_ms),
        }
    }
}

/// The epoll token of a socket of a connection.
pub(crate) fn token(slot: usize, generation: u32, side: Side) -> u64 {
    (u64::from(generation) << 32) | ((slot as u64) << 1) | side as u64
}

/// The slot of the connection of a token, if it has not ended, and the side of the socket.
pub(crate) fn find<L: Listed>(connections: &Slab<L>, token: u64) -> Option<(usize, Side)> {
    let slot = ((token & u64::from(u32::MAX)) >> 1) as usize;
    let is_same = u64::from(connections.get(slot)?.carried().generation) == token >> 32;
    is_same.then_some((slot, if token & 1 == 0 { Side::Client } else { Side::Endpoint }))
}

impl ConnectionList {
    /// The list of one thread. Apart from the result, it needs 16 bytes for each connection.
    pub(crate) fn of<'a, L: Listed + 'a>(connections: &'a Slab<L>, filter: &ListFilter, now_ms: u64) -> Self {
        let is_wanted = |of: &Carried| filter.account.as_ref().is_none_or(|name| of.service.account.name == *name);
        let wanted = connections.iter().map(|(_, listed)| listed).filter(|listed| is_wanted(listed.carried()));
        let mut wanted: Vec<(u64, &L)> = wanted.map(|listed| (listed.carried().bytes.iter().sum(), listed)).collect();
        let left_out = wanted.len().saturating_sub(filter.limit);
        if left_out > 0 {
            wanted.select_nth_unstable_by_key(filter.limit, |(bytes, _)| Reverse(*bytes));
            wanted.truncate(filter.limit);
        }
        let connections = wanted.into_iter().map(|(_, listed)| listed.info(now_ms)).collect();
        Self { connections, left_out: left_out as u64 }
    }
}
