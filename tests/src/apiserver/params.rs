//! List and watch options: decoding of the query string, and the combinations that the real server refuses.

use super::status::{Failure, bad_request, invalid_options};

/// How `resourceVersion` binds a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    NotOlderThan,
    Exact,
}

/// The query of a list or a watch. What was not given is `None`, false or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Params {
    pub(super) watch: bool,
    pub(super) limit: Option<usize>,
    pub(super) continue_token: Option<String>,
    pub(super) resource_version: Option<u64>,
    pub(super) version_match: Option<Match>,
    pub(super) label_selector: String,
    pub(super) field_selector: String,
    pub(super) bookmarks: bool,
    pub(super) timeout_seconds: Option<u64>,
    pub(super) send_initial_events: Option<bool>,
}

impl Params {
    /// Decodes a query string; unknown parameters are ignored, as the real server does.
    /// Fails with 400 or 422 where a value has no meaning.
    pub(super) fn parse(query: &str) -> Result<Self, Failure> {
        let mut params = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            params.set(&percent_decode(name)?, percent_decode(value)?)?;
        }
        Ok(params)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "watch" => self.watch = flag(&value),
            "limit" => {
                let limit = Some(number(name, &value)?).filter(|limit| *limit > 0);
                self.limit = limit.and_then(|limit| usize::try_from(limit).ok());
            }
            "continue" => self.continue_token = Some(value).filter(|token| !token.is_empty()),
            "resourceVersion" if value.is_empty() => {}
            "resourceVersion" => {
                let version = value.parse().map_err(|_| {
                    let message =
                        format!("Invalid value: \"{value}\": strconv.ParseUint: parsing \"{value}\": invalid syntax");
                    invalid_options("resourceVersion", "FieldValueInvalid", &message)
                })?;
                self.resource_version = Some(version);
            }
            "resourceVersionMatch" => {
                self.version_match = match value.as_str() {
                    "" => None,
                    "NotOlderThan" => Some(Match::NotOlderThan),
                    "Exact" => Some(Match::Exact),
                    _ => {
                        let message =
                            format!("Unsupported value: \"{value}\": supported values: \"Exact\", \"NotOlderThan\"");
                        return Err(invalid_options("resourceVersionMatch", "FieldValueNotSupported", &message));
                    }
                }
            }
            "labelSelector" => self.label_selector = value,
            "fieldSelector" => self.field_selector = value,
            "allowWatchBookmarks" => self.bookmarks = flag(&value),
            "timeoutSeconds" => self.timeout_seconds = Some(number(name, &value)?).filter(|seconds| *seconds > 0),
            "sendInitialEvents" => self.send_initial_events = Some(flag(&value)),
            _ => {}
        }
        Ok(())
    }

    /// Refuses, with 422, what the real server's `ValidateListOptions` refuses. `streaming_lists` is whether the
    /// server offers them.
    pub(super) fn validate(&self, streaming_lists: bool) -> Result<(), Failure> {
        let forbid = |field: &str, message: &str| {
            Err(invalid_options(field, "FieldValueForbidden", &format!("Forbidden: {message}")))
        };
        if self.watch {
            return self.validate_watch(streaming_lists, forbid);
        }
        if self.send_initial_events.is_some() {
            return forbid("sendInitialEvents", "sendInitialEvents is forbidden for list");
        }
        let Some(version_match) = self.version_match else { return Ok(()) };
        if self.continue_token.is_some() {
            return forbid("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided");
        }
        match self.resource_version {
            None => {
                forbid("resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided")
            }
            Some(0) if version_match == Match::Exact => {
                forbid("resourceVersionMatch", "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"")
            }
            Some(_) => Ok(()),
        }
    }

    fn validate_watch(
        &self,
        streaming_lists: bool,
        forbid: impl Fn(&str, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        match (self.send_initial_events, self.version_match) {
            (None, None) => Ok(()),
            (None, Some(_)) => forbid(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            ),
            (Some(_), _) if !streaming_lists => forbid(
                "sendInitialEvents",
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
            ),
            (Some(_), Some(Match::NotOlderThan)) => Ok(()),
            (Some(_), _) => forbid(
                "resourceVersionMatch",
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            ),
        }
    }
}

/// As the real server reads booleans in queries: present and empty is true, `false` and `0` are false.
fn flag(value: &str) -> bool {
    !matches!(value.to_ascii_lowercase().as_str(), "false" | "0")
}

fn number(name: &str, value: &str) -> Result<u64, Failure> {
    if value.is_empty() {
        return Ok(0);
    }
    value.parse().map_err(|_| bad_request(&format!("{name}: \"{value}\" is not a number: use a non-negative integer")))
}

fn percent_decode(text: &str) -> Result<String, Failure> {
    let malformed = || bad_request(&format!("the query holds a malformed percent-encoding: \"{text}\""));
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
                let (high, low) = (digit().ok_or_else(malformed)?, digit().ok_or_else(malformed)?);
                u8::try_from(high * 16 + low).map_err(|_| malformed())?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).map_err(|_| malformed())
}

