//! Verifies service-account tokens with the public keys of the API server, without a request to the
//! API server.
//!
//! API servers sign these tokens with RS256 or ES256 (KEP-1205, `k8s.io/kubernetes`
//! `pkg/serviceaccount`). ring, which TLS uses too, verifies both.

use std::time::{Duration, SystemTime};

use data_encoding::BASE64URL_NOPAD;
use headgate_core::ServiceKey;
use ring::signature::{ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey};
use serde_json::Value;

/// The tolerated difference between the clocks of the API server and of this machine.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(60);

/// What a token must contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Required<'a> {
    pub(super) audience: &'a str,
    pub(super) issuer: &'a str,
    pub(super) service_account: &'a ServiceKey,
}

/// What a valid token says about its pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claims {
    /// The node of the pod. API servers before 1.30 do not name the node.
    pub(super) node: Option<String>,
    pub(super) pod: String,
}

/// Why a token is not valid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("it is malformed: {0}")]
    Malformed(&'static str),
    #[error("it is signed with {0:?}, and only RS256 and ES256 are accepted")]
    Algorithm(String),
    #[error("the API server had no key {0:?} when it last answered")]
    UnknownKey(String),
    #[error("its signature is wrong")]
    Signature,
    #[error("it is not for the audience {0:?}")]
    Audience(String),
    #[error("its issuer {0:?} is not the issuer of the API server")]
    Issuer(String),
    #[error("it has expired")]
    Expired,
    #[error("it is not valid yet; compare the clocks of the API server and of this machine")]
    NotYetValid,
    #[error("it belongs to {0:?}")]
    ServiceAccount(String),
    #[error("it is not bound to a pod")]
    NoPod,
}

/// The keys in the answer of the API server to `/openid/v1/jwks`, by their ids.
#[derive(Debug)]
pub(super) struct Keys(Vec<(String, Key)>);

#[derive(Debug)]
enum Key {
    Rsa(RsaPublicKeyComponents<Vec<u8>>),
    /// An uncompressed point on the curve P-256.
    P256(Vec<u8>),
}

impl Keys {
    /// Reads a set of keys (RFC 7517). Leaves out keys of other types.
    ///
    /// # Errors
    ///
    /// The text is not a set of keys, or contains no usable key.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let set: Value = serde_json::from_str(text).map_err(|_| "the answer is not JSON")?;
        let keys = set["keys"].as_array().ok_or("the answer has no list of keys")?.iter();
        let keys: Vec<_> = keys.filter_map(|key| Some((key["kid"].as_str()?.to_owned(), Key::read(key)?))).collect();
        if keys.is_empty() { Err("the answer contains no key for RS256 or ES256") } else { Ok(Self(keys)) }
    }

    fn verify(&self, algorithm: &str, id: &str, message: &[u8], signature: &[u8]) -> Result<(), Fault> {
        // The algorithm comes from the key. So an attacker cannot choose an algorithm that uses a
        // public key in another way.
        let mut named = self.0.iter().filter(|(name, key)| name == id && key.algorithm() == algorithm).peekable();
        if named.peek().is_none() {
            return Err(Fault::UnknownKey(id.to_owned()));
        }
        let is_signer = |(_, key): &(String, Key)| match key {
            Key::Rsa(key) => key.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature).is_ok(),
            Key::P256(point) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, signature).is_ok()
            }
        };
        if named.any(is_signer) { Ok(()) } else { Err(Fault::Signature) }
    }
}

impl Key {
    fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa(_) => "RS256",
            Self::P256(_) => "ES256",
        }
    }

    fn read(key: &Value) -> Option<Self> {
        let number = |name: &str| BASE64URL_NOPAD.decode(key[name].as_str()?.as_bytes()).ok();
        match (key["kty"].as_str()?, key["crv"].as_str()) {
            ("RSA", _) => Some(Self::Rsa(RsaPublicKeyComponents { n: number("n")?, e: number("e")? })),
            ("EC", Some("P-256")) => {
                let (x, y) = (number("x")?, number("y")?);
                // SEC 1, section 2.3.3: 4 marks an uncompressed point.
                (x.len() == 32 && y.len() == 32).then(|| Self::P256([vec![4], x, y].concat()))
            }
            _ => None,
        }
    }
}

