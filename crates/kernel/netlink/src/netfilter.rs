//! Requests to netfilter subsystems (`linux/netfilter/nfnetlink.h`). Each has a `struct nfgenmsg`.

use std::{iter, ops::ControlFlow};

use super::{Connection, Malformed, NetlinkError, Refusal, Request};

/// Begins a request to a subsystem such as [`libc::NFNL_SUBSYS_IPSET`], with flags in addition to
/// `NLM_F_REQUEST`. `family` is an `NFPROTO_…` number such as `NFPROTO_IPV4`.
pub fn request(subsystem: libc::c_int, command: u8, flags: u16, family: u8) -> Request {
    Request::new((subsystem as u16) << 8 | u16::from(command), flags, &[family, 0, 0, 0])
}

/// The message that opens or closes a transaction, with the subsystem in network byte order.
fn batch_limit(kind: libc::c_int, subsystem: libc::c_int) -> Request {
    let [high, low] = (subsystem as u16).to_be_bytes();
    Request::new(kind as u16, 0, &[0, 0, high, low])
}

/// Executes requests of one subsystem as one transaction in one send: all or none. `refused`
/// receives each rejection with the index of the request, or without one for the transaction as a
/// whole; the first shows the cause. What the kernel detects only at the end is reported for the
/// first request. Errors: without a rejection, it is unknown whether the kernel executed the
/// transaction.
pub fn transact(
    connection: &mut Connection,
    subsystem: libc::c_int,
    requests: &[Request],
    mut refused: impl FnMut(Option<usize>, Refusal),
) -> Result<(), NetlinkError> {
    if requests.is_empty() {
        return Ok(());
    }
    let begin = batch_limit(libc::NFNL_MSG_BATCH_BEGIN, subsystem);
    let end = batch_limit(libc::NFNL_MSG_BATCH_END, subsystem);
    let all: Vec<_> = iter::once(&begin).chain(requests).chain([&end]).collect();
    // Kernels before 6.10 acknowledge neither the begin nor the end message. The last request does.
    let sent = connection.send_together(all.into_iter(), requests.len())?;
    connection.collect_refusals(&sent, |index, refusal| {
        refused(index.checked_sub(1), refusal);
        // The kernel may send no other answer when it rejects the transaction as a whole.
        if index == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// The attributes of a message payload. Errors: the payload is truncated.
pub fn attributes(payload: &[u8]) -> Result<&[u8], Malformed> {
    payload.get(4..).ok_or(Malformed("a netfilter message is shorter than its header"))
}
