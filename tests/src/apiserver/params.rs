//! The options of lists and watches. The stand-in accepts the options that Headgate's watch loop
//! and kube's watcher send, and refuses all others.

use serde_json::Value;

use super::{
    Options,
    kinds::Kind,
    status::{Failure, bad_request, invalid_options},
};

/// The query of a list or a watch. Missing options are `None`, false or empty.
#[derive(Debug, Clone, Default)]
pub(super) struct Params {
    pub(super) watch: bool,
    pub(super) limit: Option<usize>,
    pub(super) token: Option<ContinueToken>,
    pub(super) version: Option<u64>,
    pub(super) selector: Selector,
    pub(super) bookmarks: bool,
    pub(super) timeout_seconds: Option<u64>,
    pub(super) send_initial_events: bool,
    is_not_older_than: bool,
}

impl Params {
    /// Decodes a query.
    ///
    /// # Errors
    /// The query is invalid, or `options` do not allow it. The failure has code 400 or 422, like
    /// the failure that a real server returns.
    pub(super) fn parse(kind: Kind, query: &str, options: &Options) -> Result<Self, Failure> {
        let mut params = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode(value).ok_or_else(|| bad_request(&format!("malformed encoding: {pair}")))?;
            params.set(name, &value)?;
        }
        if params.send_initial_events && !options.streaming_lists {
            let message = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
            return Err(invalid_options("sendInitialEvents", message));
        }
        if params.send_initial_events != params.is_not_older_than {
            let message = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            return Err(invalid_options("resourceVersionMatch", message));
        }
        let has_field_selectors = kind == Kind::Service && options.service_field_selectors;
        if params.selector.cluster_ip_is_not.is_some() && !has_field_selectors {
            return Err(bad_request("field label not supported: spec.clusterIP"));
        }
        Ok(params)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let unknown = || bad_request(&format!("the stand-in API server does not support {name}={value}"));
        let number = || value.parse::<u64>().map_err(|_| unknown());
        match (name, value) {
            ("watch", "true") => self.watch = true,
            ("limit", _) => self.limit = Some(usize::try_from(number()?).map_err(|_| unknown())?),
            ("continue", _) => self.token = Some(ContinueToken::decode(value).ok_or_else(unknown)?),
            ("resourceVersion", "" | "0") => {}
            ("resourceVersion", _) => self.version = Some(number()?),
            ("resourceVersionMatch", "NotOlderThan") => self.is_not_older_than = true,
            ("labelSelector", _) => {
                self.selector.without_label = Some(value.strip_prefix('!').ok_or_else(unknown)?.to_owned());
            }
            ("fieldSelector", _) => {
                self.selector.cluster_ip_is_not =
                    Some(value.strip_prefix("spec.clusterIP!=").ok_or_else(unknown)?.to_owned());
            }
            ("allowWatchBookmarks", "true") => self.bookmarks = true,
            ("timeoutSeconds", _) => self.timeout_seconds = Some(number()?),
            ("sendInitialEvents", "true") => self.send_initial_events = true,
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

/// A selector with the two conditions that Headgate's watch loop sends. The first condition selects
/// objects without a given label. The second condition selects Services whose `clusterIP` differs
/// from a given value. The default selects everything.
#[derive(Debug, Clone, Default)]
pub(super) struct Selector {
    without_label: Option<String>,
    cluster_ip_is_not: Option<String>,
}

impl Selector {
    /// Whether the selector matches an object.
    pub(super) fn matches(&self, object: &Value) -> bool {
        let has = |label: &String| object["metadata"]["labels"].get(label).is_some();
        let is = |address: &String| object["spec"]["clusterIP"].as_str().unwrap_or_default() == address;
        !self.without_label.as_ref().is_some_and(has) && !self.cluster_ip_is_not.as_ref().is_some_and(is)
    }
}

/// A continue token: the version of all pages of a list, and the last key of the previous page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContinueToken {
    pub(super) version: u64,
    /// The serial number of the token. Tests can expire all tokens below a serial number.
    pub(super) serial: u64,
    pub(super) after: String,
}

impl ContinueToken {
    pub(super) fn encode(&self) -> String {
        format!("{} {} {}", self.version, self.serial, self.after)
    }

    fn decode(token: &str) -> Option<Self> {
        let mut parts = token.splitn(3, ' ');
        let mut number = || parts.next()?.parse().ok();
        Some(Self { version: number()?, serial: number()?, after: parts.next()?.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn refused(query: &str, options: &Options) -> Option<u16> {
        Params::parse(Kind::Service, query, options).err().map(|failure| failure.code)
    }

    #[test]
    fn queries_of_clients_are_decoded() {
        let query = "&watch=true&timeoutSeconds=290&labelSelector=%21a%2Fb&fieldSelector=spec.clusterIP%21%3DNone\
                     &allowWatchBookmarks=true&resourceVersion=7&limit=2&continue=12+3+shop%2Fweb";
        let params = Params::parse(Kind::Service, query, &Options::default()).unwrap();
        assert!(params.watch && params.bookmarks && !params.send_initial_events);
        assert_eq!(params.selector.without_label.as_deref(), Some("a/b"));
        assert_eq!(params.selector.cluster_ip_is_not.as_deref(), Some("None"));
        assert_eq!((params.timeout_seconds, params.version, params.limit), (Some(290), Some(7), Some(2)));
        assert_eq!(params.token.unwrap().encode(), "12 3 shop/web");
    }

    #[test]
    fn unsupported_options_are_refused() {
        for query in ["resourceVersion=x", "limit=x", "labelSelector=%zz", "labelSelector=a", "pretty=true"] {
            assert_eq!(refused(query, &Options::default()), Some(400), "{query}");
        }
        let streaming = "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        assert_eq!(refused(streaming, &Options::default()), None);
        assert_eq!(refused("watch=true&sendInitialEvents=true", &Options::default()), Some(422));
        assert_eq!(refused(streaming, &Options::before_1_31()), Some(422));
        assert_eq!(refused("fieldSelector=spec.clusterIP!=None", &Options::before_1_31()), Some(400));
    }
}
