//! Counters that rules count packets into, over netlink (`linux/netfilter/nfnetlink_acct.h`):
//! objects of the network namespace, by name, which outlive rules and processes. kube-proxy's, by
//! the same names.

use headgate_core::iptables::names::{INVALID_COUNTER, LOCALHOST_COUNTER};
use headgate_netlink::{Connection, NetlinkError, attributes, netfilter};

const NEW: u8 = 0;
const GET: u8 = 1;
const DELETE: u8 = 3;
/// `NFACCT_NAME`.
const NAME: u16 = 1;
/// `NFACCT_PKTS`, big-endian.
const PACKETS: u16 = 2;
const ANY_FAMILY: u8 = 0;
const CREATE: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_EXCL as u16;

/// Packets counted since the counters were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PacketCounts {
    /// Packets that conntrack called INVALID and that were dropped.
    pub invalid_dropped: u64,
    /// Packets accepted at NodePorts on 127.0.0.0/8; the first of each connection counts.
    pub localhost_node_ports_accepted: u64,
}

/// Makes the counters in the calling thread's network namespace; those that are there go on
/// counting.
///
/// # Errors
/// The kernel has no `nfnetlink_acct`, or we may not.
pub fn make() -> Result<(), NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    for name in [INVALID_COUNTER, LOCALHOST_COUNTER] {
        let request = netfilter::request(libc::NFNL_SUBSYS_ACCT, NEW, CREATE, ANY_FAMILY).text(NAME, name);
        allow(connection.ask(request, |_, _| {}), libc::EEXIST)?;
    }
    Ok(())
}

/// Reads the counters of the calling thread's network namespace.
///
/// # Errors
/// One is not there, or cannot be read.
pub fn read() -> Result<PacketCounts, NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    let mut packets = |name| {
        let mut packets = 0;
        let request = netfilter::request(libc::NFNL_SUBSYS_ACCT, GET, 0, ANY_FAMILY).text(NAME, name);
        connection.ask(request, |_, payload| {
            let own = netfilter::attributes(payload).map(attributes);
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

/// Removes the counters, unless rules still use them.
///
/// # Errors
/// It cannot be done, but for a kernel that has no such thing or has it in use.
pub fn remove() -> Result<(), NetlinkError> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    for name in [INVALID_COUNTER, LOCALHOST_COUNTER] {
        let request = netfilter::request(libc::NFNL_SUBSYS_ACCT, DELETE, 0, ANY_FAMILY).text(NAME, name);
        let done = connection.ask(request, |_, _| {});
        [libc::ENOENT, libc::EBUSY, libc::EOPNOTSUPP, libc::EINVAL].into_iter().fold(done, allow)?;
    }
    Ok(())
}

fn allow(done: Result<(), NetlinkError>, code: i32) -> Result<(), NetlinkError> {
    match done {
        Err(error) if error.refusal_code() == Some(code) => Ok(()),
        done => done,
    }
}
