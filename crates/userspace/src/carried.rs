//! What TCP connections and UDP sessions have in common.

use std::{net::SocketAddr, sync::Arc};

use crate::{
    balance::{EndpointKey, Picked},
    services::Service,
    stats::Stats,
};

/// A connection or session of a client. It counts as open for the account and for the endpoint
/// until it is dropped.
#[derive(Debug)]
pub(crate) struct Carried {
    pub(crate) service: Arc<Service>,
    pub(crate) picked: Picked,
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
        now_ms: u64,
        random: u64,
    ) -> Option<Self> {
        let Some(picked) = service.pick(client.ip(), &[], now_ms, random) else {
            service.account.stats.open.subtract(1);
            service.account.stats.without_endpoint.add(1);
            return None;
        };
        let (opened_ms, active_ms) = (now_ms, now_ms);
        Some(Self { service, picked, client, destination, opened_ms, active_ms, bytes: [0; 2], datagrams: [0; 2] })
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.service.account.stats
    }

    /// Chooses an endpoint that was not tried. The caller passes it to [`Self::move_to`] or
    /// releases it.
    pub(crate) fn pick(&self, tried: &[EndpointKey], now_ms: u64, random: u64) -> Option<Picked> {
        self.service.pick(self.client.ip(), tried, now_ms, random)
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
