//! Requests to netfilter subsystems (`linux/netfilter/nfnetlink.h`). The requests begin with
//! `struct nfgenmsg`.

use std::ops::ControlFlow;

use super::{Connection, Malformed, NetlinkError, Refusal, Request};

/// Bytes of `struct nfgenmsg`.
const HEADER_BYTES: usize = 4;

/// Begins a request to a subsystem such as [`libc::NFNL_SUBSYS_IPSET`], with flags in addition to
/// `NLM_F_REQUEST`. `family` is an `NFPROTO_…` number such as `NFPROTO_IPV4`.
#[must_use]
pub fn request(subsystem: libc::c_int, command: u8, flags: u16, family: u8) -> Request {
    let kind = u16::try_from(subsystem).unwrap_or_default() << 8 | u16::from(command);
    Request::new(kind, flags, &[family, 0, 0, 0])
}

/// `NFNL_MSG_BATCH_BEGIN`.
const BATCH_BEGIN: u16 = 16;
/// `NFNL_MSG_BATCH_END`.
const BATCH_END: u16 = 17;

/// The message that opens or closes a transaction. The message holds the subsystem in network byte
/// order.
fn batch_limit(kind: u16, subsystem: libc::c_int) -> Request {
    let [high, low] = u16::try_from(subsystem).unwrap_or_default().to_be_bytes();
    Request::new(kind, 0, &[0, 0, high, low])
}

/// Executes requests of one subsystem as one transaction in one send. The kernel executes either
/// all requests or none.
///
/// `refused` receives each rejection with the index of the request, or without an index if the
/// kernel rejects the transaction as a whole. After any rejection, the kernel has changed nothing.
/// The kernel also checks the requests after a rejected request, so `refused` may receive several
/// rejections. The first rejection shows the cause. Errors that the kernel detects only at the end
/// of the transaction are reported for the first request.
///
/// # Errors
/// If `refused` received a rejection, the kernel changed nothing. If not, it is unknown whether the
/// kernel executed the transaction.
pub fn transact(
    connection: &mut Connection,
    subsystem: libc::c_int,
    requests: &[Request],
    mut refused: impl FnMut(Option<usize>, Refusal),
) -> Result<(), NetlinkError> {
    if requests.is_empty() {
        return Ok(());
    }
    let (begin, end) = (batch_limit(BATCH_BEGIN, subsystem), batch_limit(BATCH_END, subsystem));
    let mut all = Vec::with_capacity(requests.len() + 2);
    all.push(&begin);
    all.extend(requests);
    all.push(&end);
    // Kernels before 6.10 acknowledge neither the begin nor the end message. The last request asks
    // for the acknowledgement.
    let sent = connection.send_together(all.into_iter(), requests.len())?;
    connection.collect_refusals(&sent, |index, refusal| {
        refused(index.checked_sub(1), refusal);
        // The kernel may send no other answer when it rejects the transaction as a whole.
        if index == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// The attributes of a message payload.
///
/// # Errors
/// The payload is truncated.
pub fn attributes(payload: &[u8]) -> Result<&[u8], Malformed> {
    payload.get(HEADER_BYTES..).ok_or(Malformed("a netfilter message is shorter than its header"))
}
