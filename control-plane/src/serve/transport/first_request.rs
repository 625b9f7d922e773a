//! Reads the first request of a connection, to choose the server for the connection.
//!
//! The chosen server receives all bytes that were read, with one exception. The general server
//! sends its own `SETTINGS`, so it does not receive the client's acknowledgement of the `SETTINGS`
//! that this module sent.

use std::{
    io,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures::Future as _;
use http::{HeaderValue, Method, Request, header};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::{Instant, timeout_at},
};

use super::sync_connection::frame::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, PREFACE, flag, kind, put_settings};
use crate::serve::stream::SYNC_PATH;

/// The maximum number of bytes up to the end of the first request's headers. A connection that
/// sends more is handed to the general server, which answers with the right error.
const MAX_BYTES: usize = 64 << 10;

/// The maximum size of a request's headers after HPACK decoding, in bytes. The general server has
/// this limit too.
const MAX_HEADER_LIST_BYTES: u32 = 16 << 10;

/// The bytes that were read until the first request's headers were complete or the wait was over.
#[derive(Debug)]
pub(crate) struct FirstRequest {
    /// Everything that was read, beginning with the preface.
    pub(crate) bytes: Vec<u8>,
    /// True if the request is a valid request for `Discovery.Sync`.
    pub(crate) is_sync: bool,
}

/// Reads until the first request's headers are complete, for at most `wait`. Sends the server's
/// preface first, because some clients wait for this preface. RFC 9113, 3.4, allows both sides to
/// send first.
///
/// # Errors
///
/// The connection broke, or ended without a request, or the client did not send a whole preface
/// within `wait` (`TimedOut`).
pub(crate) async fn read(
    connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
    wait: Duration,
) -> io::Result<FirstRequest> {
    let mut settings = Vec::with_capacity(HEADER_BYTES);
    put_settings(&mut settings);
    connection.write_all(&settings).await?;
    connection.flush().await?;
    let mut bytes = Vec::with_capacity(1 << 10);
    let mut scanned = 0;
    let until = Instant::now() + wait;
    loop {
        let Ok(read) = timeout_at(until, connection.read_buf(&mut bytes)).await else {
            // The general server would wait for the client's preface for ever, because it sends
            // pings only after this preface.
            if bytes.len() < PREFACE.len() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            return Ok(FirstRequest { bytes, is_sync: false });
        };
        if read? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match scan(&bytes, &mut scanned) {
            Scan::Incomplete if bytes.len() < MAX_BYTES => {}
            Scan::Headers { end } => return Ok(FirstRequest { is_sync: ends_with_sync(&bytes[..end]), bytes }),
            Scan::Incomplete | Scan::Unexpected => return Ok(FirstRequest { bytes, is_sync: false }),
        }
    }
}

/// The result of a scan for the first request.
#[derive(Debug, PartialEq, Eq)]
enum Scan {
    /// The first header block is not complete yet.
    Incomplete,
    /// The first header block is complete. It ends before the byte `end`.
    Headers { end: usize },
    /// The bytes are not the beginning of an HTTP/2 connection.
    Unexpected,
}

/// Scans frames up to the end of the first header block. `scanned` is the number of bytes that
/// earlier scans have finished, so that each frame is scanned only once.
fn scan(bytes: &[u8], scanned: &mut usize) -> Scan {
    if *scanned == 0 {
        if !bytes.starts_with(PREFACE) {
            return if PREFACE.starts_with(bytes) { Scan::Incomplete } else { Scan::Unexpected };
        }
        *scanned = PREFACE.len();
    }
    while let Some((rest, header)) = bytes.get(*scanned..).and_then(|rest| Some((rest, Header::peek(rest)?))) {
        let is_usual = matches!(
            header.kind,
            kind::HEADERS | kind::CONTINUATION | kind::SETTINGS | kind::PRIORITY | kind::PING | kind::WINDOW_UPDATE
        );
        if header.length > MAX_PAYLOAD_BYTES || (!is_usual && header.kind <= kind::CONTINUATION) {
            return Scan::Unexpected;
        }
        let length = HEADER_BYTES + usize::try_from(header.length).unwrap_or(usize::MAX);
        if rest.len() < length {
            return Scan::Incomplete;
        }
        *scanned += length;
        if matches!(header.kind, kind::HEADERS | kind::CONTINUATION) && header.has(flag::END_HEADERS) {
            return Scan::Headers { end: *scanned };
        }
    }
    Scan::Incomplete
}

