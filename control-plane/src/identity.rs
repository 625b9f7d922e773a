//! The identity of a peer, and what the peer may do.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use headgate_core::check_subdomain;
use headgate_tls::{REPLICA_URI_PREFIX, Validity, date};
use tokio::time::Instant;
use x509_parser::{extensions::GeneralName, prelude::*};

/// Scheme of the URIs that Headgate reads in subject alternative names. URIs with another scheme
/// are ignored.
const SCHEME: &str = "headgate:";

/// Prefix of the URI in the certificate of a node's agent.
const NODE_URI_PREFIX: &str = "headgate://node/";

/// Prefix of the URI in a reader's certificate.
const READER_URI_PREFIX: &str = "headgate://reader/";

/// Prefix of the common name of a node. The common name counts only together with
/// [`NODE_ORGANIZATION`]. The client certificate of a kubelet has this common name and this
/// organization.
const NODE_COMMON_NAME_PREFIX: &str = "system:node:";

/// Organization of nodes. Kubernetes and its signers accept the common name of a node only with
/// this organization.
const NODE_ORGANIZATION: &str = "system:nodes";

/// Organization of readers, for authorities that can set subjects more easily than URIs.
const READER_ORGANIZATION: &str = "headgate:readers";

/// Explains how to issue a certificate that names its holder.
const REMEDY: &str = "issue it with one URI in its subject alternative names: headgate://node/NAME for a node's agent (or the common name \
                      system:node:NAME and the organization system:nodes), headgate://reader/NAME for a reader (or the organization headgate:readers), or \
                      headgate://replica/NAME for a control plane replica";

/// The identity that a peer has proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The connection has no TLS, and any name that the peer gives is accepted
    /// (`--insecure-loopback`).
    Unchecked,
    /// The agent of this node. A certificate of a trusted authority proves this identity.
    Node(Arc<str>),
    /// The reader with this name, which is a person or a program. A certificate of a trusted
    /// authority proves this identity.
    Reader(Arc<str>),
    /// The control plane replica with this name. A certificate of a trusted authority proves this
    /// identity.
    Replica(Arc<str>),
    /// A certificate of a trusted authority that does not clearly name its holder. Contains the
    /// reason and the remedy.
    Unusable(Arc<str>),
}

impl Identity {
    /// The URI that states this identity; `None` if the peer has proved none.
    pub(crate) fn uri(&self) -> Option<String> {
        match self {
            Self::Node(name) => Some(format!("{NODE_URI_PREFIX}{name}")),
            Self::Reader(name) => Some(format!("{READER_URI_PREFIX}{name}")),
            Self::Replica(name) => Some(format!("{REPLICA_URI_PREFIX}{name}")),
            Self::Unchecked | Self::Unusable(_) => None,
        }
    }
}

/// The peer of a connection. The extensions of every request contain the peer.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Remote address.
    pub address: SocketAddr,
    /// The identity that the peer has proved.
    pub identity: Identity,
    /// When the peer's certificate expires; `None` without TLS. TLS does not verify the certificate
    /// again when a session resumes, so every permission check compares this time with the current
    /// time.
    pub not_after: Option<SystemTime>,
}

/// When a certificate expires, as a wall-clock time and as an instant for timers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expiry {
    pub(crate) at: Instant,
    not_after: SystemTime,
}

impl Expiry {
    /// Returns the error for the peer if the certificate has expired, or else `None`.
    pub(crate) fn due(self) -> Option<Denied> {
        (self.at <= Instant::now()).then_some(Denied::Expired(self.not_after))
    }

    /// Waits until the certificate has expired. If `expiry` is `None`, waits for ever.
    pub(crate) async fn passed(expiry: Option<Self>) {
        match expiry {
            Some(expiry) => tokio::time::sleep_until(expiry.at).await,
            None => std::future::pending().await,
        }
    }
}

/// Why a peer may not do something. A retry helps only with another certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The certificate was valid when the peer connected, and has expired since.
    #[error("the client certificate expired at {}; renew it and connect again, or check this machine's clock", date(*.0))]
    Expired(SystemTime),
    /// The identity of the peer does not allow the request.
    #[error("{0}")]
    NotAllowed(String),
}

impl Denied {
    /// The reason, as a value of the metric label `reason`, from a small fixed set.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Expired(_) => "certificate_expired",
            Self::NotAllowed(_) => "permission_denied",
        }
    }
}

impl From<Denied> for tonic::Status {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Expired(_) => Self::unauthenticated(denied.to_string()),
            Denied::NotAllowed(text) => Self::permission_denied(text),
        }
    }
}

