//! Verifies the certificates of clients. Each role has its authorities: those of nodes sign only
//! for nodes, so who has their key, as each replica has for enrolment, is no reader and no replica.

use std::sync::Arc;

use headgate_tls::{Denied, Material};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime},
    server::{
        VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

use crate::identity::{self, Identity};

/// The verifiers of the roles, and what is denied in each role.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    nodes: Arc<dyn ClientCertVerifier>,
    others: Arc<dyn ClientCertVerifier>,
    denied: Denied,
    is_mandatory: bool,
}

impl ClientVerifier {
    /// Returns a verifier for clients that need a certificate if `is_mandatory`.
    ///
    /// # Errors
    ///
    /// There is no authority.
    pub(super) fn new(
        material: &Material,
        provider: &Arc<CryptoProvider>,
        is_mandatory: bool,
    ) -> Result<Self, VerifierBuilderError> {
        let verifier = |roots: &RootCertStore| {
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), Arc::clone(provider)).build()
        };
        let others = verifier(&material.authorities)?;
        let nodes = verifier(&material.node_authorities)?;
        Ok(Self { nodes, others, denied: material.denied.clone(), is_mandatory })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.is_mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A client has one certificate, and needs no hint to choose it.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let identity = identity::from_certificate(certificate).ok().map(|(identity, _)| identity);
        let verifier = if matches!(identity, Some(Identity::Node(_))) { &self.nodes } else { &self.others };
        let verified = verifier.verify_client_cert(certificate, intermediates, now)?;
        let entries = Denied::entries_of(certificate, identity.and_then(|identity| identity.uri()));
        if self.denied.contains(&entries) { Err(CertificateError::Revoked.into()) } else { Ok(verified) }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.others.supported_verify_schemes()
    }
}
