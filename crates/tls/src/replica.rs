//! The identity of replicas of the control plane, and how agents and replicas verify it.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::denied::Denied;

/// Prefix of the URI in the certificate of a replica.
pub const REPLICA_URI_PREFIX: &str = "headgate://replica/";

/// Suffix of the DNS name that says the same, for authorities that cannot write URIs.
const REPLICA_DNS_SUFFIX: &str = ".replica.headgate.internal";

/// Returns the URIs of the replicas that the subject alternative names of a certificate name.
pub(crate) fn replicas_in(certificate: &X509Certificate<'_>) -> Vec<String> {
    let uri = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => uri.starts_with(REPLICA_URI_PREFIX).then(|| (*uri).to_owned()),
        GeneralName::DNSName(name) => Some(format!("{REPLICA_URI_PREFIX}{}", name.strip_suffix(REPLICA_DNS_SUFFIX)?)),
        _ => None,
    };
    let names = certificate.subject_alternative_name().ok().flatten();
    names.iter().flat_map(|names| &names.value.general_names).filter_map(uri).collect()
}

/// Returns the entries of a file of denied holders that would deny the certificate (DER) of a
/// replica.
pub fn entries_of_replica(certificate: &[u8]) -> Vec<String> {
    let parsed = X509Certificate::from_der(certificate).ok();
    Denied::entries_of(certificate, parsed.map(|(_, certificate)| replicas_in(&certificate)).unwrap_or_default())
}

/// Returns a verifier that accepts each replica that an authority of `roots` has signed and that is
/// not `denied`, at whatever address or name it answers.
pub fn replica_verifier(roots: RootCertStore, denied: Denied) -> Arc<dyn ServerCertVerifier> {
    let algorithms = ring::default_provider().signature_verification_algorithms;
    Arc::new(ReplicaVerifier { roots, denied, algorithms })
}

#[derive(Debug)]
struct ReplicaVerifier {
    roots: RootCertStore,
    denied: Denied,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for ReplicaVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        match X509Certificate::from_der(end_entity) {
            _ if self.denied.contains(&entries_of_replica(end_entity)) => Err(CertificateError::Revoked.into()),
            Ok((_, certificate)) if !replicas_in(&certificate).is_empty() => Ok(ServerCertVerified::assertion()),
            _ => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