impl Peer {
    /// Checks whether the peer may call `Discovery.Sync` as the agent of this node.
    ///
    /// # Errors
    ///
    /// [`Denied`], with the remedy.
    pub fn may_follow(&self, node_name: &str, now: SystemTime) -> Result<(), Denied> {
        let refusal = match &self.identity {
            Identity::Node(node) if **node != *node_name => Some(format!(
                "the client certificate is node {node}'s and cannot be used for node {node_name}: start the agent with --node-name {node}, or give it \
                 the certificate of {node_name}"
            )),
            Identity::Reader(name) | Identity::Replica(name) => {
                let role = if matches!(self.identity, Identity::Reader(_)) { "reader" } else { "replica" };
                Some(format!(
                    "the client certificate is the {role} {name}'s, and only nodes may call Discovery.Sync: give the agent a certificate with the URI \
                     headgate://node/{node_name}"
                ))
            }
            _ => None,
        };
        self.check(refusal, now)
    }

    /// Checks whether the peer may use `Inspect` and reflection. Nodes may use these services only
    /// if `nodes_may_inspect` is true. Replicas ask each other on behalf of readers.
    ///
    /// # Errors
    ///
    /// [`Denied`], with the remedy.
    pub fn may_inspect(&self, nodes_may_inspect: bool, now: SystemTime) -> Result<(), Denied> {
        let refusal = match &self.identity {
            Identity::Node(node) if !nodes_may_inspect => Some(format!(
                "the client certificate is node {node}'s, and nodes may not use Inspect or reflection: use a certificate with the URI headgate://reader/NAME (or the \
                 organization {READER_ORGANIZATION}), or start the control plane with --nodes-may-inspect"
            )),
            _ => None,
        };
        self.check(refusal, now)
    }

    /// Checks whether the peer may use `Peers`, as only other replicas may.
    ///
    /// # Errors
    ///
    /// [`Denied`], with the remedy.
    pub fn may_ask_as_replica(&self, now: SystemTime) -> Result<(), Denied> {
        let refusal = match &self.identity {
            Identity::Node(name) | Identity::Reader(name) => Some(format!(
                "the client certificate is {name}'s, and only replicas may use Peers: give the replica a certificate with the URI headgate://replica/NAME"
            )),
            _ => None,
        };
        self.check(refusal, now)
    }

    /// When a stream that starts now has to end; `None` without a certificate, or if the
    /// certificate expires beyond the range of timers.
    pub(crate) fn expiry(&self) -> Option<Expiry> {
        let not_after = self.not_after?;
        let at = Instant::now().checked_add(not_after.duration_since(SystemTime::now()).unwrap_or_default())?;
        Some(Expiry { at, not_after })
    }

    /// The error for the peer if its certificate has expired or does not name its holder, or if the
    /// identity does not allow the request (`refusal`).
    fn check(&self, refusal: Option<String>, now: SystemTime) -> Result<(), Denied> {
        match (self.not_after, &self.identity, refusal) {
            (Some(not_after), ..) if now > not_after => Err(Denied::Expired(not_after)),
            (_, Identity::Unusable(problem), _) => Err(Denied::NotAllowed(problem.to_string())),
            (.., Some(refusal)) => Err(Denied::NotAllowed(refusal)),
            _ => Ok(()),
        }
    }
}

/// Reads the identity in a peer's own certificate (DER), and when the certificate is valid.
///
/// # Errors
///
/// A sentence for the peer, if the certificate cannot be parsed. The caller has verified the chain,
/// so the authority has issued a malformed certificate.
pub fn from_certificate(der: &[u8]) -> Result<(Identity, Validity), String> {
    let malformed = |error: String| format!("the client certificate is malformed ({error}); issue a new one");
    let (_, certificate) = X509Certificate::from_der(der).map_err(|error| malformed(error.to_string()))?;
    let names = certificate.subject_alternative_name().map_err(|error| malformed(error.to_string()))?;
    let uris = names.iter().flat_map(|extension| &extension.value.general_names).filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let subject = certificate.subject();
    let common_names = subject.iter_common_name().filter_map(|name| name.as_str().ok());
    let organizations = subject.iter_organization().filter_map(|name| name.as_str().ok());
    let identity = identify(uris, common_names, organizations);
    let identity = identity
        .unwrap_or_else(|problem| Identity::Unusable(format!("the client certificate {problem}; {REMEDY}").into()));
    Ok((identity, Validity::of(&certificate)))
}

