//! Netfilter's subsystems (`linux/netfilter/nfnetlink.h`): requests begin with `struct nfgenmsg`.

use std::ops::ControlFlow;

use super::{Connection, Malformed, NetlinkError, Refusal, Request};

/// Bytes of `struct nfgenmsg`.
const HEADER_BYTES: usize = 4;

/// A request of a subsystem, such as [`libc::NFNL_SUBSYS_IPSET`], with flags besides `NLM_F_REQUEST`. The family is `NFPROTO_IPV4` or its like.
#[must_use]
pub fn request(subsystem: libc::c_int, command: u8, flags: u16, family: u8) -> Request {
    let kind = u16::try_from(subsystem).unwrap_or_default() << 8 | u16::from(command);
    Request::new(kind, flags, &[family, 0, 0, 0])
}

/// `NFNL_MSG_BATCH_BEGIN`.
const BATCH_BEGIN: u16 = 16;
/// `NFNL_MSG_BATCH_END`.
const BATCH_END: u16 = 17;
/// `NFNL_BATCH_GENID`.
const BATCH_GENERATION: u16 = 1;

/// The message that opens or closes a transaction: it names the subsystem in network byte order.
fn batch_limit(kind: u16, subsystem: libc::c_int) -> Request {
    let [high, low] = u16::try_from(subsystem).unwrap_or_default().to_be_bytes();
    Request::new(kind, 0, &[0, 0, high, low])
}

/// Carries out requests of one subsystem as one transaction, in one send: all of them, or none.
/// With a `generation`, the kernel refuses with `ERESTART` unless that is its current one.
///
/// Each refusal goes to `refused` with the request's index, or with none when the kernel refuses
/// the transaction as a whole. If there is any refusal, nothing was done. The kernel checks the
/// requests behind a refused one too, so there may be several; the first is the cause to look at.
/// What the kernel finds at the end, when all requests were good, it reports for the first request.
///
/// # Errors
/// It is not known whether the transaction was carried out, unless a refusal was handed out: then
/// it was not.
pub fn transact(
    connection: &mut Connection,
    subsystem: libc::c_int,
    generation: Option<u32>,
    requests: &[Request],
    mut refused: impl FnMut(Option<usize>, Refusal),
) -> Result<(), NetlinkError> {
    if requests.is_empty() {
        return Ok(());
    }
    let begin = batch_limit(BATCH_BEGIN, subsystem);
    let begin = match generation {
        Some(generation) => begin.attribute(BATCH_GENERATION, &generation.to_be_bytes()),
        None => begin,
    };
    let end = batch_limit(BATCH_END, subsystem);
    let mut all = Vec::with_capacity(requests.len() + 2);
    all.push(&begin);
    all.extend(requests);
    all.push(&end);
    // Kernels before 6.10 acknowledge neither end of the transaction: the last request asks for it.
    let sent = connection.send_together(all.into_iter(), requests.len())?;
    connection.collect_refusals(&sent, |index, refusal| {
        refused(index.checked_sub(1), refusal);
        // A transaction that is refused as a whole may have no other answer.
        if index == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// The attributes of a message.
///
/// # Errors
/// It is cut short.
pub fn attributes(payload: &[u8]) -> Result<&[u8], Malformed> {
    payload.get(HEADER_BYTES..).ok_or(Malformed("a netfilter message is shorter than its header"))
}
