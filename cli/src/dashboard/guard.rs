//! Who may ask the server of the page: only the page itself, with its token.
//!
//! Every page that the browser shows can send requests to a port of this machine. Such requests
//! carry another `Origin` or `Sec-Fetch-Site`, or, after a change of a name in DNS, another `Host`.
//! Other users of this machine can connect, too, and lack the token.

use std::io::{self, Read as _};

use hyper::header::{AUTHORIZATION, HOST, ORIGIN};
use hyper::{HeaderMap, StatusCode};

/// The number of random bytes in a token.
const TOKEN_BYTES: usize = 24;

/// What a request must have.
#[derive(Debug)]
pub(super) struct Guard {
    port: u16,
    token: String,
}

impl Guard {
    /// Draws a token for a server at this port.
    ///
    /// # Errors
    /// The system has no source of random bytes.
    pub(super) fn new(port: u16) -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self { port, token: bytes.iter().map(|byte| format!("{byte:02x}")).collect() })
    }

    /// The URL that a user opens.
    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/?token={}", self.port, self.token)
    }

    /// Checks the headers of any request. Files of the page need no token, because the browser
    /// loads them itself.
    pub(super) fn check(&self, headers: &HeaderMap, needs_token: bool) -> Result<(), (StatusCode, &'static str)> {
        let hosts = [format!("127.0.0.1:{}", self.port), format!("localhost:{}", self.port)];
        let all = |name: &str| headers.get_all(name).iter().map(|value| value.to_str().unwrap_or_default());
        let is_host =
            all(HOST.as_str()).count() == 1 && all(HOST.as_str()).all(|host| hosts.iter().any(|own| own == host));
        if !is_host {
            return Err((StatusCode::FORBIDDEN, "this server answers only at its own address"));
        }
        let is_same =
            |origin: &str| origin.strip_prefix("http://").is_some_and(|host| hosts.iter().any(|own| own == host));
        // A browser sends "none" if the user opened the address.
        if !all(ORIGIN.as_str()).all(is_same)
            || !all("sec-fetch-site").all(|site| site == "same-origin" || site == "none")
        {
            return Err((StatusCode::FORBIDDEN, "this server does not answer other pages"));
        }
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        if needs_token && !given.is_some_and(|given| is_equal(given.as_bytes(), self.token.as_bytes())) {
            return Err((StatusCode::UNAUTHORIZED, "the token is missing: open the URL that headgatectl printed"));
        }
        Ok(())
    }
}

/// Compares in a time that does not depend on where two tokens differ.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The status of a request with these headers; 200 if it may pass.
    fn status(headers: &[(&'static str, &str)], needs_token: bool) -> u16 {
        let guard = Guard { port: 7000, token: "abc".to_owned() };
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        guard.check(&map, needs_token).map_or_else(|(status, _)| status.as_u16(), |()| 200)
    }

    #[test]
    fn only_the_page_itself_with_its_token_is_answered() {
        let host = ("host", "127.0.0.1:7000");
        let token = ("authorization", "Bearer abc");
        let page = [host, token, ("origin", "http://127.0.0.1:7000"), ("sec-fetch-site", "same-origin")];
        assert_eq!(status(&page, true), 200);
        assert_eq!(status(&[("host", "localhost:7000"), token], true), 200);
        assert_eq!(status(&[host, ("sec-fetch-site", "none")], false), 200);
        for wrong in ["evil.example", "evil.example:7000", "127.0.0.1", "127.0.0.1:7001", "127.0.0.1.evil.example:7000"]
        {
            assert_eq!(status(&[("host", wrong), token], true), 403, "{wrong}");
        }
        assert_eq!(status(&[token], true), 403);
        assert_eq!(status(&[host, host, token], true), 403);
        for origin in ["http://evil.example", "null", "https://127.0.0.1:7000", "http://127.0.0.1:7001"] {
            assert_eq!(status(&[host, token, ("origin", origin)], true), 403, "{origin}");
            assert_eq!(status(&[host, ("origin", origin)], false), 403, "{origin}");
        }
        for site in ["cross-site", "same-site"] {
            assert_eq!(status(&[host, token, ("sec-fetch-site", site)], true), 403, "{site}");
        }
        assert_eq!(status(&[host], true), 401);
        for wrong in ["Bearer abd", "Bearer abcd", "Bearer ", "Basic abc", "abc"] {
            assert_eq!(status(&[host, ("authorization", wrong)], true), 401, "{wrong}");
        }
    }

    #[test]
    fn tokens_are_long_and_differ() {
        let (one, other) = (Guard::new(1).unwrap(), Guard::new(1).unwrap());
        assert_eq!(one.token.len(), 2 * TOKEN_BYTES);
        assert_ne!(one.token, other.token);
        assert!(one.url().ends_with(&one.token));
    }
}