/// Returns the identity that the names in a certificate give. The names must identify one holder
/// and must not contradict each other. Otherwise no name is accepted, because an attacker may have
/// tricked the authority into adding a second name.
fn identify<'a>(
    uris: impl Iterator<Item = &'a str>,
    common_names: impl Iterator<Item = &'a str>,
    organizations: impl Iterator<Item = &'a str>,
) -> Result<Identity, String> {
    let is_ours = |uri: &&str| uri.get(..SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME));
    let mut ours = uris.filter(is_ours);
    let uri = ours.next();
    if let (Some(first), Some(second)) = (uri, ours.next()) {
        return Err(format!("has two URIs, {first:?} and {second:?}, but only one is allowed"));
    }
    let mut nodes = common_names.filter_map(|name| name.strip_prefix(NODE_COMMON_NAME_PREFIX));
    let common_name = nodes.next();
    if let Some(second) = nodes.next() {
        return Err(format!("has a second common name, {NODE_COMMON_NAME_PREFIX}{second}"));
    }
    let (mut is_reader, mut is_node) = (false, false);
    for organization in organizations {
        is_reader |= organization == READER_ORGANIZATION;
        is_node |= organization == NODE_ORGANIZATION;
    }
    let by_uri = uri.map(identity_of_uri).transpose()?;
    let named = match (by_uri, common_name) {
        (Some(Identity::Node(by_uri)), Some(by_name)) if *by_uri != *by_name => {
            return Err(format!(
                "contradicts itself: its URI names node {by_uri}, but its common name is {NODE_COMMON_NAME_PREFIX}{by_name}"
            ));
        }
        (Some(Identity::Reader(_) | Identity::Replica(_)), Some(by_name)) => {
            return Err(format!(
                "contradicts itself: its URI names a reader or a replica, but its common name is {NODE_COMMON_NAME_PREFIX}{by_name}"
            ));
        }
        (Some(by_uri), _) => Some(by_uri),
        (None, Some(name)) => {
            check_subdomain(name)
                .map_err(|problem| format!("has the common name {NODE_COMMON_NAME_PREFIX}{name}: {problem}"))?;
            if !is_node {
                return Err(format!(
                    "has the common name {NODE_COMMON_NAME_PREFIX}{name} without the organization {NODE_ORGANIZATION}"
                ));
            }
            Some(Identity::Node(name.into()))
        }
        (None, None) => None,
    };
    match named {
        Some(Identity::Replica(name)) if is_reader => {
            Err(format!("contradicts itself: it names replica {name}, but its organization is {READER_ORGANIZATION}"))
        }
        Some(Identity::Node(node)) if is_reader => {
            Err(format!("contradicts itself: it names node {node}, but its organization is {READER_ORGANIZATION}"))
        }
        Some(identity) => Ok(identity),
        None if is_reader => Ok(Identity::Reader(READER_ORGANIZATION.into())),
        None => Err("names neither a node nor a reader".to_owned()),
    }
}

