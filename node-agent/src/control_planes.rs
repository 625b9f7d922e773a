//! URLs of control planes, as the operator writes them.

use std::{fmt, net::SocketAddr};

use headgate_core::addresses;
use tonic::transport::Uri;

/// One replica of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlPlane {
    uri: Uri,
    /// The URL of a Unix socket. `uri` then has no meaning.
    socket: Option<String>,
}

impl fmt::Display for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(socket) => f.write_str(socket),
            None => self.uri.fmt(f),
        }
    }
}

impl ControlPlane {
    /// Parses `https://host:port`. If `insecure` is true, also accepts `http://address:port` when
    /// [`addresses::may_lack_tls`] returns true for the address, and `unix:FILE`: the rights of the
    /// file and its folder decide who listens there.
    ///
    /// # Errors
    /// The URL cannot be used. The error says why, and what to write instead.
    pub fn parse(url: &str, insecure: bool) -> Result<Self, String> {
        let fail = |problem: String| format!("{url:?} {problem}");
        if insecure && url.starts_with("unix:") {
            return Ok(Self { uri: Uri::from_static("http://127.0.0.1:0"), socket: Some(url.to_owned()) });
        }
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
            Some("https") => Ok(Self { uri, socket: None }),
            Some("http") if !insecure => Err(fail(
                "would be plaintext; write https://, or pass --insecure-loopback for a trial on one machine".into(),
            )),
            Some("http") if allows_plaintext(host) => Ok(Self { uri, socket: None }),
            Some("http") => Err(fail(format!(
                "would be plaintext to {host}: --insecure-loopback allows only loopback addresses and the test ranges {}; write https://",
                addresses::TEST_RANGES.join(", ")
            ))),
            None => Err(fail(format!("has no scheme; write https://{uri}"))),
            Some(_) => Err(fail("has another scheme than https; write https://host:7443".into())),
        }
    }

    /// True when the scheme of the URL is https.
    pub fn uses_tls(&self) -> bool {
        self.uri.scheme_str() == Some("https")
    }

    /// The host in the form that a resolver expects, without brackets, and the port.
    pub(crate) fn host_and_port(&self) -> (&str, u16) {
        let host = self.uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        // `parse` rejects a URL without a port.
        (host, self.uri.port_u16().unwrap_or_default())
    }

    /// True when the URL's host is the IP address of `address`.
    pub(crate) fn names(&self, address: SocketAddr) -> bool {
        self.host_and_port().0.parse() == Ok(address.ip())
    }

    /// The URL of a Unix socket; `None` if the control plane has an address.
    pub(crate) fn socket(&self) -> Option<&str> {
        self.socket.as_deref()
    }

    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }
}

fn allows_plaintext(host: &str) -> bool {
    host.trim_start_matches('[').trim_end_matches(']').parse().is_ok_and(addresses::may_lack_tls)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn errors_about_unusable_urls_name_the_reason() {
        let error = |url: &str| ControlPlane::parse(url, true).unwrap_err();
        assert!(error("https://a").contains("no port"));
        assert!(error("https://a:1/x").contains("has a path"));
        assert!(error("ftp://a:1").contains("another scheme"));
        assert!(error("a:1").contains("\"a:1\" has no scheme; write https://a:1"));
        assert!(error(":::").contains("is not a URL"));
        assert!(error("http://192.0.3.1:1").contains("192.0.2.0/24"));
    }

    #[test]
    fn plaintext_is_allowed_only_for_loopback_and_test_ranges() {
        for host in ["127.0.0.1", "127.9.9.9", "[::1]", "192.0.2.1", "198.19.255.1", "[2001:db8::5]"] {
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), true).is_ok(), "{host}");
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), false).is_err(), "{host}");
        }
        for host in ["localhost", "10.0.0.1", "0.0.0.0", "[::]", "[2001:db9::1]", "example.com"] {
            assert!(ControlPlane::parse(&format!("http://{host}:7443"), true).is_err(), "{host}");
        }
        assert!(ControlPlane::parse("https://example.com:7443", false).unwrap().uses_tls());
    }
}
