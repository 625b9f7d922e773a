//! The authority that signs the certificates of enrolled nodes. `headgatectl ca` writes its files:
//! the first certificate in `ca.crt` belongs to `ca.key`.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use headgate_tls::Validity;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, SanType,
};
use tokio_rustls::rustls::{
    RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, UnixTime},
    server::WebPkiClientVerifier,
};
use x509_parser::pem::{Pem, parse_x509_pem};

/// An authority that can sign.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    not_after: SystemTime,
}

/// Why no certificate was signed.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The files of the authority cannot be used.
    #[error("the authority cannot be used: {0}")]
    Authority(String),
    /// The request of the client cannot be used.
    #[error("the certificate signing request cannot be used: {0}")]
    Request(rcgen::Error),
    /// The cryptographic library reports an error.
    #[error("cannot sign a certificate: {0}")]
    Crypto(rcgen::Error),
}

impl Authority {
    /// Reads the contents of the files of `--enrolment-ca-cert` and `--enrolment-ca-key`. `trusted`
    /// is the contents of the file of `--tls-client-ca`, with which agents present the certificates
    /// later.
    ///
    /// # Errors
    ///
    /// [`IssueError::Authority`]. Retry after the files have changed.
    pub(super) fn parse(certificates: &str, key: &str, trusted: &str, now: SystemTime) -> Result<Self, IssueError> {
        let bad = |problem: String| IssueError::Authority(problem);
        let key = KeyPair::from_pem(key)
            .map_err(|error| bad(format!("--enrolment-ca-key is not a PEM private key in PKCS#8 ({error})")))?;
        let (_, pem) = parse_x509_pem(certificates.as_bytes())
            .map_err(|error| bad(format!("--enrolment-ca-cert is not a PEM certificate ({error})")))?;
        let own =
            pem.parse_x509().map_err(|error| bad(format!("--enrolment-ca-cert is not a certificate ({error})")))?;
        if own.public_key().subject_public_key.data.as_ref() != key.der_bytes() {
            return Err(bad(
                "--enrolment-ca-key is not the key of the first certificate of --enrolment-ca-cert: replace both files"
                    .to_owned(),
            ));
        }
        if !own.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca) {
            return Err(bad("the first certificate of --enrolment-ca-cert does not belong to an authority".to_owned()));
        }
        let not_after = Validity::of(&own).not_after;
        if not_after <= now {
            return Err(bad("it has expired: replace it with `headgatectl ca rotate`".to_owned()));
        }
        let is_own = |other: &Pem| {
            let other = other.parse_x509();
            other.is_ok_and(|other| other.subject() == own.subject() && other.public_key() == own.public_key())
        };
        if !Pem::iter_from_buffer(trusted.as_bytes()).flatten().any(|other| is_own(&other)) {
            return Err(bad(
                "--tls-client-ca does not contain the first certificate of --enrolment-ca-cert, so this control plane would reject agents with certificates of this authority: \
                 add the certificate to the file"
                    .to_owned(),
            ));
        }
        let issuer = Issuer::from_ca_cert_pem(certificates, key).map_err(IssueError::Crypto)?;
        Ok(Self { issuer, certificate: pem.contents.into(), not_after })
    }

    /// Returns true if this authority has issued a client certificate that is valid at `now`.
    /// Certificates of other authorities in `--tls-client-ca` do not count.
    pub(super) fn has_issued(&self, certificate: &CertificateDer<'_>, now: SystemTime) -> bool {
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).is_ok()
            && WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::new(ring::default_provider()))
                .build()
                .is_ok_and(|verifier| verifier.verify_client_cert(certificate, &[], now).is_ok())
    }

    /// Signs a certificate for the agent of `node`. Uses only the public key of `request` (PKCS#10,
    /// DER), after a check of its signature. Names and extensions of the request do not count.
    /// Returns the certificate in PEM and the end of its validity, which is not later than the end
    /// of the authority.
    ///
    /// # Errors
    ///
    /// [`IssueError`]. A retry does not help.
    pub(super) fn issue(
        &self,
        node: &str,
        request: &[u8],
        validity: Validity,
    ) -> Result<(String, SystemTime), IssueError> {
        let request = CertificateSigningRequestParams::from_der(&request.into()).map_err(IssueError::Request)?;
        let not_after = validity.not_after.min(self.not_after);
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // A common name has at most 64 characters (RFC 5280, ub-common-name). The URI is complete.
        params.distinguished_name.push(DnType::CommonName, &node[..node.floor_char_boundary(64)]);
        let uri = format!("headgate://node/{node}").try_into().map_err(IssueError::Crypto)?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (validity.not_before.into(), not_after.into());
        let certificate = params.signed_by(&request.public_key, &self.issuer).map_err(IssueError::Crypto)?;
        Ok((certificate.pem(), not_after))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use rcgen::BasicConstraints;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn authority(days: u32, is_ca: IsCa) -> (String, String) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = is_ca;
        params.not_after = (SystemTime::now() + DAY * days).into();
        let key = KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    fn week(now: SystemTime) -> Validity {
        Validity { not_before: now, not_after: now + DAY * 7 }
    }

    fn ca(days: u32) -> (String, String) {
        authority(days, IsCa::Ca(BasicConstraints::Unconstrained))
    }

    #[test]
    fn the_certificate_has_the_given_name_and_the_key_of_the_request() {
        let (certificate, key) = ca(2);
        let (other, other_key) = ca(2);
        let now = SystemTime::now();
        let bundle = certificate + &other;
        let signer = Authority::parse(&bundle, &key, &bundle, now).unwrap();
        assert!(Authority::parse(&bundle, &other_key, &bundle, now).is_err(), "the key of the second authority");
        let own = KeyPair::generate().unwrap();
        let mut wished = CertificateParams::new(vec!["control-plane.example".to_owned()]).unwrap();
        wished.subject_alt_names.push(SanType::URI("headgate://node/other".try_into().unwrap()));
        wished.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let request = wished.serialize_request(&own).unwrap();
        let (pem, not_after) = signer.issue("n1", request.der(), week(now)).unwrap();
        assert!(not_after < now + DAY * 3, "the certificate outlives its authority");
        let der = parse_x509_pem(pem.as_bytes()).unwrap().1.contents.into();
        assert!(signer.has_issued(&der, now) && !signer.has_issued(&der, now + DAY * 3));
        let (other, key) = ca(2);
        assert!(!Authority::parse(&other, &key, &other, now).unwrap().has_issued(&der, now));
        let (_, pem) = parse_x509_pem(pem.as_bytes()).unwrap();
        let issued = pem.parse_x509().unwrap();
        assert_eq!(issued.public_key().subject_public_key.data.as_ref(), own.der_bytes());
        let names = issued.subject_alternative_name().unwrap().unwrap();
        assert_eq!(format!("{:?}", names.value.general_names), "[URI(\"headgate://node/n1\")]");
        assert!(!issued.is_ca() && issued.subject().to_string() == "CN=n1");
    }

    #[test]
    fn a_request_with_a_wrong_signature_is_refused() {
        let (certificate, key) = ca(2);
        let signer = Authority::parse(&certificate, &key, &certificate, SystemTime::now()).unwrap();
        let own = KeyPair::generate().unwrap();
        let request = CertificateParams::default().serialize_request(&own).unwrap();
        let mut der = request.der().to_vec();
        let place = der.windows(own.der_bytes().len()).position(|part| part == own.der_bytes()).unwrap();
        der[place..][..own.der_bytes().len()].copy_from_slice(KeyPair::generate().unwrap().der_bytes());
        for wrong in [&der[..], b"", b"garbage"] {
            let refused = signer.issue("n1", wrong, week(SystemTime::now()));
            assert!(matches!(refused, Err(IssueError::Request(_))), "{refused:?}");
        }
    }

    #[test]
    fn an_unusable_authority_is_named() {
        let (certificate, key) = ca(2);
        let problem = |certificate: &str, key: &str, now| {
            Authority::parse(certificate, key, certificate, now).map(drop).unwrap_err().to_string()
        };
        assert!(problem(&certificate, &key, SystemTime::now() + DAY * 3).contains("expired"));
        assert!(problem("", &key, SystemTime::now()).contains("--enrolment-ca-cert is not a PEM certificate"));
        assert!(problem(&certificate, "", SystemTime::now()).contains("--enrolment-ca-key is not a PEM private key"));
        let (leaf, leaf_key) = authority(2, IsCa::ExplicitNoCa);
        assert!(problem(&leaf, &leaf_key, SystemTime::now()).contains("does not belong to an authority"));
        // The names are equal, the keys are not.
        let (other, _) = ca(2);
        for trusted in ["", "garbage", &other] {
            let refused = Authority::parse(&certificate, &key, trusted, SystemTime::now()).map(drop).unwrap_err();
            assert!(refused.to_string().contains("--tls-client-ca does not contain"), "{trusted}: {refused}");
        }
        assert!(Authority::parse(&certificate, &key, &(other + &certificate), SystemTime::now()).is_ok());
    }
}