fn identity_of_uri(uri: &str) -> Result<Identity, String> {
    // The rule for node names also applies to reader names, so that all names are safe to log.
    type Role = fn(Arc<str>) -> Identity;
    let of = |prefix, role: Role| Some((uri.strip_prefix(prefix)?, role));
    let found = of(NODE_URI_PREFIX, Identity::Node)
        .or_else(|| of(READER_URI_PREFIX, Identity::Reader))
        .or_else(|| of(REPLICA_URI_PREFIX, Identity::Replica));
    let Some((name, role)) = found else {
        return Err(format!(
            "has the URI {uri:?}, which is neither {NODE_URI_PREFIX}NAME nor {READER_URI_PREFIX}NAME nor {REPLICA_URI_PREFIX}NAME"
        ));
    };
    check_subdomain(name).map_err(|problem| format!("has the URI {uri:?}: {problem}"))?;
    Ok(role(name.into()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(common_name: &str, organization: Option<&str>, uris: &[&str]) -> Identity {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, common_name);
        if let Some(organization) = organization {
            parameters.distinguished_name.push(DnType::OrganizationName, organization);
        }
        parameters.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        parameters.not_after = rcgen::date_time_ymd(2060, 1, 1);
        let certificate = parameters.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let (identity, validity) = from_certificate(certificate.der()).unwrap();
        assert_eq!(date(validity.not_after), "2060-01-01T00:00:00Z");
        identity
    }

    fn identity(common_name: &str, uris: &[&str]) -> Identity {
        certificate(common_name, None, uris)
    }

    #[test]
    fn uri_common_name_or_organization_names_the_holder() {
        assert_eq!(identity("agent", &["headgate://node/n1"]), Identity::Node("n1".into()));
        assert_eq!(certificate("system:node:n2", Some("system:nodes"), &[]), Identity::Node("n2".into()));
        assert_eq!(identity("system:node:n1", &["headgate://node/n1"]), Identity::Node("n1".into()));
        assert_eq!(identity("agent", &["spiffe://x/y", "headgate://node/n1"]), Identity::Node("n1".into()));
        assert_eq!(identity("me", &["headgate://reader/me"]), Identity::Reader("me".into()));
        assert_eq!(identity("cp", &["headgate://replica/cp-0"]), Identity::Replica("cp-0".into()));
        let by_group = certificate("me", Some("headgate:readers"), &[]);
        assert_eq!(by_group, Identity::Reader("headgate:readers".into()));
        let by_both = certificate("me", Some("headgate:readers"), &["headgate://reader/me"]);
        assert_eq!(by_both, Identity::Reader("me".into()));
    }

    #[test]
    fn an_unclear_certificate_is_unusable_and_the_reason_is_named() {
        let cases: [(&str, Option<&str>, &[&str], &str); 17] = [
            ("agent", None, &[], "names neither a node nor a reader"),
            ("agent", None, &["spiffe://x/y"], "names neither a node nor a reader"),
            ("agent", None, &["https://node/n1"], "names neither a node nor a reader"),
            ("agent", None, &["headgate://node/n1", "headgate://node/n2"], "has two URIs"),
            ("agent", None, &["headgate://node/n1", "headgate://node/n1"], "has two URIs"),
            ("agent", None, &["headgate://node/n1", "headgate://reader/me"], "has two URIs"),
            ("agent", None, &["headgate://node/N1"], "\"N1\" is not a valid name"),
            ("agent", None, &["HEADGATE://node/n1"], "which is neither headgate://node/NAME nor"),
            ("agent", None, &["headgate://node/"], "\"\" is not a valid name"),
            ("agent", None, &["headgate://operator/me"], "which is neither"),
            (
                "system:node:n2",
                None,
                &["headgate://node/n1"],
                "its URI names node n1, but its common name is system:node:n2",
            ),
            (
                "system:node:n2",
                None,
                &["headgate://reader/me"],
                "its URI names a reader or a replica, but its common name is system:node:n2",
            ),
            ("system:node:N2", None, &[], "\"N2\" is not a valid name"),
            ("system:node:n2", None, &[], "system:node:n2 without the organization system:nodes"),
            ("system:node:n2", Some("system:masters"), &[], "system:node:n2 without the organization system:nodes"),
            ("system:node:n2", Some("headgate:readers"), &[], "system:node:n2 without the organization system:nodes"),
            ("agent", Some("headgate:readers"), &["headgate://node/n2"], "it names node n2, but its organization is"),
        ];
        for (common_name, organization, uris, problem) in cases {
            let Identity::Unusable(text) = certificate(common_name, organization, uris) else {
                panic!("{common_name} {organization:?} {uris:?} is accepted");
            };
            assert!(text.contains(problem) && text.contains("; issue it with one URI"), "{text}");
        }
    }

    #[test]
    fn each_role_has_only_its_own_permissions() {
        let now = SystemTime::now();
        let peer = |identity| Peer { address: ([192, 0, 2, 1], 1).into(), identity, not_after: Some(now) };
        let (node, reader) = (peer(Identity::Node("n1".into())), peer(Identity::Reader("me".into())));
        let nobody = peer(Identity::Unusable("names nobody".into()));
        assert_eq!(node.may_follow("n1", now), Ok(()));
        assert_eq!(reader.may_inspect(false, now), Ok(()));
        assert_eq!(node.may_inspect(true, now), Ok(()));
        let replica = peer(Identity::Replica("r1".into()));
        assert_eq!(replica.may_ask_as_replica(now), Ok(()));
        assert_eq!(replica.may_inspect(false, now), Ok(()), "replicas ask each other on behalf of readers");
        for (denied, remedy) in [
            (node.may_follow("n2", now), "--node-name n1"),
            (node.may_inspect(false, now), "--nodes-may-inspect"),
            (reader.may_follow("n1", now), "headgate://node/n1"),
            (nobody.may_follow("n1", now), "names nobody"),
            (nobody.may_inspect(true, now), "names nobody"),
            (replica.may_follow("n1", now), "headgate://node/n1"),
            (node.may_ask_as_replica(now), "headgate://replica/NAME"),
            (reader.may_ask_as_replica(now), "headgate://replica/NAME"),
            (nobody.may_ask_as_replica(now), "names nobody"),
        ] {
            let status = tonic::Status::from(denied.unwrap_err());
            assert_eq!(status.code(), tonic::Code::PermissionDenied);
            assert!(status.message().contains(remedy), "{status}");
        }
        let later = now + std::time::Duration::from_secs(1);
        for denied in [node.may_follow("n1", later), reader.may_inspect(true, later)] {
            let status = tonic::Status::from(denied.unwrap_err());
            assert_eq!(status.code(), tonic::Code::Unauthenticated);
            assert!(status.message().contains("renew it"), "{status}");
        }
    }

    #[test]
    fn a_malformed_certificate_is_an_error() {
        assert!(from_certificate(b"garbage").is_err());
    }
}
