//! Service-account tokens and their reviews. The stand-in issues no real tokens: a test registers a
//! text and what it stands for.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde_json::{Value, json};

/// What a token stands for.
#[derive(Debug, Clone)]
pub struct Token {
    /// The audience.
    pub audience: String,
    /// `NAMESPACE:NAME` of the ServiceAccount.
    pub service_account: String,
    /// The name of the pod; `None` for a token that is not bound to a pod.
    pub pod: Option<String>,
    /// The node of the pod. `None` stands for a server before Kubernetes 1.30, or for no pod.
    pub node: Option<String>,
    /// Why the server rejects the token, for example because it has expired.
    pub problem: Option<&'static str>,
}

impl Token {
    /// A valid token of the agent on this node.
    pub fn of_agent(node: &str) -> Self {
        Self {
            audience: "headgate".to_owned(),
            service_account: "headgate-system:headgate-node-agent".to_owned(),
            pod: Some(format!("agent-{node}")),
            node: Some(node.to_owned()),
            problem: None,
        }
    }
}

/// All tokens that the server knows.
#[derive(Debug, Default)]
pub(super) struct Tokens(Mutex<BTreeMap<String, Token>>);

impl Tokens {
    pub(super) fn insert(&self, text: &str, token: Token) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned(), token);
    }

    /// The answer to a TokenReview, as in `k8s.io/kubernetes`
    /// `pkg/registry/authentication/tokenreview`.
    pub(super) fn review(&self, review: &Value) -> Value {
        let text = review["spec"]["token"].as_str().unwrap_or_default();
        let token = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
        let asked = review["spec"]["audiences"].as_array().cloned().unwrap_or_default();
        let status = match token {
            None => json!({"user": {}, "error": "invalid bearer token"}),
            Some(Token { problem: Some(problem), .. }) => json!({"user": {}, "error": problem}),
            Some(token) if !asked.contains(&json!(token.audience)) => {
                json!({"user": {}, "error": "token audiences are invalid for the target audiences"})
            }
            Some(token) => {
                let mut extra = json!({});
                for (key, value) in [
                    ("pod-name", token.pod.clone()),
                    ("pod-uid", token.pod.map(|pod| format!("uid-of-{pod}"))),
                    ("node-name", token.node),
                ] {
                    if let Some(value) = value {
                        extra[format!("authentication.kubernetes.io/{key}")] = json!([value]);
                    }
                }
                let username = format!("system:serviceaccount:{}", token.service_account);
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
