//! What TCP connections and UDP sessions have in common.

use std::{net::SocketAddr, sync::Arc};

use crate::{
    balance::{EndpointKey, Picked},
    services::Service,
    stats::Stats,
    threads::EventLoop,
};

/// A connection or session of a client. It counts as open for the account and for the endpoint
/// until it is dropped.
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
    /// Chooses an endpoint. The account has counted the connection as open. Returns `None` if the
    /// Service has no endpoint.
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

    /// Chooses an endpoint that was not tried. The caller passes it to [`Self::move_to`] or
    /// releases it.
    pub(crate) fn pick(&self, tried: &[EndpointKey], event_loop: &mut EventLoop) -> Option<Picked> {
        self.service.pick(self.client.ip(), tried, event_loop.now_ms, event_loop.random())
    }

    /// Leaves the endpoint for another one.
    pub(crate) fn move_to(&mut self, next: Picked) {
        self.service.state().pool.release(self.picked.key);
        self.picked = next;
        self.stats().retries.add(1);
    }

    /// Marks the endpoint as failed.
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
