//! The authority that signs the certificates of enrolled nodes, and nothing else. `headgatectl ca`
//! writes its files: the first certificate in `node-ca.crt` belongs to `node-ca.key`.

use std::time::SystemTime;

use headgate_tls::Validity;
use rcgen::{
    Certificate, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
};
use x509_parser::pem::{Pem, parse_x509_pem};

/// An authority that can sign.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
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
    /// Reads the contents of the files of `--tls-node-ca` and `--enrolment-ca-key`. `others` is the
    /// contents of the file of `--tls-client-ca`, which must not trust this authority: each replica
    /// has its key, and who takes the key from one could act as a reader or a replica.
    ///
    /// # Errors
    ///
    /// [`IssueError::Authority`]. Retry after the files have changed.
    pub(super) fn parse(certificates: &str, key: &str, others: &str, now: SystemTime) -> Result<Self, IssueError> {
        let bad = |problem: String| IssueError::Authority(problem);
        let key = KeyPair::from_pem(key)
            .map_err(|error| bad(format!("--enrolment-ca-key is not a PEM private key in PKCS#8 ({error})")))?;
        let (_, pem) = parse_x509_pem(certificates.as_bytes())
            .map_err(|error| bad(format!("--tls-node-ca is not a PEM certificate ({error})")))?;
        let own = pem.parse_x509().map_err(|error| bad(format!("--tls-node-ca is not a certificate ({error})")))?;
        if own.public_key().subject_public_key.data.as_ref() != key.der_bytes() {
            return Err(bad(
                "--enrolment-ca-key is not the key of the first certificate of --tls-node-ca: replace both files"
                    .to_owned(),
            ));
        }
        if !own.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca) {
            return Err(bad("the first certificate of --tls-node-ca does not belong to an authority".to_owned()));
        }
        let not_after = Validity::of(&own).not_after;
        if not_after <= now {
            return Err(bad("it has expired: replace it with `headgatectl ca rotate`".to_owned()));
        }
        let is_own = |other: &Pem| {
            let other = other.parse_x509();
            other.is_ok_and(|other| other.subject() == own.subject() && other.public_key() == own.public_key())
        };
        if Pem::iter_from_buffer(others.as_bytes()).flatten().any(|other| is_own(&other)) {
            return Err(bad(
                "--tls-client-ca contains the first certificate of --tls-node-ca, so who has its key could act as a reader or a replica: give nodes an \
                 authority of their own (`headgatectl ca init` creates both)"
                    .to_owned(),
            ));
        }
        let issuer = Issuer::from_ca_cert_pem(certificates, key).map_err(IssueError::Crypto)?;
        Ok(Self { issuer, not_after })
    }

    /// Signs a certificate for the agent of `node`. Uses only the public key of `request` (PKCS#10,
    /// DER), after a check of its signature. Names and extensions of the request do not count.
    /// Returns the certificate and the end of its validity, which is not later than the end
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
    ) -> Result<(Certificate, SystemTime), IssueError> {
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
        Ok((certificate, not_after))
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
        let signer = Authority::parse(&bundle, &key, "", now).unwrap();
        assert!(Authority::parse(&bundle, &other_key, "", now).is_err(), "the key of the second authority");
        let own = KeyPair::generate().unwrap();
        let mut wished = CertificateParams::new(vec!["control-plane.example".to_owned()]).unwrap();
        wished.subject_alt_names.push(SanType::URI("headgate://node/other".try_into().unwrap()));
        wished.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let request = wished.serialize_request(&own).unwrap();
        let (certificate, not_after) = signer.issue("n1", request.der(), week(now)).unwrap();
        assert!(not_after < now + DAY * 3, "the certificate outlives its authority");
        let pem = certificate.pem();
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
        let signer = Authority::parse(&certificate, &key, "", SystemTime::now()).unwrap();
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
            Authority::parse(certificate, key, "", now).map(drop).unwrap_err().to_string()
        };
        assert!(problem(&certificate, &key, SystemTime::now() + DAY * 3).contains("expired"));
        assert!(problem("", &key, SystemTime::now()).contains("--tls-node-ca is not a PEM certificate"));
        assert!(problem(&certificate, "", SystemTime::now()).contains("--enrolment-ca-key is not a PEM private key"));
        let (leaf, leaf_key) = authority(2, IsCa::ExplicitNoCa);
        assert!(problem(&leaf, &leaf_key, SystemTime::now()).contains("does not belong to an authority"));
        let others = |others: &str| Authority::parse(&certificate, &key, others, SystemTime::now()).map(drop);
        // The names are equal, the keys are not.
        let (other, _) = ca(2);
        for others_file in ["", "garbage", &other] {
            assert!(others(others_file).is_ok(), "{others_file}");
        }
        let refused = others(&(other + &certificate)).unwrap_err();
        assert!(refused.to_string().contains("--tls-client-ca contains the first certificate"), "{refused}");
    }
}
