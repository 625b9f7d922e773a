//! Asks the API server who holds a service-account token.
//!
//! The API server checks the signature, the issuer, the time of expiry and the audience of a token.
//! It also rejects tokens whose pod is gone (KEP-1205, `k8s.io/kubernetes` `pkg/serviceaccount`).

use std::{collections::BTreeMap, time::Duration};

use headgate_core::{ServiceKey, dns_name::check_subdomain};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec},
    core::v1::Pod,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::timeout;

/// The longest time for one request to the API server.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// Keys in the extra fields of a TokenReview (`k8s.io/apiserver`,
/// `pkg/authentication/serviceaccount`).
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// The holder of a valid token.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) node: String,
    pub(super) pod: String,
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
    #[error("the API server reviewed no token: {0}; try again later")]
    Unreachable(String),
}

impl TokenError {
    /// The label `result` of the metric.
    pub(super) fn result(&self) -> &'static str {
        match self {
            Self::Rejected(..) => "token_rejected",
            Self::ServiceAccount(..) => "service_account",
            Self::NoPod => "no_pod",
            Self::NoNode(..) => "no_node",
            Self::Unreachable(_) => "api_server",
        }
    }
}

/// Asks one API server.
pub(super) struct Tokens {
    pub(super) client: Client,
    pub(super) audience: String,
    /// Namespace and name of the agents' ServiceAccount.
    pub(super) service_account: ServiceKey,
}

impl Tokens {
    /// Returns the holder of `token`.
    ///
    /// # Errors
    ///
    /// [`TokenError`]. A retry with the same token helps only for [`TokenError::Unreachable`].
    pub(super) async fn holder(&self, token: &str) -> Result<Holder, TokenError> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let review = answered(reviews.create(&PostParams::default(), &review)).await?;
        let status = review.status.unwrap_or_default();
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
        let node = match only(&extra, NODE_NAME) {
            Some(node) => node,
            None => self.node_of(&pod, &uid).await?,
        };
        check_subdomain(&node).map_err(|error| TokenError::NoNode(pod.clone(), error.to_string()))?;
        Ok(Holder { node, pod })
    }

    /// Asks for the node of a pod. API servers before 1.30 do not name the node in a TokenReview.
    async fn node_of(&self, pod: &str, uid: &str) -> Result<String, TokenError> {
        let no_node = |why: &str| TokenError::NoNode(pod.to_owned(), why.to_owned());
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.service_account.namespace);
        let found = answered(pods.get_opt(pod)).await?.ok_or_else(|| no_node("the pod does not exist"))?;
        if found.metadata.uid.as_deref() != Some(uid) {
            return Err(no_node("another pod has this name now"));
        }
        found.spec.and_then(|spec| spec.node_name).ok_or_else(|| no_node("it is not scheduled"))
    }
}

/// Waits for an answer of the API server.
async fn answered<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, TokenError> {
    match timeout(API_TIMEOUT, request).await {
        Ok(answer) => answer.map_err(|error| TokenError::Unreachable(error.to_string())),
        Err(_) => Err(TokenError::Unreachable(format!("no answer in {} s", API_TIMEOUT.as_secs()))),
    }
}

/// Returns the value of an extra field that has exactly one value.
fn only(extra: &BTreeMap<String, Vec<String>>, key: &str) -> Option<String> {
    match extra.get(key)?.as_slice() {
        [value] if !value.is_empty() => Some(value.clone()),
        _ => None,
    }
}
