//! Who is at the other end of a connection.

use std::{net::SocketAddr, sync::Arc};

use x509_parser::{extensions::GeneralName, prelude::*};

/// URI in a certificate's subject alternative names that gives a node's name.
const NODE_URI_PREFIX: &str = "headgate://node/";

/// Common name that gives a node's name: what a kubelet's client certificate has.
const NODE_COMMON_NAME_PREFIX: &str = "system:node:";

/// Longest name of a Kubernetes object.
const MAX_NODE_NAME_BYTES: usize = 253;

/// What a peer has proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// There is no TLS: whatever it says is believed (`--insecure-loopback`).
    Unchecked,
    /// A certificate of a trusted authority, for this node.
    Node(Arc<str>),
    /// A certificate of a trusted authority that names no node: it may look, not follow.
    Reader,
}

/// A connection's peer; found in the extensions of every request.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Remote address.
    pub address: SocketAddr,
    /// What it has proved.
    pub identity: Identity,
}

/// The identity that a peer's own certificate (DER) gives.
///
/// A certificate that names several nodes names none.
///
/// # Errors
///
/// A sentence, when the certificate cannot be parsed. The chain has been verified by then, so this is a defect of the authority's.
pub fn from_certificate(der: &[u8]) -> Result<Identity, String> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|error| format!("client certificate: {error}"))?;
    let names = certificate.subject_alternative_name().map_err(|error| format!("client certificate: {error}"))?;
    let uris = names.iter().flat_map(|extension| &extension.value.general_names);
    let uris = uris.filter_map(|name| match name {
        GeneralName::URI(uri) => uri.strip_prefix(NODE_URI_PREFIX),
        _ => None,
    });
    let mut nodes: Vec<&str> = uris.collect();
    if nodes.is_empty() {
        let common_names = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        nodes.extend(common_names.filter_map(|name| name.strip_prefix(NODE_COMMON_NAME_PREFIX)));
    }
    nodes.dedup();
    match nodes.as_slice() {
        [node] if check_node_name(node).is_ok() => Ok(Identity::Node(Arc::from(*node))),
        _ => Ok(Identity::Reader),
    }
}

/// Checks that a name can be a Kubernetes node's: a DNS subdomain in lower case (RFC 1123).
///
/// # Errors
///
/// A sentence that says what is wrong.
pub fn check_node_name(name: &str) -> Result<(), String> {
    let is_label = |label: &str| {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_allowed)
    };
    if name.len() > MAX_NODE_NAME_BYTES {
        return Err(format!("node name of {} bytes; at most {MAX_NODE_NAME_BYTES} are allowed", name.len()));
    }
    if !name.split('.').all(is_label) {
        return Err(format!("{name:?} is no node name: lower-case letters, digits, '-' and '.' are allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn identity(common_name: &str, uris: &[&str]) -> Identity {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, common_name);
        parameters.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        let certificate = parameters.self_signed(&KeyPair::generate().unwrap()).unwrap();
        from_certificate(certificate.der()).unwrap()
    }

    #[test]
    fn uri_or_common_name_gives_the_node() {
        assert_eq!(identity("agent", &["headgate://node/n1"]), Identity::Node("n1".into()));
        assert_eq!(identity("system:node:n2", &[]), Identity::Node("n2".into()));
        assert_eq!(identity("system:node:n2", &["headgate://node/n1"]), Identity::Node("n1".into()));
        assert_eq!(identity("agent", &["spiffe://x/y"]), Identity::Reader);
        assert_eq!(identity("agent", &["headgate://node/n1", "headgate://node/n2"]), Identity::Reader);
        assert_eq!(identity("agent", &["headgate://node/N1"]), Identity::Reader);
    }

    #[test]
    fn garbage_is_refused() {
        assert!(from_certificate(b"garbage").is_err());
    }

    #[test]
    fn node_names() {
        for good in ["a", "node-1", "node-1.example.com"] {
            assert_eq!(check_node_name(good), Ok(()));
        }
        for bad in ["", "A", "a..b", "-a", "a-", "a b", "a\n", &"a".repeat(254)] {
            assert!(check_node_name(bad).is_err(), "{bad}");
        }
    }
}