/// Verifies a token at `now`.
///
/// # Errors
///
/// [`Fault`]. A retry helps only with another token, or for [`Fault::UnknownKey`] with newer keys.
pub(super) fn verify(token: &str, keys: &Keys, required: Required<'_>, now: SystemTime) -> Result<Claims, Fault> {
    let parts: Vec<&str> = token.split('.').collect();
    let [header, claims, signature] = parts[..] else {
        return Err(Fault::Malformed("it does not have three parts"));
    };
    let decode = |part: &str| BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| Fault::Malformed("it is not base64"));
    let object =
        |part: &str| serde_json::from_slice::<Value>(&decode(part)?).map_err(|_| Fault::Malformed("it is not JSON"));
    let named = object(header)?;
    let algorithm = named["alg"].as_str().unwrap_or_default();
    if !["RS256", "ES256"].contains(&algorithm) {
        return Err(Fault::Algorithm(algorithm.to_owned()));
    }
    let message = &token[..header.len() + 1 + claims.len()];
    keys.verify(algorithm, named["kid"].as_str().unwrap_or_default(), message.as_bytes(), &decode(signature)?)?;
    checked(&object(claims)?, required, now)
}

/// Checks the claims of a token with a valid signature.
fn checked(claims: &Value, required: Required<'_>, now: SystemTime) -> Result<Claims, Fault> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let Required { audience, issuer, service_account } = required;
    let is_for_us = match &claims["aud"] {
        Value::Array(audiences) => audiences.iter().any(|named| named == audience),
        named => named == audience,
    };
    if !is_for_us {
        return Err(Fault::Audience(audience.to_owned()));
    }
    if claims["iss"] != issuer {
        return Err(Fault::Issuer(text(&claims["iss"])));
    }
    let time = |name: &str| {
        let seconds = claims[name].as_u64().filter(|seconds| *seconds <= u32::MAX.into());
        seconds.map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    };
    if now >= time("exp").ok_or(Fault::Malformed("it has no time of expiry"))? {
        return Err(Fault::Expired);
    }
    if now + CLOCK_TOLERANCE < time("nbf").ok_or(Fault::Malformed("it has no time of its start"))? {
        return Err(Fault::NotYetValid);
    }
    let bound = &claims["kubernetes.io"];
    let ServiceKey { namespace, name } = service_account;
    let is_bound = bound["namespace"] == **namespace && bound["serviceaccount"]["name"] == **name;
    let subject = format!("system:serviceaccount:{namespace}:{name}");
    if !is_bound || claims["sub"] != subject.as_str() {
        return Err(Fault::ServiceAccount(text(&claims["sub"])));
    }
    let present = |value: &Value| Some(text(value)).filter(|text| !text.is_empty());
    match (present(&bound["pod"]["name"]), present(&bound["pod"]["uid"])) {
        (Some(pod), Some(_)) => Ok(Claims { node: present(&bound["node"]["name"]), pod }),
        _ => Err(Fault::NoPod),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use ring::{
        rand::SystemRandom,
        signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
    };
    use serde_json::json;

    use super::*;

    struct Signer(EcdsaKeyPair);

    impl Signer {
        fn new() -> Self {
            let random = SystemRandom::new();
            let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
            Self(EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.as_ref(), &random).unwrap())
        }

        fn keys(&self) -> Keys {
            let point = self.0.public_key().as_ref();
            let number = |bytes: &[u8]| BASE64URL_NOPAD.encode(bytes);
            let key =
                json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": number(&point[1..33]), "y": number(&point[33..])});
            Keys::parse(&json!({"keys": [{"kty": "oct", "kid": "k", "k": "AA"}, key]}).to_string()).unwrap()
        }

        fn token(&self, header: &Value, claims: &Value) -> String {
            let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
            let message = format!("{}.{}", part(header), part(claims));
            let signature = self.0.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
            format!("{message}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
        }
    }

    fn verified(token: &str, keys: &Keys) -> Result<Claims, Fault> {
        let service_account = ServiceKey::new("headgate-system", "headgate-node-agent");
        let (audience, issuer) = ("headgate", "https://kubernetes.default.svc");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1500);
        verify(token, keys, Required { audience, issuer, service_account: &service_account }, now)
    }

    fn claims() -> Value {
        json!({
            "aud": ["headgate"], "iss": "https://kubernetes.default.svc", "exp": 2000, "nbf": 1000, "iat": 1000,
            "sub": "system:serviceaccount:headgate-system:headgate-node-agent",
            "kubernetes.io": {
                "namespace": "headgate-system",
                "node": {"name": "n1", "uid": "u1"},
                "pod": {"name": "agent-x", "uid": "u2"},
                "serviceaccount": {"name": "headgate-node-agent", "uid": "u3"},
            },
        })
    }

    fn header() -> Value {
        json!({"alg": "ES256", "kid": "k"})
    }

    #[test]
    fn a_valid_token_names_its_pod_and_its_node() {
        let signer = Signer::new();
        let token = signer.token(&header(), &claims());
        let expected = Claims { node: Some("n1".to_owned()), pod: "agent-x".to_owned() };
        assert_eq!(verified(&token, &signer.keys()), Ok(expected));
        let mut older = claims();
        older["kubernetes.io"].as_object_mut().unwrap().remove("node");
        let token = signer.token(&header(), &older);
        assert_eq!(verified(&token, &signer.keys()).unwrap().node, None);
    }

    #[test]
    fn each_wrong_claim_is_a_fault() {
        let signer = Signer::new();
        let account = |named: &str| Fault::ServiceAccount(named.to_owned());
        let own = "system:serviceaccount:headgate-system:headgate-node-agent";
        let other = "system:serviceaccount:headgate-system:default";
        let cases = [
            ("/aud", json!(["https://kubernetes.default.svc"]), Fault::Audience("headgate".to_owned())),
            ("/aud", json!([]), Fault::Audience("headgate".to_owned())),
            ("/iss", json!("https://other"), Fault::Issuer("https://other".to_owned())),
            ("/exp", json!(1500), Fault::Expired),
            ("/exp", json!("never"), Fault::Malformed("it has no time of expiry")),
            ("/nbf", json!(1561), Fault::NotYetValid),
            ("/nbf", json!(null), Fault::Malformed("it has no time of its start")),
            ("/kubernetes.io/namespace", json!("default"), account(own)),
            ("/kubernetes.io/serviceaccount/name", json!("default"), account(own)),
            ("/sub", json!(other), account(other)),
            ("/kubernetes.io/pod", json!(null), Fault::NoPod),
            ("/kubernetes.io/pod/uid", json!(""), Fault::NoPod),
            ("/kubernetes.io", json!(7), account(own)),
        ];
        for (pointer, value, fault) in cases {
            let mut claims = claims();
            *claims.pointer_mut(pointer).unwrap() = value;
            assert_eq!(verified(&signer.token(&header(), &claims), &signer.keys()), Err(fault), "{pointer}");
        }
    }

    #[test]
    fn only_a_signature_of_a_known_key_with_its_own_algorithm_counts() {
        let signer = Signer::new();
        let good = signer.token(&header(), &claims());
        let fault = |token: &str| verified(token, &signer.keys()).unwrap_err();
        assert_eq!(verified(&good, &Signer::new().keys()), Err(Fault::Signature));
        let unknown = |id: &str| Fault::UnknownKey(id.to_owned());
        assert_eq!(fault(&signer.token(&json!({"alg": "ES256", "kid": "other"}), &claims())), unknown("other"));
        assert_eq!(fault(&signer.token(&json!({"alg": "RS256", "kid": "k"}), &claims())), unknown("k"));
        for algorithm in ["none", "HS256", ""] {
            let token = signer.token(&json!({"alg": algorithm, "kid": "k"}), &claims());
            assert_eq!(fault(&token), Fault::Algorithm(algorithm.to_owned()));
        }
        let (start, signature) = good.rsplit_once('.').unwrap();
        let mut other = claims();
        other["kubernetes.io"]["node"]["name"] = json!("n2");
        let payload = BASE64URL_NOPAD.encode(other.to_string().as_bytes());
        let head = start.split_once('.').unwrap().0;
        assert_eq!(fault(&format!("{head}.{payload}.{signature}")), Fault::Signature);
        assert_eq!(fault(&format!("{start}.")), Fault::Signature);
        for malformed in ["", "a.b", "a.b.c.d", "!.!.!"] {
            assert!(matches!(fault(malformed), Fault::Malformed(_)), "{malformed}");
        }
    }

    /// openssl 3 made this token and its key, because ring makes no RSA keys.
    #[test]
    fn rs256_is_verified() {
        let fixture: Value = serde_json::from_str(include_str!("rs256.json")).unwrap();
        let keys = Keys::parse(&fixture["jwks"].to_string()).unwrap();
        let token = fixture["token"].as_str().unwrap();
        assert_eq!(verified(token, &keys).unwrap().node.as_deref(), Some("n1"));
        let (start, signature) = token.rsplit_once('.').unwrap();
        let first = if signature.starts_with('A') { "B" } else { "A" };
        assert_eq!(verified(&format!("{start}.{first}{}", &signature[1..]), &keys), Err(Fault::Signature));
    }

    #[test]
    fn answers_without_usable_keys_are_refused() {
        for (answer, fault) in [
            ("<html>", "the answer is not JSON"),
            ("{}", "the answer has no list of keys"),
            (
                r#"{"keys": [{"kty": "EC", "crv": "P-256", "kid": "k", "x": "AA", "y": "AA"}]}"#,
                "the answer contains no key for RS256 or ES256",
            ),
        ] {
            assert_eq!(Keys::parse(answer).map(drop), Err(fault));
        }
    }
}