/// Returns true for a valid request for `Discovery.Sync`.
pub(crate) fn is_sync<T>(request: &Request<T>) -> bool {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    let is_grpc = |value: &HeaderValue| value.as_bytes().starts_with(b"application/grpc");
    request.uri().path() == SYNC_PATH && request.method() == Method::POST && content_type.is_some_and(is_grpc)
}

/// Returns true if the bytes end with the headers of a valid request for `Discovery.Sync`.
fn ends_with_sync(bytes: &[u8]) -> bool {
    parse(bytes).is_some_and(|request| is_sync(&request))
}

/// Parses the first request in the bytes; `None` if it is not valid. The parser is h2, on a
/// connection in memory. So header compression and the checks of a request are the same as on
/// connections that h2 serves.
fn parse(bytes: &[u8]) -> Option<Request<h2::RecvStream>> {
    let cx = &mut Context::from_waker(Waker::noop());
    // With HPACK's header table, a few bytes can encode very large headers, so the size of the
    // decoded headers is limited.
    let handshake =
        h2::server::Builder::new().max_header_list_size(MAX_HEADER_LIST_BYTES).handshake::<_, Bytes>(Replay(bytes));
    let handshake = pin!(handshake);
    let Poll::Ready(Ok(mut connection)) = handshake.poll(cx) else { return None };
    let accept = pin!(connection.accept());
    match accept.poll(cx) {
        Poll::Ready(Some(Ok((request, _)))) => Some(request),
        _ => None,
    }
}

/// A connection in memory. Only the bytes of the field arrive on this connection.
struct Replay<'a>(&'a [u8]);

impl AsyncRead for Replay<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return Poll::Pending;
        }
        let (part, rest) = self.0.split_at(self.0.len().min(buffer.remaining()));
        buffer.put_slice(part);
        self.0 = rest;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Replay<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A filter that removes the client's first acknowledgement of `SETTINGS`, which answers the
/// `SETTINGS` of [`read`]. All other bytes pass.
#[derive(Debug)]
pub(crate) struct WithoutFirstAck {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// How many bytes of the preface, or of the current frame's payload, still have to pass.
    passing_bytes: usize,
    is_done: bool,
}

impl WithoutFirstAck {
    pub(crate) fn new() -> Self {
        Self { header: [0; HEADER_BYTES], header_bytes: 0, passing_bytes: PREFACE.len(), is_done: false }
    }