/// A place in a list: the version that the pages are of, and the last key of the page before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContinueToken {
    /// `None`: go on with the newest state, as the token that comes with a 410 says.
    pub(super) version: Option<u64>,
    /// Number of the token, so that tests can expire those issued so far.
    pub(super) serial: u64,
    pub(super) after: String,
}

impl ContinueToken {
    /// Opaque text, safe in a query.
    pub(super) fn encode(&self) -> String {
        let version = self.version.map_or_else(|| "-1".to_owned(), |version| version.to_string());
        let plain = format!("{version} {} {}", self.serial, self.after);
        plain.bytes().map(|byte| format!("{byte:02x}")).collect()
    }

    /// 400 for anything that `encode` did not make.
    pub(super) fn decode(token: &str) -> Result<Self, Failure> {
        Self::try_decode(token).ok_or_else(|| bad_request("continue key is not valid: start the list again without it"))
    }

    fn try_decode(token: &str) -> Option<Self> {
        let digits: Vec<u32> = token.chars().map(|letter| letter.to_digit(16)).collect::<Option<_>>()?;
        let bytes = digits.chunks(2).map(|pair| match pair {
            [high, low] => u8::try_from(high * 16 + low).ok(),
            _ => None,
        });
        let plain = String::from_utf8(bytes.collect::<Option<_>>()?).ok()?;
        let mut parts = plain.splitn(3, ' ');
        let version = match parts.next()? {
            "-1" => None,
            number => Some(number.parse().ok()?),
        };
        Some(Self { version, serial: parts.next()?.parse().ok()?, after: parts.next()?.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn refused(query: &str) -> Option<u16> {
        Params::parse(query).and_then(|params| params.validate(true)).err().map(|failure| failure.code)
    }

    #[test]
    fn queries_as_clients_send_them() {
        let query = "&watch=true&timeoutSeconds=290&labelSelector=app+in+%28a%2Cb%29&allowWatchBookmarks=true&resourceVersion=7";
        let params = Params::parse(query).unwrap();
        assert!(params.watch && params.bookmarks);
        assert_eq!(params.label_selector, "app in (a,b)");
        assert_eq!((params.timeout_seconds, params.resource_version), (Some(290), Some(7)));
        assert_eq!(refused(query), None);
    }

    #[test]
    fn combinations_that_exclude_one_another() {
        let invalid = [
            "resourceVersion=x",
            "resourceVersionMatch=Exact",
            "resourceVersion=0&resourceVersionMatch=Exact",
            "resourceVersion=5&resourceVersionMatch=Newest",
            "watch=1&resourceVersion=5&resourceVersionMatch=NotOlderThan",
            "watch=1&sendInitialEvents=true",
            "watch=1&sendInitialEvents=true&resourceVersionMatch=Exact",
            "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=1",
            "continue=ab&resourceVersion=5&resourceVersionMatch=Exact",
        ];
        for query in invalid {
            assert_eq!(refused(query), Some(422), "{query}");
        }
        for query in ["limit=x", "labelSelector=%zz", "labelSelector=%f"] {
            assert_eq!(refused(query), Some(400), "{query}");
        }
        let streaming = Params::parse("watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan").unwrap();
        assert!(streaming.validate(true).is_ok());
        assert_eq!(streaming.validate(false).unwrap_err().code, 422);
    }

    #[test]
    fn continue_tokens_come_back() {
        for version in [None, Some(12)] {
            let token = ContinueToken { version, serial: 3, after: "shop/web a".to_owned() };
            assert_eq!(ContinueToken::decode(&token.encode()).unwrap(), token);
        }
        for bad in ["x", "abc", "00", "ff"] {
            assert_eq!(ContinueToken::decode(bad).unwrap_err().code, 400, "{bad}");
        }
    }
}
