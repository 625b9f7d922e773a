//! Explanations of failed TLS handshakes, with the remedy.

use std::{io, time::Duration, time::UNIX_EPOCH};

use rustls::{AlertDescription, CertificateError, Error, pki_types::UnixTime};

use crate::{
    files::{Files, Side},
    validity::date,
};

const REFUSED_BY_CLIENT: &str = "refused_by_client";
const REFUSED_BY_CONTROL_PLANE: &str = "refused_by_control_plane";

/// The reason why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// A metrics label from a small fixed set.
    pub reason: &'static str,
    /// The fault and the remedy.
    pub sentence: String,
}

impl Refusal {
    /// Whether the other side rejects the certificate of this side.
    pub fn is_by_peer(&self) -> bool {
        [REFUSED_BY_CLIENT, REFUSED_BY_CONTROL_PLANE].contains(&self.reason)
    }
}

/// Explains an error of a TLS connection to the side that uses `files`. `None` for other errors.
pub fn explain(error: &io::Error, files: &Files) -> Option<Refusal> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    let (reason, sentence) = match error {
        Error::InvalidCertificate(error) => certificate(error, files),
        Error::NoCertificatesPresented => {
            let text =
                "the client presents no certificate; give the client a certificate with its --tls-cert and --tls-key";
            ("no_certificate", text.to_owned())
        }
        Error::AlertReceived(alert) => alerted(*alert, files),
        Error::InvalidMessage(_) => {
            let text = match files.side {
                Side::Server => "the client does not speak TLS; use https:// in its URL",
                Side::Client => {
                    "the control plane does not speak TLS, although its URL begins with https://; give the control plane its --tls-cert, --tls-key and \
                     --tls-client-ca, or check the port"
                }
            };
            ("not_tls", format!("{text} ({error})"))
        }
        _ => ("other", format!("TLS: {error}")),
    };
    Some(Refusal { reason, sentence })
}

fn certificate(error: &CertificateError, files: &Files) -> (&'static str, String) {
    let (whose, usage) = match files.side {
        Side::Server => ("the client's certificate", "clientAuth"),
        Side::Client => ("the control plane's certificate", "serverAuth"),
    };
    let (option, ca) = (files.side.ca_option(), files.ca.display());
    let nodes = if files.side == Side::Server { " (a node's: of --tls-node-ca)" } else { "" };
    let renew = "renew it, or check this machine's clock";
    match error {
        CertificateError::Expired => ("certificate_expired", format!("{whose} has expired; {renew}")),
        CertificateError::ExpiredContext { not_after, .. } => {
            ("certificate_expired", format!("{whose} expired at {}; {renew}", moment(*not_after)))
        }
        CertificateError::NotValidYet => {
            ("certificate_not_yet_valid", format!("{whose} is not valid yet; check the clocks of both machines"))
        }
        CertificateError::NotValidYetContext { not_before, .. } => (
            "certificate_not_yet_valid",
            format!("{whose} is not valid before {}; check the clocks of both machines", moment(*not_before)),
        ),
        // If an authority has the same name but another key, the signature does not verify.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => (
            "unknown_authority",
            format!(
                "{whose} is not signed by an authority of {option} {ca}{nodes}; have one of these authorities sign it, or add its authority to the file"
            ),
        ),
        CertificateError::Revoked => (
            "certificate_denied",
            format!(
                "{whose} or its holder is in the file of --tls-denied; remove the entry, or give its holder a new certificate"
            ),
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => (
            "wrong_usage",
            format!("{whose} lacks the extended key usage {usage}; issue a new certificate with that usage"),
        ),
        CertificateError::ApplicationVerificationFailure => (
            "wrong_name",
            format!("{whose} names no replica; issue a new certificate with the URI headgate://replica/NAME"),
        ),
        _ => ("bad_certificate", format!("{whose} cannot be used ({error}); issue a new certificate")),
    }
}

fn moment(time: UnixTime) -> String {
    date(UNIX_EPOCH + Duration::from_secs(time.as_secs()))
}

fn alerted(alert: AlertDescription, files: &Files) -> (&'static str, String) {
    let cert = files.cert.display();
    if files.side == Side::Server {
        let text = format!(
            "the client rejects the certificate of --tls-cert {cert} ({alert:?}); give the client the authority of this certificate (--tls-ca); an agent also needs the \
             URI headgate://replica/NAME in it, and another client an address that it names"
        );
        return (REFUSED_BY_CLIENT, text);
    }
    let own = format!("the control plane rejects the certificate of --tls-cert {cert}");
    let text = match alert {
        AlertDescription::CertificateExpired => {
            format!("{own}: it has expired, or is not valid yet; renew it, and check the clocks of both machines")
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => format!(
            "{own}: no authority that the control plane knows signed it; have an authority of its --tls-node-ca (for a reader: --tls-client-ca) sign the certificate, or add the certificate's authority to that file"
        ),
        AlertDescription::CertificateRevoked => {
            format!("{own}: it or its holder is in the file of --tls-denied; ask the operator of the control plane")
        }
        AlertDescription::UnsupportedCertificate => {
            format!("{own}: it is not for clients; issue a new certificate with the extended key usage clientAuth")
        }
        AlertDescription::CertificateRequired => {
            "the control plane requires a client certificate; pass --tls-cert and --tls-key".to_owned()
        }
        other => format!(
            "{own} ({other:?}); the control plane's log shows the reason, and docs/tls.md the requirements for certificates"
        ),
    };
    (REFUSED_BY_CONTROL_PLANE, text)
}
