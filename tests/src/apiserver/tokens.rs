//! Service-account tokens: issued and reviewed.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// What a token says, and what the server knows about it.
#[derive(Debug, Clone)]
pub struct Token {
    /// The audience.
    pub audience: String,
    /// The namespace of the pod and its ServiceAccount.
    pub namespace: String,
    /// The name of the ServiceAccount.
    pub service_account: String,
    /// The name of the pod; `None` for a token that is not bound to a pod.
    pub pod: Option<String>,
    /// The node of the pod. `None` stands for a server before Kubernetes 1.30, or for no pod.
    pub node: Option<String>,
    /// Until the token expires; negative for a token that has expired.
    pub valid_seconds: i64,
    /// True if the pod has been deleted.
    pub is_pod_gone: bool,
}

impl Token {
    /// A valid token of the agent on this node.
    pub fn of_agent(node: &str) -> Self {
        Self {
            audience: "headgate".to_owned(),
            namespace: "headgate-system".to_owned(),
            service_account: "headgate-node-agent".to_owned(),
            pod: Some(format!("agent-{node}")),
            node: Some(node.to_owned()),
            valid_seconds: 3600,
            is_pod_gone: false,
        }
    }
}

/// All tokens that the server has issued.
#[derive(Debug, Default)]
pub(super) struct Tokens(BTreeMap<String, Token>);

impl Tokens {
    /// Issues a token. Its text says nothing, because only the server reads it.
    pub(super) fn issue(&mut self, token: Token) -> String {
        let text = format!("token-{:016x}", fastrand::u64(..));
        self.0.insert(text.clone(), token);
        text
    }

    /// The answer to a TokenReview, as in `k8s.io/kubernetes`
    /// `pkg/registry/authentication/tokenreview`.
    pub(super) fn review(&self, review: &Value) -> Value {
        let token = self.0.get(review["spec"]["token"].as_str().unwrap_or_default());
        let asked = review["spec"]["audiences"].as_array().cloned().unwrap_or_default();
        let refused = |error: &str| json!({"user": {}, "error": error});
        let status = match token {
            None => refused("invalid bearer token"),
            Some(token) if token.valid_seconds <= 0 => refused("service account token has expired"),
            Some(token) if token.is_pod_gone => refused("service account token has been invalidated"),
            Some(token) if !asked.contains(&json!(token.audience)) => {
                refused("token audiences are invalid for the target audiences")
            }
            Some(token) => {
                let mut extra = json!({});
                let uid = token.pod.as_ref().map(|pod| format!("uid-of-{pod}"));
                for (key, value) in [("pod-name", &token.pod), ("pod-uid", &uid), ("node-name", &token.node)] {
                    if let Some(value) = value {
                        extra[format!("authentication.kubernetes.io/{key}")] = json!([value]);
                    }
                }
                let username = format!("system:serviceaccount:{}:{}", token.namespace, token.service_account);
                json!({
                    "authenticated": true, "audiences": [token.audience],
                    "user": {"username": username, "extra": extra},
                })
            }
        };
        json!({
            "kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {},
            "spec": review["spec"], "status": status,
        })
    }
}
