//! Addresses of control planes, and connections to them.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use headgate_core::plaintext;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri};

/// Time to connect, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that is gone without a word is found after both together.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A URL that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{url:?} {problem}")]
pub struct AddressError {
    url: String,
    problem: String,
}

/// One replica of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlPlane {
    uri: Uri,
}

impl fmt::Display for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uri.fmt(f)
    }
}

impl ControlPlane {
    /// Reads `https://host:port`, or `http://address:port` where `insecure` allows it.
    ///
    /// # Errors
    /// Says what is wrong with the URL and what to write instead.
    pub fn parse(url: &str, insecure: bool) -> Result<Self, AddressError> {
        let fail = |problem: String| AddressError { url: url.to_owned(), problem };
        let uri: Uri =
            url.trim().parse().map_err(|error| fail(format!("is not a URL ({error}); write https://host:7443")))?;
        let host = uri.host().ok_or_else(|| fail("has no host; write https://host:7443".into()))?;
        if uri.port_u16().is_none() {
            return Err(fail("has no port; write https://host:7443".into()));
        }
        if uri.path_and_query().is_some_and(|path| path.as_str() != "/") {
            return Err(fail("has a path; write https://host:7443".into()));
        }
        match uri.scheme_str() {
            Some("https") => Ok(Self { uri }),
            Some("http") if !insecure => Err(fail(
                "would be plaintext; write https://, or pass --insecure-loopback for a trial on one machine".into(),
            )),
            Some("http") if allows_plaintext(host) => Ok(Self { uri }),
            Some("http") => Err(fail(format!(
                "would be plaintext to {host}: --insecure-loopback allows loopback addresses and the test ranges {} alone; write https://",
                plaintext::TEST_RANGES.join(", ")
            ))),
            _ => Err(fail("has another scheme than https; write https://host:7443".into())),
        }
    }

    /// True for https.
    #[must_use]
    pub fn uses_tls(&self) -> bool {
        self.uri.scheme_str() == Some("https")
    }

    /// Connects. TLS files are read at each call, so that renewed certificates are used without a restart.
    ///
    /// # Errors
    /// Nobody answers, the peer is not who it should be, or the TLS files cannot be used. Trying again later may help.
    pub async fn connect(&self, tls: Option<&TlsFiles>) -> Result<Channel, ConnectError> {
        let mut endpoint = Endpoint::from(self.uri.clone())
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .tcp_keepalive(Some(KEEPALIVE_INTERVAL))
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        if self.uses_tls() {
            let files = tls.ok_or(ConnectError::NoTlsFiles)?;
            endpoint = endpoint.tls_config(files.read().await?).map_err(ConnectError::Tls)?;
        }
        // The time-out above is for the TCP connection; this one covers the TLS handshake too.
        match tokio::time::timeout(2 * CONNECT_TIMEOUT, endpoint.connect()).await {
            Ok(connected) => connected.map_err(ConnectError::Connect),
            Err(_) => Err(ConnectError::TimedOut),
        }
    }
}

fn allows_plaintext(host: &str) -> bool {
    host.trim_start_matches('[').trim_end_matches(']').parse().is_ok_and(plaintext::is_allowed)
}

/// PEM files of the agent's side of mTLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The agent's certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities of control planes.
    pub ca: PathBuf,
}

impl TlsFiles {
    async fn read(&self) -> Result<ClientTlsConfig, ConnectError> {
        let (cert, key, ca) = tokio::try_join!(read(&self.cert), read(&self.key), read(&self.ca))?;
        Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).identity(Identity::from_pem(cert, key)))
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, ConnectError> {
    tokio::fs::read(path).await.map_err(|error| ConnectError::TlsFile { path: path.to_owned(), error })
}

/// A connection that did not come about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A file of the TLS options.
    #[error("cannot read {}: {error}", .path.display())]
    TlsFile {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// An https URL without files; the options refuse it earlier.
    #[error("no TLS files for an https URL; pass --tls-cert, --tls-key and --tls-ca")]
    NoTlsFiles,
    /// The contents of the TLS files.
    #[error("the files of --tls-cert, --tls-key and --tls-ca cannot be used: {}", chain(.0))]
    Tls(tonic::transport::Error),
    /// TCP or the TLS handshake.
    #[error("cannot connect: {}", chain(.0))]
    Connect(tonic::transport::Error),
    /// TCP or the TLS handshake takes too long.
    #[error("cannot connect: no answer in {} s", 2 * CONNECT_TIMEOUT.as_secs())]
    TimedOut,
}

/// An error with what caused it, since tonic's errors name their cause nowhere else. What a cause repeats is said once.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn urls_that_cannot_be_used_say_why() {
        let error = |url: &str| ControlPlane::parse(url, true).unwrap_err().to_string();
        assert!(error("https://a").contains("no port"));
        assert!(error("https://a:1/x").contains("has a path"));
        assert!(error("ftp://a:1").contains("another scheme"));
        assert!(error("a:1").contains("another scheme"));
        assert!(error(":::").contains("is not a URL"));
        assert!(error("http://192.0.3.1:1").contains("192.0.2.0/24"));
    }

    #[test]
    fn plaintext_is_for_loopback_and_test_ranges() {
        for host in ["127.0.0.1", "127.9.9.9", "[::1]", "192.0.2.1", "198.19.255.1", "[2001:db8::5]"] {
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), true).is_ok(), "{host}");
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), false).is_err(), "{host}");
        }
        for host in ["localhost", "10.0.0.1", "0.0.0.0", "[::]", "[2001:db9::1]", "example.com"] {
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), true).is_err(), "{host}");
        }
        assert!(ControlPlane::parse("https://example.com:7443", false).unwrap().uses_tls());
    }

    #[test]
    fn causes_are_named_once() {
        let cause = ConnectError::TlsFile { path: "/k".into(), error: std::io::Error::other("cause") };
        let error = std::io::Error::other(cause);
        assert_eq!(chain(&error), "cannot read /k: cause");
    }

    #[tokio::test]
    async fn a_missing_tls_file_is_named() {
        let files = TlsFiles { cert: "/nowhere/c".into(), key: "/nowhere/k".into(), ca: "/nowhere/a".into() };
        let target = ControlPlane::parse("https://127.0.0.1:1", false).unwrap();
        let error = target.connect(Some(&files)).await.unwrap_err().to_string();
        assert!(error.contains("cannot read /nowhere/"), "{error}");
    }
}