    /// Returns true after the acknowledgement was removed. Everything passes from then on.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Appends to `out` the bytes that pass. Holds back a frame header until it is complete.
    pub(crate) fn pass(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            if self.is_done {
                return out.extend_from_slice(bytes);
            }
            let wanted = if self.passing_bytes > 0 { self.passing_bytes } else { HEADER_BYTES - self.header_bytes };
            let (part, rest) = bytes.split_at(wanted.min(bytes.len()));
            bytes = rest;
            if self.passing_bytes > 0 {
                self.passing_bytes -= part.len();
                out.extend_from_slice(part);
                continue;
            }
            self.header[self.header_bytes..][..part.len()].copy_from_slice(part);
            self.header_bytes += part.len();
            if self.header_bytes == HEADER_BYTES {
                self.header_bytes = 0;
                let header = Header::parse(&self.header);
                if header.kind == kind::SETTINGS && header.has(flag::ACK) {
                    self.is_done = true;
                } else {
                    out.extend_from_slice(&self.header);
                    self.passing_bytes = usize::try_from(header.length).unwrap_or(usize::MAX);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn scan_all(bytes: &[u8]) -> Scan {
        scan(bytes, &mut 0)
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// Returns the bytes that h2's client sends for a request. The header block in these bytes is
    /// Huffman coded and uses the dynamic table.
    fn client(path: &str, method: Method, content_type: &str) -> Vec<u8> {
        let cx = &mut Context::from_waker(Waker::noop());
        let (mine, mut theirs) = tokio::io::duplex(1 << 16);
        let handshake = pin!(h2::client::handshake(mine));
        let Poll::Ready(Ok((mut sender, connection))) = handshake.poll(cx) else { panic!("no handshake") };
        let uri = format!("https://replica.example{path}");
        let request = Request::builder().method(method).uri(uri).header(header::CONTENT_TYPE, content_type);
        let _answer = sender.send_request(request.body(()).unwrap(), false).unwrap();
        let mut connection = pin!(connection);
        assert!(connection.as_mut().poll(cx).is_pending());
        let (mut bytes, mut read) = (vec![0; 1 << 14], 0);
        loop {
            let mut buffer = ReadBuf::new(&mut bytes[read..]);
            match Pin::new(&mut theirs).poll_read(cx, &mut buffer) {
                Poll::Ready(result) => result.unwrap(),
                Poll::Pending => break,
            }
            read += buffer.filled().len();
        }
        bytes.truncate(read);
        bytes
    }

    #[test]
    fn only_valid_requests_for_sync_are_recognized() {
        let wanted = client(SYNC_PATH, Method::POST, "application/grpc");
        assert_eq!(scan_all(&wanted), Scan::Headers { end: wanted.len() });
        assert!(ends_with_sync(&wanted));
        for (path, method, content_type) in [
            ("/headgate.v1.Inspect/GetStatus", Method::POST, "application/grpc"),
            (SYNC_PATH, Method::GET, "application/grpc"),
            (SYNC_PATH, Method::POST, "text/plain"),
        ] {
            let bytes = client(path, method, content_type);
            assert!(matches!(scan_all(&bytes), Scan::Headers { .. }) && !ends_with_sync(&bytes), "{path}");
        }
        // These header blocks are not requests: the first block cannot be decoded, and the second
        // block has no pseudo-headers.
        for block in [&b"\xff\xff\xff"[..], b"\x00\x01a\x01b"] {
            let bytes = [PREFACE, &frame(4, 0, 0, &[]), &frame(1, flag::END_HEADERS, 1, block)].concat();
            assert_eq!(scan_all(&bytes), Scan::Headers { end: bytes.len() });
            assert!(!ends_with_sync(&bytes));
        }
    }

    /// Returns the fields `:method: POST`, `:scheme: http`, `:path` and `content-type`.
    fn fields() -> Vec<u8> {
        let path = SYNC_PATH.as_bytes();
        let named = |name: &[u8], value: &[u8]| [name, &[u8::try_from(value.len()).unwrap()], value].concat();
        [vec![0x83, 0x86], named(&[0x04], path), named(&[0x0f, 16], b"application/grpc")].concat()
    }

    #[test]
    fn the_header_table_has_the_default_size() {
        // A size update is an integer with a prefix of five bits (RFC 7541, 6.3). Without
        // SETTINGS_HEADER_TABLE_SIZE, the largest allowed size is 4,096.
        let updates: [(&str, &[u8], bool); 7] = [
            ("none", &[], true),
            ("0", &[0x20], true),
            ("30", &[0x3e], true),
            ("4,096", &[0x3f, 0xe1, 0x1f], true),
            ("0 and then 4,096", &[0x20, 0x3f, 0xe1, 0x1f], true),
            ("4,097", &[0x3f, 0xe2, 0x1f], false),
            ("without an end", &[0x3f, 0xff, 0xff, 0xff, 0xff, 0xff], false),
        ];
        for (what, update, is_accepted) in updates {
            let block = [update, &fields()].concat();
            let bytes =
                [PREFACE, &frame(kind::SETTINGS, 0, 0, &[]), &frame(kind::HEADERS, flag::END_HEADERS, 1, &block)];
            assert_eq!(ends_with_sync(&bytes.concat()), is_accepted, "{what}");
        }
        // A size update must precede all fields (RFC 7541, 4.2).
        let behind = frame(kind::HEADERS, flag::END_HEADERS, 1, &[fields(), vec![0x20]].concat());
        assert!(!ends_with_sync(&[PREFACE, &frame(kind::SETTINGS, 0, 0, &[]), &behind].concat()));
    }

    #[test]
    fn bytes_that_are_not_http2_are_unexpected() {
        assert_eq!(scan_all(b"GET / HTTP/1.1\r\n"), Scan::Unexpected);
        assert_eq!(scan_all(&PREFACE[..10]), Scan::Incomplete);
        let data_first = [PREFACE, &frame(kind::DATA, 0, 1, b"x")].concat();
        assert_eq!(scan_all(&data_first), Scan::Unexpected);
        let large = [PREFACE, &[0, 0x40, 1, 1, 0, 0, 0, 0, 1]].concat();
        assert_eq!(scan_all(&large), Scan::Unexpected);
    }

    #[tokio::test]
    async fn a_client_that_has_sent_only_the_preface_is_kept() {
        let (mut mine, mut theirs) = tokio::io::duplex(1 << 10);
        theirs.write_all(PREFACE).await.unwrap();
        let first = read(&mut mine, Duration::ZERO).await.unwrap();
        assert!(!first.is_sync && first.bytes == PREFACE);
        theirs.write_all(&PREFACE[..20]).await.unwrap();
        let error = read(&mut mine, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "a client without a whole preface is not kept");
        drop(theirs);
        assert!(read(&mut mine, Duration::ZERO).await.is_err());
    }

    #[test]
    fn the_first_acknowledgement_is_removed_wherever_the_bytes_are_cut() {
        let ack = frame(kind::SETTINGS, flag::ACK, 0, &[]);
        let before = [PREFACE, &frame(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 9])].concat();
        let after = [ack.clone(), frame(kind::DATA, 0, 1, b"\0\0\0\x04\x01\0\0\0\0"), ack.clone()].concat();
        let bytes = [before.clone(), after.clone()].concat();
        let expected = [before, after[ack.len()..].to_vec()].concat();
        for size in 1..bytes.len() {
            let (mut filter, mut passed) = (WithoutFirstAck::new(), Vec::new());
            bytes.chunks(size).for_each(|piece| filter.pass(piece, &mut passed));
            assert!(filter.is_done());
            assert_eq!(passed, expected, "in pieces of {size}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_scanned_and_parsed(bytes in prop::collection::vec(any::<u8>(), 0..200), block in prop::collection::vec(any::<u8>(), 0..200)) {
            scan_all(&bytes);
            let bytes = [PREFACE, &frame(kind::SETTINGS, 0, 0, &[]), &frame(kind::HEADERS, flag::END_HEADERS, 1, &block)].concat();
            prop_assert_eq!(scan_all(&bytes), Scan::Headers { end: bytes.len() });
            parse(&bytes);
            let mut scanned = 0;
            for end in 0..bytes.len() {
                prop_assert_eq!(scan_all(&bytes[..end]), Scan::Incomplete);
                prop_assert_eq!(scan(&bytes[..end], &mut scanned), Scan::Incomplete);
            }
            prop_assert_eq!(scan(&bytes, &mut scanned), Scan::Headers { end: bytes.len() });
        }
    }
}
