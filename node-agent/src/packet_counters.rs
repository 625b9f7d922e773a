//! Packet counters that rules increment, over netlink (`linux/netfilter/nfnetlink_acct.h`).
//!
//! A counter is a named object of the network namespace. The counter outlives the rules that use it
//! and the process that created it. kube-proxy uses the same names.

use headgate_core::iptables::names::{INVALID_COUNTER, LOCALHOST_COUNTER};
use headgate_netlink::{Connection, NetlinkError, Request, attributes, netfilter_attributes};

const NEW: u8 = 0;
const GET: u8 = 1;
const DELETE: u8 = 3;
/// `NFACCT_NAME`.
const NAME: u16 = 1;
/// `NFACCT_PKTS`, big-endian.
const PACKETS: u16 = 2;
const ANY_FAMILY: u8 = 0;
const CREATE: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_EXCL as u16;

/// Packets counted since the counters were created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PacketCounts {
    /// Packets that were dropped because conntrack marked them INVALID.
    pub invalid_dropped: u64,
    /// Accepted connections to NodePorts on 127.0.0.0/8, by their first packets.
    pub localhost_node_ports_accepted: u64,
}

/// Creates the counters in the calling thread's network namespace. Counters that exist keep their
/// values. Errors: the kernel has no `nfnetlink_acct`, or the agent lacks the privilege.
pub fn make() -> Result<(), NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    for name in [INVALID_COUNTER, LOCALHOST_COUNTER] {
        let request = Request::netfilter(libc::NFNL_SUBSYS_ACCT, NEW, CREATE, ANY_FAMILY).text(NAME, name);
        allow(connection.ask(request, |_, _| {}), libc::EEXIST)?;
    }
    Ok(())
}

/// Reads the counters of the calling thread's network namespace.
/// Errors: a counter does not exist or cannot be read.
pub fn read() -> Result<PacketCounts, NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    let mut packets = |name| {
        let mut packets = 0;
        let request = Request::netfilter(libc::NFNL_SUBSYS_ACCT, GET, 0, ANY_FAMILY).text(NAME, name);
        connection.ask(request, |_, payload| {
            let own = netfilter_attributes(payload).map(attributes);
            let value = own.ok().and_then(|mut own| own.find(|(kind, _)| *kind == PACKETS));
            packets = value.and_then(|(_, value)| Some(u64::from_be_bytes(value.try_into().ok()?))).unwrap_or(packets);
        })?;
        Ok::<u64, NetlinkError>(packets)
    };
    Ok(PacketCounts {
        invalid_dropped: packets(INVALID_COUNTER)?,
        localhost_node_ports_accepted: packets(LOCALHOST_COUNTER)?,
    })
}

/// Removes the counters. Counters that rules still use stay.
/// Errors: the kernel refuses a removal. The function succeeds if a counter is in use or does not
/// exist, and if `nfnetlink_acct` is missing.
pub fn remove() -> Result<(), NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    for name in [INVALID_COUNTER, LOCALHOST_COUNTER] {
        let request = Request::netfilter(libc::NFNL_SUBSYS_ACCT, DELETE, 0, ANY_FAMILY).text(NAME, name);
        let done = connection.ask(request, |_, _| {});
        [libc::ENOENT, libc::EBUSY, libc::EOPNOTSUPP, libc::EINVAL].into_iter().fold(done, allow)?;
    }
    Ok(())
}

/// Returns success if the kernel refused the request with this error code.
fn allow(done: Result<(), NetlinkError>, code: i32) -> Result<(), NetlinkError> {
    match done {
        Err(error) if error.refusal_code() == Some(code) => Ok(()),
        done => done,
    }
}
