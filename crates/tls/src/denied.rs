//! Holders and certificates that a server does not accept, although an authority has signed them.

use std::collections::BTreeSet;

use headgate_core::check_subdomain;
use sha2::{Digest as _, Sha256};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The entries of a file of denied holders and certificates (`--tls-denied`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Denied(BTreeSet<String>);

impl Denied {
    /// Reads the entries, one a line: the URI of a holder (`headgate://node/NAME`), or a serial
    /// number or SHA-256 fingerprint as `openssl x509` prints them. `#` begins a comment.
    /// Errors: the problem of the first line that is none of these.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).enumerate();
        let entries = lines.filter(|(_, line)| !line.is_empty()).map(|(index, line)| {
            let entry = match line.split_once('=') {
                Some((kind, digits)) => number(kind, &digits.replace(':', "")),
                None => is_holder(line).then(|| line.to_owned()),
            };
            entry.ok_or_else(|| format!("line {} is none of them: {line:?}", index + 1))
        });
        entries.collect::<Result<_, _>>().map(Self)
    }

    /// Returns the entries that would deny a certificate (DER) of `holders`, the URIs of roles.
    pub fn entries_of(certificate: &[u8], holders: impl IntoIterator<Item = String>) -> Vec<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02X}")).collect::<String>();
        let parsed = X509Certificate::from_der(certificate).ok();
        let serial = parsed.and_then(|(_, parsed)| number("serial", &hex(parsed.raw_serial())));
        let fingerprint = number("sha256 fingerprint", &hex(&Sha256::digest(certificate)));
        holders.into_iter().chain(serial).chain(fingerprint).collect()
    }

    /// Returns true if the file contains one of these entries.
    pub fn contains(&self, entries: &[String]) -> bool {
        entries.iter().any(|entry| self.0.contains(entry))
    }
}

/// Returns true for a URI that certificates of nodes, readers or replicas may have.
fn is_holder(line: &str) -> bool {
    let role = line.strip_prefix("headgate://").and_then(|rest| rest.split_once('/'));
    role.is_some_and(|(role, name)| matches!(role, "node" | "reader" | "replica") && check_subdomain(name).is_ok())
}

/// Returns the entry of a number. DER begins a serial number with a zero byte if its highest bit is
/// set, and openssl does not print it.
fn number(kind: &str, digits: &str) -> Option<String> {
    let (kind, digits) = (kind.to_ascii_lowercase(), digits.to_ascii_uppercase());
    let is_known = kind == "serial" || kind == "sha256 fingerprint" && digits.len() == 64;
    let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_known && is_hex).then(|| format!("{kind}={}", digits.trim_start_matches('0')))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rcgen::{CertificateParams, KeyPair, SerialNumber};

    use super::*;

    #[test]
    fn holders_serial_numbers_and_fingerprints_are_denied() {
        let mut params = CertificateParams::default();
        params.serial_number = Some(SerialNumber::from_slice(&[0, 0xab, 1]));
        let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
        let own = Denied::entries_of(&der, Some("headgate://node/n1".to_owned()));
        let digest: Vec<_> = Sha256::digest(&der).iter().map(|byte| format!("{byte:02x}")).collect();
        let fingerprint = format!("SHA256 Fingerprint={}", digest.join(":"));
        for line in ["headgate://node/n1", "serial=AB01", "serial=00ab01 # stolen", &fingerprint] {
            assert!(Denied::parse(&format!("# none\n\n {line}\n")).unwrap().contains(&own), "{line}");
        }
        for line in ["headgate://node/n2", "headgate://reader/n1", "serial=AB0100", ""] {
            assert!(!Denied::parse(line).unwrap().contains(&own), "{line}");
        }
    }

    #[test]
    fn a_line_that_denies_nothing_is_an_error() {
        let holders =
            ["nodes/n1", "node/N1", "node/n1/", "node/", "n1", "Node/n1"].map(|of| format!("headgate://{of}"));
        let numbers = ["n1", "serial=", "serial=xyz", "sha256 Fingerprint=AB", "sha1 Fingerprint=AB"];
        for line in numbers.into_iter().chain(holders.iter().map(String::as_str)) {
            let problem = Denied::parse(&format!("headgate://node/n1\n{line}")).unwrap_err();
            assert!(problem.starts_with("line 2 is none of them"), "{problem}");
        }
    }
}
