//! Which externalIPs Services may have: the value of `--external-ips`.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;

use super::parse;

/// `all`, `none`, or ranges of addresses, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExternalIps {
    /// The ranges; `None` for all addresses.
    ranges: Option<Vec<IpNet>>,
}

impl ExternalIps {
    /// Checks an address.
    ///
    /// # Errors
    /// The address is not allowed. A sentence that ends in the remedy.
    pub(super) fn check(&self, address: IpAddr) -> Result<(), String> {
        let is_allowed = |ranges: &Vec<IpNet>| ranges.iter().any(|range| range.contains(&address));
        if self.ranges.as_ref().is_none_or(is_allowed) {
            return Ok(());
        }
        Err(format!(
            "{address} is not allowed (--external-ips {self}): use the address of a load balancer, or ask the operator of the control \
             plane to allow it"
        ))
    }
}

impl fmt::Display for ExternalIps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.ranges {
            None => f.write_str("all"),
            Some(ranges) if ranges.is_empty() => f.write_str("none"),
            Some(ranges) => f.write_str(&ranges.iter().map(IpNet::to_string).collect::<Vec<_>>().join(",")),
        }
    }
}

impl FromStr for ExternalIps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ranges = match text {
            "all" => return Ok(Self { ranges: None }),
            "none" => Vec::new(),
            ranges => ranges.split(',').map(parse::range).collect::<Result<_, _>>()?,
        };
        Ok(Self { ranges: Some(ranges) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_addresses_in_the_ranges_are_allowed() {
        for (text, allowed, refused) in [
            ("all", vec!["192.0.2.1", "2001:db8::1"], vec![]),
            ("none", vec![], vec!["192.0.2.1", "2001:db8::1"]),
            ("192.0.2.0/24,2001:db8::/64", vec!["192.0.2.1", "2001:db8::1"], vec!["192.0.3.1", "2001:db8:0:1::1"]),
        ] {
            let option: ExternalIps = text.parse().unwrap();
            assert_eq!(option.to_string(), text);
            assert!(allowed.iter().all(|address| option.check(address.parse().unwrap()).is_ok()), "{text}");
            for address in refused {
                let error = option.check(address.parse().unwrap()).unwrap_err();
                assert!(
                    error.starts_with(&format!("{address} is not allowed (--external-ips {text}): use ")),
                    "{error}"
                );
            }
        }
        for text in ["", "some", "192.0.2.1", "all,none", "192.0.2.0/33"] {
            assert!(text.parse::<ExternalIps>().is_err(), "{text}");
        }
    }
}
