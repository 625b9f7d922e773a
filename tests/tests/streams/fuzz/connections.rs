//! Sends the bytes of whole connections, without TLS, to a running replica.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use fastrand::Rng;
use futures::FutureExt as _;
use headgate_control_plane::{
    model::Sink as _,
    serve::{PeerSettings, Security, Settings},
};
use headgate_tests::fuzz::{Run, corpus, mutate, mutate_sequence};
use peakmem_alloc::PeakMemAllocTrait as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::{
    client::{Client, GUARD, channel, eventually},
    replica::{Replica, cluster, service, settings},
};

use super::{ALLOCATOR, count_panics, served};

/// The number of cases. The number is lower than for messages, since connections take more time.
const CASES: u64 = 300;

/// If the replica sends no bytes for this time, the test assumes that the replica waits for the
/// client. A shorter time only makes the cases reach less of the replica's code.
const QUIET: Duration = Duration::from_millis(10);

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// Frame types and flags (RFC 9113, section 6).
pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const ACK: u8 = 1;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const PADDED: u8 = 8;
pub(crate) const WITH_PRIORITY: u8 = 0x20;
const HEADER_BYTES: usize = 9;

pub(crate) fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Splits a connection into its preface and its frames.
fn parts_of(bytes: &[u8]) -> Vec<Vec<u8>> {
    let (preface, mut rest) = bytes.split_at(PREFACE.len());
    let mut parts = vec![preface.to_vec()];
    while let Some(&[l0, l1, l2, ..]) = rest.first_chunk::<HEADER_BYTES>() {
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        let (frame, after) = rest.split_at(HEADER_BYTES + length);
        parts.push(frame.to_vec());
        rest = after;
    }
    parts
}

/// Changes any bytes of a connection, or whole frames, or the payload of one frame. After a change
/// of the payload, the length in the frame's header is correct.
fn mutate_connection(rng: &mut Rng, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
    let mut parts = parts_of(bytes);
    match rng.u8(0..4) {
        0 => return mutate(rng, bytes, others, &[]),
        1 => mutate_sequence(rng, &mut parts),
        _ => {
            let at = rng.usize(1..parts.len());
            let (header, payload) = parts[at].split_at(HEADER_BYTES);
            let [kind, flags, stream @ ..] = *header[3..].first_chunk::<6>().unwrap();
            let mut payload = payload.to_vec();
            let all: Vec<Vec<u8>> = parts.clone();
            mutate(rng, &mut payload, &all, &[]);
            parts[at] = http2_frame(kind, flags, u32::from_be_bytes(stream), &payload);
        }
    }
    *bytes = parts.concat();
}

/// Whether one of the frames in an answer is DATA.
fn has_data(mut answer: &[u8]) -> bool {
    while let Some(&[l0, l1, l2, kind, ..]) = answer.first_chunk::<HEADER_BYTES>() {
        if kind == DATA {
            return true;
        }
        answer = answer.get(HEADER_BYTES + u32::from_be_bytes([0, l0, l1, l2]) as usize..).unwrap_or_default();
    }
    false
}

/// Sends `bytes`, reads until a DATA frame or no more bytes arrive, closes the writing half, and
/// reads to the end. Returns the answer, or `None` if the replica keeps the connection open.
async fn talk(address: SocketAddr, bytes: &[u8], quiet: Duration) -> Option<Vec<u8>> {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let mut answer = Vec::new();
    // Ignore an error: the replica may close or reset the connection early.
    let _ = socket.write_all(bytes).await;
    while !has_data(&answer) && matches!(timeout(quiet, socket.read_buf(&mut answer)).await, Ok(Ok(1..))) {}
    let _ = socket.shutdown().await;
    let end = async { while matches!(socket.read_buf(&mut answer).await, Ok(1..)) {} };
    timeout(GUARD, end).await.ok()?;
    Some(answer)
}

#[tokio::test]
async fn mutated_connections_end_without_a_panic_in_bounded_memory() {
    let panics = count_panics();
    // Without other replicas, this one answers questions about all nodes.
    let settings = Settings { peers: Some(PeerSettings::default()), ..settings() };
    let replica = Replica::start_with(settings, Security::Plaintext).await;
    replica.store.synced();
    replica.put(cluster(20));
    let (agents, inspect) = (replica.running.local_addr, replica.running.inspect_addr);
    let address_of = |name: &str| if name.starts_with("sync") { agents } else { inspect };
    let mut witness = Client::open(channel(agents).await, "witness", None).await.unwrap();
    let corpus = corpus("connection");
    for (name, bytes) in &corpus {
        let answer = talk(address_of(name), bytes, GUARD)
            .await
            .unwrap_or_else(|| panic!("the connection {name} of the corpus does not end"));
        assert!(has_data(&answer), "{name} of the corpus is not answered: {answer:?}");
    }
    let others: Vec<Vec<u8>> = corpus.iter().map(|(_, bytes)| bytes.clone()).collect();
    let mut cases = Run::new("connection", CASES);
    let mut streams = 0;
    while cases.goes_on() {
        let (name, bytes) = &corpus[cases.rng.usize(0..corpus.len())];
        let mut bytes = bytes.clone();
        mutate_connection(&mut cases.rng, &mut bytes, &others);
        // The replica ends the stream of an agent that reads nothing for long.
        while let Some(read) = witness.step().now_or_never() {
            read.unwrap().expect("the stream of another agent ended");
        }
        ALLOCATOR.reset_peak_memory();
        let began = Instant::now();
        let answer = talk(address_of(name), &bytes, QUIET).await;
        let result = served(&panics, bytes.len()).and_then(|()| match answer {
            Some(answer) => Ok(has_data(&answer)),
            None => Err("the replica keeps the connection open after the client closed it".to_owned()),
        });
        streams += u64::from(name.starts_with("sync") && result == Ok(true));
        cases.count(&bytes, began, result);
    }
    cases.finish();
    // Another agent still receives changes, and only the stream of this agent is left.
    replica.put([service(21, 80)]);
    witness.reach(2).await;
    eventually("no other stream is left", async || replica.metric("headgate_streams") == 1).await;
    assert!(replica.metric("headgate_streams_opened_total") > streams && streams > 0);
    replica.running.stop().await;
}
