//! Asks the API server who holds a service-account token.
//!
//! The API server checks the signature, the issuer, the time of expiry and the audience of a token.
//! It also rejects tokens whose pod is gone (KEP-1205, `k8s.io/kubernetes` `pkg/serviceaccount`).

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::{ServiceKey, check_subdomain, errors::chain};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    core::v1::Pod,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::timeout;

/// The longest time for one request to the API server.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// After a failed request, the API server is not asked for this time. Otherwise each token would
/// wait for [`API_TIMEOUT`].
const CUT_OFF: Duration = Duration::from_secs(5);

/// Keys in the extra fields of a TokenReview (`k8s.io/apiserver`,
/// `pkg/authentication/serviceaccount`).
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// The holder of a valid token, or of a certificate that counts instead.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) node: String,
    /// The pod of the token, for the log.
    pub(super) pod: Option<String>,
}

/// What the API server says about the pod of a token.
#[derive(Debug, PartialEq, Eq)]
struct Reviewed {
    pod: String,
    uid: String,
    /// `None` on API servers before 1.30.
    node: Option<String>,
}

/// Why a token gives no certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenError {
    #[error("the API server rejects the token: {0}; the token must be for the audience {1:?}, and its pod must exist")]
    Rejected(String, String),
    #[error(
        "the token belongs to {0:?} and not to {1:?}; check --enrolment-service-account and the agent's ServiceAccount"
    )]
    ServiceAccount(String, String),
    #[error("the token is not bound to a pod; use the token of a projected volume")]
    NoPod,
    #[error("the pod {0} of the token has no valid node: {1}")]
    NoNode(String, String),
    #[error("the API server is unreachable: {0}; try again later")]
    Unreachable(String),
    #[error("the API server is too busy: {0}; try again later")]
    Busy(String),
    #[error("the API server does not answer the control plane: {0}; grant `create tokenreviews` and `get pods`")]
    Denied(String),
}

impl TokenError {
    /// The label `result` of the metric.
    pub(super) fn result(&self) -> &'static str {
        match self {
            Self::ServiceAccount(..) => "service_account",
            Self::NoPod => "no_pod",
            Self::Rejected(..) => "token_rejected",
            Self::NoNode(..) => "no_node",
            Self::Unreachable(_) | Self::Busy(_) | Self::Denied(_) => "api_server",
        }
    }
}

/// Asks one API server.
pub(super) struct Tokens {
    client: Client,
    audience: String,
    service_account: ServiceKey,
    /// Until when the API server is not asked, and why.
    cut_off: Mutex<Option<(Instant, String)>>,
}

impl Tokens {
    /// Accepts tokens for `audience` of the agents' ServiceAccount.
    pub(super) fn new(client: Client, audience: String, service_account: ServiceKey) -> Self {
        Self { client, audience, service_account, cut_off: Mutex::default() }
    }

    /// Returns the holder of `token`.
    ///
    /// # Errors
    ///
    /// [`TokenError`]. A retry with the same token helps for [`TokenError::Unreachable`],
    /// [`TokenError::Busy`] and [`TokenError::Denied`].
    pub(super) async fn holder(&self, token: &str) -> Result<Holder, TokenError> {
        let cut_off = self.cut_off().clone().filter(|(until, _)| Instant::now() < *until);
        match cut_off {
            Some((_, why)) => Err(TokenError::Unreachable(why)),
            None => self.review(token).await,
        }
    }

