//! The meaning of the kernel's error numbers. ipset has its own numbers above 4095
//! (`linux/netfilter/ipset/ip_set.h`, `ip_set_hash.h`, `ip_set_bitmap.h`).

use headgate_netlink::Refusal;

use crate::{Change, Element};

/// `IPSET_ERR_PRIVATE`: the first error number shared by all set types.
const PRIVATE: i32 = 4096;
/// `IPSET_ERR_TYPE_SPECIFIC`: the first error number specific to a set type.
const TYPE_SPECIFIC: i32 = 4352;

/// The kernel's answer (`IPSET_ERR_HASH_FULL`) to an entry that would exceed the maximum number of
/// entries of a hash. For a bitmap, the same number has another meaning.
pub const HASH_FULL: i32 = TYPE_SPECIFIC;

/// Texts for `enum ipset_errno`, starting at [`PRIVATE`].
const NAMES: [&str; 19] = [
    "an error of ipset",
    "the family or type of the entry differs from the family or type of the set, or the kernel uses another protocol version",
    "the kernel has no such set type: its module is missing",
    "the kernel has no room for another set",
    "the set is in use by a rule or a list, or being listed",
    "the name of the second set is in use",
    "the sets are of types that cannot be swapped",
    "the entry already exists, or does not exist",
    "the prefix length is out of range",
    "the netmask is out of range",
    "the set type does not support the family",
    "the set has no timeouts",
    "the set is in use by a rule or a list",
    "an IPv4 address is expected",
    "an IPv6 address is expected",
    "the set has no counters",
    "the set has no comments",
    "the mark's mask is out of range",
    "the set has no socket buffer marks",
];

/// Texts for the numbers from `IPSET_ERR_HASH_FULL` on.
const OF_HASHES: [&str; 6] = [
    "the set is full: it has the maximum number of entries (maxelem)",
    "the entry is null: an address or a prefix length of zero",
    "the protocol has no ports, or is unknown",
    "a protocol is missing",
    "ranges are not supported",
    "the range is out of range",
];

/// Texts for the numbers from `IPSET_ERR_BITMAP_RANGE` on.
const OF_BITMAPS: [&str; 2] = ["the entry is out of the set's range", "the range is larger than the type allows"];

fn numbered(code: i32, first: i32, names: &[&'static str]) -> Option<&'static str> {
    names.get(usize::try_from(code.checked_sub(first)?).ok()?).copied()
}

/// Describes a rejection in words. The meaning of type-specific numbers depends on whether the set
/// is a bitmap or a hash. If this is not known, the text names both meanings.
pub(crate) fn reason(refusal: &Refusal, is_bitmap: Option<bool>) -> String {
    let code = refusal.code;
    let general = match code {
        libc::ENOENT => Some("there is no such set"),
        libc::EEXIST => Some("a set with this name exists"),
        libc::EPERM => Some("not permitted: CAP_NET_ADMIN is needed"),
        _ => numbered(code, PRIVATE, &NAMES),
    };
    let (of_hash, of_bitmap) = (numbered(code, TYPE_SPECIFIC, &OF_HASHES), numbered(code, TYPE_SPECIFIC, &OF_BITMAPS));
    match (general, of_hash, of_bitmap) {
        (Some(text), ..) => text.to_owned(),
        (None, Some(hash), Some(bitmap)) => match is_bitmap {
            Some(true) => bitmap.to_owned(),
            Some(false) => hash.to_owned(),
            None => format!("{hash} (a hash), or {bitmap} (a bitmap)"),
        },
        (None, Some(hash), None) => hash.to_owned(),
        _ if code > PRIVATE => format!("ipset's error {code}"),
        _ => refusal.to_string(),
    }
}

impl Change {
    /// Describes a rejection of this change in words, with the set and the entry.
    pub fn explain(&self, refusal: &Refusal) -> String {
        let (doing, element, set) = match self {
            Self::Add(set, element) => ("adding", element, format!("to the set {set}")),
            Self::Delete(set, element) => ("deleting", element, format!("from the set {set}")),
        };
        format!("{doing} {element} {set}: {}", reason(refusal, Some(matches!(element, Element::Port(_)))))
    }
}
