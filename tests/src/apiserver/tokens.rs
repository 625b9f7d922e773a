//! Service-account tokens: issued, reviewed, and verified by the keys that the server publishes.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use data_encoding::BASE64URL_NOPAD;
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::{Value, json};

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

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

    fn username(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.service_account)
    }

    fn claims(&self) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().cast_signed();
        let named = |name: &Option<String>| name.as_ref().map(|name| json!({"name": name, "uid": uid(name)}));
        json!({
            "aud": [self.audience], "iss": ISSUER, "sub": self.username(),
            "iat": now - 60, "nbf": now - 60, "exp": now + self.valid_seconds,
            "kubernetes.io": {
                "namespace": self.namespace,
                "serviceaccount": {"name": self.service_account, "uid": uid(&self.service_account)},
                "pod": named(&self.pod), "node": named(&self.node),
            },
        })
    }
}

fn uid(name: &str) -> String {
    format!("uid-of-{name}")
}

/// The signing key, all tokens that the server has issued, and the pods that it shows.
pub(super) struct Tokens {
    key: EcdsaKeyPair,
    issued: Mutex<BTreeMap<String, Token>>,
    pods: Mutex<BTreeMap<String, Value>>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

impl Tokens {
    /// Draws a new key.
    pub(super) fn new() -> Self {
        let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random)
            .and_then(|key| Ok(EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random)?))
            .unwrap_or_else(|error| panic!("no key for tokens: {error}"));
        Self { key, issued: Mutex::default(), pods: Mutex::default() }
    }

    /// Signs a token with ES256.
    pub(super) fn issue(&self, token: Token) -> String {
        let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
        let message = format!("{}.{}", part(&json!({"alg": "ES256", "kid": "stand-in"})), part(&token.claims()));
        let signature = self.key.sign(&SystemRandom::new(), message.as_bytes());
        let signature = signature.unwrap_or_else(|error| panic!("no signature: {error}"));
        let text = format!("{message}.{}", BASE64URL_NOPAD.encode(signature.as_ref()));
        self.issued.lock().unwrap_or_else(PoisonError::into_inner).insert(text.clone(), token);
        text
    }

    /// Shows a pod of the agents' namespace.
    pub(super) fn put_pod(&self, name: &str, uid: &str, node: &str) {
        let pod = json!({
            "kind": "Pod", "apiVersion": "v1", "spec": {"nodeName": node, "containers": []},
            "metadata": {"name": name, "namespace": "headgate-system", "uid": uid},
        });
        let path = format!("/api/v1/namespaces/headgate-system/pods/{name}");
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).insert(path, pod);
    }

    /// Returns the page that verifies tokens or shows a pod; `None` for another path.
    pub(super) fn page(&self, path: &str) -> Option<Value> {
        let number = |bytes: &[u8]| BASE64URL_NOPAD.encode(bytes);
        match path {
            // The address of the keys is outside of the cluster, so no client may use it.
            "/.well-known/openid-configuration" => {
                Some(json!({"issuer": ISSUER, "jwks_uri": "https://192.0.2.255/openid/v1/jwks"}))
            }
            "/openid/v1/jwks" => {
                let (x, y) = self.key.public_key().as_ref()[1..].split_at(32);
                let (x, y) = (number(x), number(y));
                Some(
                    json!({"keys": [{"use": "sig", "kty": "EC", "kid": "stand-in", "crv": "P-256", "alg": "ES256", "x": x, "y": y}]}),
                )
            }
            path => self.pods.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned(),
        }
    }

    /// The answer to a TokenReview, as in `k8s.io/kubernetes`
    /// `pkg/registry/authentication/tokenreview`.
    pub(super) fn review(&self, review: &Value) -> Value {
        let text = review["spec"]["token"].as_str().unwrap_or_default();
        let token = self.issued.lock().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
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
                for (key, value) in [
                    ("pod-name", token.pod.clone()),
                    ("pod-uid", token.pod.as_deref().map(uid)),
                    ("node-name", token.node.clone()),
                ] {
                    if let Some(value) = value {
                        extra[format!("authentication.kubernetes.io/{key}")] = json!([value]);
                    }
                }
                json!({
                    "authenticated": true, "audiences": [token.audience],
                    "user": {"username": token.username(), "extra": extra},
                })
            }
        };
        json!({
            "kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {},
            "spec": review["spec"], "status": status,
        })
    }
}
