//! What the kernel's error numbers mean: ipset has its own above 4095 (`linux/netfilter/ipset/ip_set.h`, `ip_set_hash.h`, `ip_set_bitmap.h`).

use headgate_netlink::Refusal;

use crate::{Change, SetType};

/// `IPSET_ERR_PRIVATE`: those of all types follow.
const PRIVATE: i32 = 4096;
/// `IPSET_ERR_TYPE_SPECIFIC`: those of a type follow.
const TYPE_SPECIFIC: i32 = 4352;

/// Names of `enum ipset_errno`, from [`PRIVATE`] on.
const NAMES: [&str; 19] = [
    "an error of ipset",
    "the entry is not of the set's family or type, or the kernel speaks another version of the protocol",
    "the kernel has no such set type: its module is missing",
    "there are as many sets as the kernel has room for",
    "the set is in use by a rule or a list, or being listed",
    "the second set's name is taken",
    "the sets are of types that cannot be swapped",
    "the entry is there already, or is not there",
    "the prefix length is out of range",
    "the netmask is out of range",
    "the family does not fit the set type",
    "the set has no timeouts",
    "the set is in use by a rule or a list",
    "an IPv4 address is expected",
    "an IPv6 address is expected",
    "the set has no counters",
    "the set has no comments",
    "the mark's mask is out of range",
    "the set has no socket buffer marks",
];

/// `IPSET_ERR_HASH_FULL` and what follows.
const OF_HASHES: [&str; 6] = [
    "the set is full: it holds as many entries as it may (maxelem)",
    "the entry is null: an address or a prefix length of zero",
    "the protocol has no ports, or is not known",
    "a protocol is missing",
    "ranges are not supported",
    "the range is out of range",
];

/// `IPSET_ERR_BITMAP_RANGE` and what follows.
const OF_BITMAPS: [&str; 2] = ["the entry is out of the set's range", "the range is larger than the type allows"];

fn numbered(code: i32, first: i32, names: &[&'static str]) -> Option<&'static str> {
    names.get(usize::try_from(code.checked_sub(first)?).ok()?).copied()
}

/// A refusal in words. The type of the set decides what its own numbers mean; without it, both are said.
pub(crate) fn reason(refusal: &Refusal, set_type: Option<SetType>) -> String {
    let code = refusal.code;
    let general = match code {
        libc::ENOENT => Some("there is no such set"),
        libc::EEXIST => Some("a set of that name exists"),
        libc::EPERM => Some("not permitted: CAP_NET_ADMIN is needed"),
        _ => None,
    };
    let known = general.or_else(|| numbered(code, PRIVATE, &NAMES)).or_else(|| match set_type? {
        SetType::BitmapPort => numbered(code, TYPE_SPECIFIC, &OF_BITMAPS),
        _ => numbered(code, TYPE_SPECIFIC, &OF_HASHES),
    });
    if let Some(name) = known {
        return name.to_owned();
    }
    let both = numbered(code, TYPE_SPECIFIC, &OF_HASHES).zip(numbered(code, TYPE_SPECIFIC, &OF_BITMAPS));
    match both.or_else(|| numbered(code, TYPE_SPECIFIC, &OF_HASHES).map(|hash| (hash, ""))) {
        Some((hash, "")) => hash.to_owned(),
        Some((hash, bitmap)) => format!("{hash} (a hash), or {bitmap} (a bitmap)"),
        None if code > PRIVATE => format!("ipset's error {code}"),
        None => refusal.to_string(),
    }
}

impl Change {
    /// What a refusal of this change means, with the set and the entry that it is about.
    #[must_use]
    pub fn explain(&self, refusal: &Refusal) -> String {
        match self {
            Self::Add(set, entry) => {
                let reason = reason(refusal, Some(type_of(&entry.element)));
                format!("adding {} to the set {set}: {reason}", entry.element)
            }
            Self::Delete(set, element) => {
                format!("deleting {element} from the set {set}: {}", reason(refusal, Some(type_of(element))))
            }
        }
    }
}

fn type_of(element: &crate::Element) -> SetType {
    use crate::Element;
    match element {
        Element::Ip(_) => SetType::HashIp,
        Element::Net(..) => SetType::HashNet,
        Element::IpPort(..) => SetType::HashIpPort,
        Element::IpPortIp(..) => SetType::HashIpPortIp,
        Element::IpPortNet(..) => SetType::HashIpPortNet,
        Element::Port(_) => SetType::BitmapPort,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_names() {
        let said = |code: i32, set_type| reason(&Refusal::of_code(code), set_type);
        assert_eq!(said(4100, None), "the set is in use by a rule or a list, or being listed");
        assert_eq!(said(4114, None), "the set has no socket buffer marks");
        assert!(said(4352, Some(SetType::HashIp)).starts_with("the set is full"));
        assert_eq!(said(4352, Some(SetType::BitmapPort)), "the entry is out of the set's range");
        assert!(said(4352, None).contains("(a hash), or"));
        assert_eq!(said(4357, None), "the range is out of range");
        assert_eq!(said(9999, None), "ipset's error 9999");
        assert_eq!(said(libc::EBUSY, None), "Device or resource busy (os error 16)");
    }
}
