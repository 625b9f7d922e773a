//! The Lease that decides which replica writes conditions. The rules are those of client-go's
//! leader election (`k8s.io/client-go` `tools/leaderelection`), so that no clocks are compared.

use std::{sync::Arc, time::Duration};

use headgate_core::{ServiceKey, errors::chain};
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// How long other replicas wait after the last renewal before they take the Lease.
const LEASE_SECONDS: i32 = 15;

/// How long the holder acts after it sent its last successful renewal.
const HELD_FOR: Duration = Duration::from_secs(10);

/// The pause between two attempts.
const RETRY: Duration = Duration::from_secs(2);

/// The longest time for one attempt.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// Takes and renews the Lease.
pub(super) struct Elector {
    api: Api<Lease>,
    lease: ServiceKey,
    identity: String,
    metrics: Arc<Metrics>,
    held_until: watch::Sender<Option<Instant>>,
    /// The version of another replica's Lease, and when this replica first saw this version.
    other: Option<(String, Instant)>,
}

impl Elector {
    /// Creates the elector of a replica that does not hold the Lease. `identity` names this process
    /// and no other one.
    pub(super) fn new(client: Client, lease: ServiceKey, identity: String, metrics: Arc<Metrics>) -> Self {
        let api = Api::namespaced(client, &lease.namespace);
        Self { api, lease, identity, metrics, held_until: watch::Sender::new(None), other: None }
    }

    /// Until when this replica may write; `None` if it does not hold the Lease.
    pub(super) fn held_until(&self) -> watch::Receiver<Option<Instant>> {
        self.held_until.subscribe()
    }

    /// Takes and renews the Lease until `shutdown`, and then releases it.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            loop {
                self.turn().await;
                sleep(RETRY.mul_f64(0.8 + 0.4 * fastrand::f64())).await;
            }
        };
        shutdown.run_until_cancelled(work).await;
        if self.held_until.send_replace(None).is_some() {
            // If the release fails, the Lease expires.
            let _ = timeout(API_TIMEOUT, self.release()).await;
        }
    }

    async fn turn(&mut self) {
        let started = Instant::now();
        let outcome = timeout(API_TIMEOUT, self.attempt()).await;
        let outcome = outcome.unwrap_or_else(|_| Err(format!("no answer within {} seconds", API_TIMEOUT.as_secs())));
        let until = match outcome {
            Ok(is_held) => is_held.then(|| started + HELD_FOR),
            Err(problem) => {
                self.metrics.count_gate_failure("lease");
                tracing::warn!(lease = %self.lease, "cannot take or renew the Lease that chooses the writer of readiness gates: {problem}; allow the verbs get, create and update on leases.coordination.k8s.io in its namespace");
                self.held_until.borrow().filter(|until| *until > Instant::now())
            }
        };
        let was_held = self.held_until.send_replace(until).is_some();
        self.metrics.set_gate_leader(until.is_some());
        if was_held != until.is_some() {
            let does = if until.is_some() { "writes" } else { "no longer writes" };
            tracing::info!(lease = %self.lease, "this replica {does} the conditions of readiness gates");
        }
    }

    /// Takes or renews the Lease. Returns whether this replica holds it.
    async fn attempt(&mut self) -> Result<bool, String> {
        let Some(mut lease) = self.api.get_opt(&self.lease.name).await.map_err(|error| chain(&error))? else {
            let metadata = ObjectMeta { name: Some(self.lease.name.to_string()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.taken(&LeaseSpec::default())) };
            return is_written(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let is_own = holder == self.identity;
        if !is_own && !holder.is_empty() {
            let version = lease.metadata.resource_version.clone().unwrap_or_default();
            let seconds = spec.lease_duration_seconds.unwrap_or(LEASE_SECONDS);
            let valid = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
            let (_, since) = match self.other.take().filter(|(seen, _)| *seen == version) {
                Some(other) => self.other.insert(other),
                None => self.other.insert((version, Instant::now())),
            };
            if since.elapsed() < valid {
                return Ok(false);
            }
        }
        lease.spec = Some(if is_own { LeaseSpec { renew_time: now(), ..spec } } else { self.taken(&spec) });
        is_written(self.api.replace(&self.lease.name, &PostParams::default(), &lease).await)
    }

    fn taken(&self, old: &LeaseSpec) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(LEASE_SECONDS),
            acquire_time: now(),
            renew_time: now(),
            lease_transitions: Some(old.lease_transitions.map_or(0, |transitions| transitions.saturating_add(1))),
            ..LeaseSpec::default()
        }
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let mut lease = self.api.get(&self.lease.name).await?;
        let spec = lease.spec.take().unwrap_or_default();
        if spec.holder_identity.as_ref() == Some(&self.identity) {
            lease.spec = Some(LeaseSpec { holder_identity: None, renew_time: now(), ..spec });
            self.api.replace(&self.lease.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }
}

fn now() -> Option<MicroTime> {
    Some(MicroTime(Timestamp::now()))
}

/// Another replica may have been faster, which is no error.
fn is_written(answer: Result<Lease, kube::Error>) -> Result<bool, String> {
    match answer {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(chain(&error)),
    }
}
