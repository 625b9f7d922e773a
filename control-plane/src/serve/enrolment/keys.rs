//! The public keys of the API server for service-account tokens, for times when it does not answer.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use http::Request;
use kube::Client;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::claims::Keys;
use crate::metrics::Metrics;

/// How often the keys are read.
const PERIOD: Duration = Duration::from_secs(300);

/// How long to wait after the keys could not be read.
const RETRY: Duration = Duration::from_secs(10);

/// The longest time for one request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The age at which keys are no longer used. A key that the API server has withdrawn since the last
/// answer is trusted for this long.
const MAX_AGE: Duration = Duration::from_secs(86_400);

/// What the API server last said.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) keys: Keys,
    pub(super) issuer: String,
    read_at: Instant,
}

/// The keys that were read last.
#[derive(Debug, Default)]
pub(super) struct KnownKeys(Mutex<Option<Arc<Known>>>);

impl KnownKeys {
    /// Returns the keys and the issuer at `now`.
    ///
    /// # Errors
    ///
    /// Why there are none. A retry helps once the API server has answered again.
    pub(super) fn at(&self, now: Instant) -> Result<Arc<Known>, String> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = known.ok_or("this replica has never read the keys of the API server")?;
        if now.duration_since(known.read_at) > MAX_AGE {
            return Err(format!("the keys of the API server are older than {} hours", MAX_AGE.as_secs() / 3600));
        }
        Ok(known)
    }

    /// Reads the keys again and again. Never returns.
    pub(super) async fn follow(&self, client: &Client, metrics: &Metrics) {
        let mut problem = None;
        loop {
            let result = timeout(TIMEOUT, read(client)).await.unwrap_or_else(|_| Err("no answer".to_owned()));
            metrics.count_enrolment_keys(if result.is_ok() { "success" } else { "failure" });
            let pause = match result {
                Ok(known) => {
                    *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(known));
                    problem = None;
                    PERIOD
                }
                Err(error) => {
                    if problem.as_ref() != Some(&error) {
                        tracing::warn!(%error, "the keys of the API server for tokens cannot be read; grant `get` of /openid/v1/jwks and /.well-known/openid-configuration");
                        problem = Some(error);
                    }
                    RETRY
                }
            };
            sleep(pause).await;
        }
    }
}

/// Reads the issuer and the keys. The document of the issuer also names an address of the keys,
/// which may be outside of the cluster. That address is not used.
async fn read(client: &Client) -> Result<Known, String> {
    let get = async |path: &str| {
        let request = Request::get(path).body(Vec::new()).map_err(|error| error.to_string())?;
        client.request_text(request).await.map_err(|error| format!("{path}: {error}"))
    };
    let document = get("/.well-known/openid-configuration").await?;
    let issuer =
        serde_json::from_str::<Value>(&document).ok().and_then(|value| Some(value["issuer"].as_str()?.to_owned()));
    let issuer = issuer.ok_or("/.well-known/openid-configuration: the answer names no issuer")?;
    let keys = Keys::parse(&get("/openid/v1/jwks").await?).map_err(|fault| format!("/openid/v1/jwks: {fault}"))?;
    Ok(Known { keys, issuer, read_at: Instant::now() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn keys_are_used_up_to_their_greatest_age() {
        let known = KnownKeys::default();
        let now = Instant::now();
        assert!(known.at(now).unwrap_err().contains("never"));
        let set: Value = serde_json::from_str(include_str!("rs256.json")).unwrap();
        let keys = Keys::parse(&set["jwks"].to_string()).unwrap();
        *known.0.lock().unwrap() = Some(Arc::new(Known { keys, issuer: String::new(), read_at: now }));
        assert!(known.at(now + MAX_AGE).is_ok());
        assert!(known.at(now + MAX_AGE + Duration::from_secs(1)).unwrap_err().contains("older than 24 hours"));
    }
}