    fn cut_off(&self) -> MutexGuard<'_, Option<(Instant, String)>> {
        self.cut_off.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn review(&self, token: &str) -> Result<Holder, TokenError> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let review = self.answered(reviews.create(&PostParams::default(), &review)).await?;
        let Reviewed { pod, uid, node } = self.reviewed(review.status.unwrap_or_default())?;
        let node = match node {
            Some(node) => node,
            None => self.node_of(&pod, &uid).await?,
        };
        match check_subdomain(&node) {
            Ok(()) => Ok(Holder { node, pod: Some(pod) }),
            Err(problem) => Err(TokenError::NoNode(pod, problem)),
        }
    }

    /// Checks the answer to a review.
    fn reviewed(&self, status: TokenReviewStatus) -> Result<Reviewed, TokenError> {
        let is_for_us = status.audiences.unwrap_or_default().contains(&self.audience);
        if status.authenticated != Some(true) || !is_for_us {
            let why = status.error.unwrap_or_else(|| "it is not valid for this audience".to_owned());
            return Err(TokenError::Rejected(why, self.audience.clone()));
        }
        let user = status.user.unwrap_or_default();
        let expected =
            format!("system:serviceaccount:{}:{}", self.service_account.namespace, self.service_account.name);
        let username = user.username.unwrap_or_default();
        if username != expected {
            return Err(TokenError::ServiceAccount(username, expected));
        }
        let extra = user.extra.unwrap_or_default();
        let (Some(pod), Some(uid)) = (only(&extra, POD_NAME), only(&extra, POD_UID)) else {
            return Err(TokenError::NoPod);
        };
        Ok(Reviewed { pod, uid, node: only(&extra, NODE_NAME) })
    }

    /// Asks for the node of a pod. API servers before 1.30 do not name the node in a TokenReview.
    async fn node_of(&self, pod: &str, uid: &str) -> Result<String, TokenError> {
        let no_node = |why: &str| TokenError::NoNode(pod.to_owned(), why.to_owned());
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.service_account.namespace);
        let found = self.answered(pods.get_opt(pod)).await?.ok_or_else(|| no_node("the pod does not exist"))?;
        if found.metadata.uid.as_deref() != Some(uid) {
            return Err(no_node("another pod has this name now"));
        }
        found.spec.and_then(|spec| spec.node_name).ok_or_else(|| no_node("it is not scheduled"))
    }

    /// Waits for an answer of the API server, and remembers that there is none.
    async fn answered<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, TokenError> {
        let why = match timeout(API_TIMEOUT, request).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(kube::Error::Api(status))) if status.code == 429 => {
                return Err(TokenError::Busy(status.to_string()));
            }
            Ok(Err(kube::Error::Api(status))) if status.code < 500 => {
                return Err(TokenError::Denied(status.to_string()));
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => format!("no answer in {} s", API_TIMEOUT.as_secs()),
        };
        *self.cut_off() = Some((Instant::now() + CUT_OFF, why.clone()));
        Err(TokenError::Unreachable(why))
    }
}

/// Returns the value of an extra field that has exactly one value.
fn only(extra: &BTreeMap<String, Vec<String>>, key: &str) -> Option<String> {
    match extra.get(key)?.as_slice() {
        [value] if !value.is_empty() => Some(value.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::Config;
    use serde_json::{Value, json};

    use super::*;

    /// The result of a review whose status differs from a good one in one field.
    fn reviewed(field: &str, value: Value) -> Result<Reviewed, &'static str> {
        let mut status = json!({
            "authenticated": true, "audiences": ["headgate"],
            "user": {
                "username": "system:serviceaccount:headgate-system:agent",
                "extra": {POD_NAME: ["agent-x"], POD_UID: ["u1"], NODE_NAME: ["n1"]},
            },
        });
        if let Some(key) = field.strip_prefix("extra ") {
            status["user"]["extra"][key] = value;
        } else {
            *status.pointer_mut(field).unwrap() = value;
        }
        let client = Client::try_from(Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let account = ServiceKey::new("headgate-system", "agent");
        let tokens = Tokens::new(client, "headgate".to_owned(), account);
        tokens.reviewed(serde_json::from_value(status).unwrap()).map_err(|error| error.result())
    }

    #[tokio::test]
    async fn only_complete_reviews_for_this_audience_and_account_count() {
        let node = |node: Option<&str>| {
            Ok(Reviewed { pod: "agent-x".to_owned(), uid: "u1".to_owned(), node: node.map(str::to_owned) })
        };
        assert_eq!(reviewed("/authenticated", json!(true)), node(Some("n1")));
        assert_eq!(reviewed("/audiences", json!(["other", "headgate"])), node(Some("n1")));
        assert_eq!(reviewed(&format!("extra {NODE_NAME}"), json!([])), node(None));
        for (field, value, result) in [
            ("/authenticated", json!(false), "token_rejected"),
            ("/authenticated", json!(null), "token_rejected"),
            // An API server that does not know audiences returns none.
            ("/audiences", json!(null), "token_rejected"),
            ("/audiences", json!(["other"]), "token_rejected"),
            ("/user/username", json!("system:serviceaccount:headgate-system:other"), "service_account"),
            ("/user/username", json!("system:serviceaccount:other:agent"), "service_account"),
            ("/user", json!(null), "service_account"),
            (&format!("extra {POD_NAME}"), json!([]), "no_pod"),
            (&format!("extra {POD_NAME}"), json!(["agent-x", "agent-y"]), "no_pod"),
            (&format!("extra {POD_UID}"), json!([""]), "no_pod"),
            ("/user/extra", json!(null), "no_pod"),
        ] {
            assert_eq!(reviewed(field, value.clone()), Err(result), "{field} {value}");
        }
    }
}
