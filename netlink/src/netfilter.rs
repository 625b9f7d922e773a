//! Netfilter's subsystems (`linux/netfilter/nfnetlink.h`): requests begin with `struct nfgenmsg`.

use super::{Malformed, Request};

/// Bytes of `struct nfgenmsg`.
const HEADER_BYTES: usize = 4;

/// A request of a subsystem, such as [`libc::NFNL_SUBSYS_IPSET`], with flags besides `NLM_F_REQUEST`. The family is `NFPROTO_IPV4` or its like.
#[must_use]
pub fn request(subsystem: libc::c_int, command: u8, flags: u16, family: u8) -> Request {
    let kind = u16::try_from(subsystem).unwrap_or_default() << 8 | u16::from(command);
    Request::new(kind, flags, &[family, 0, 0, 0])
}

/// The attributes of a message.
///
/// # Errors
/// It is cut short.
pub fn attributes(payload: &[u8]) -> Result<&[u8], Malformed> {
    payload.get(HEADER_BYTES..).ok_or(Malformed("a netfilter message is shorter than its header"))
}
