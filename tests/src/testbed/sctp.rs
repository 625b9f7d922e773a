//! A minimal SCTP client and server over raw IP sockets.
//!
//! A kernel may translate SCTP without offering SCTP sockets. The first two packets of an
//! association are enough to see which server a request reaches. The client sends INIT. The server
//! sends INIT ACK, with its answer in the state cookie. SCTP lets the server choose the content of
//! the cookie. Verification tags and the CRC32c are correct, because connection tracking checks
//! both.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::client::tolerate_local_filter;
use super::plan::Family;

/// IANA's protocol number of SCTP.
const PROTOCOL_NUMBER: i32 = 132;
const CHUNK_INIT: u8 = 1;
const CHUNK_INIT_ACK: u8 = 2;
const CHUNK_ABORT: u8 = 6;
const PARAMETER_STATE_COOKIE: u16 = 7;
/// After this time INIT is sent again (`RTO.Initial` of RFC 9260). IPVS drops the first INIT of a
/// source port that was used shortly before.
const RETRANSMISSION_TIMEOUT: Duration = Duration::from_secs(1);
const HEADER_BYTES: usize = 12;
/// Length of the chunk header and the fixed part of INIT and INIT ACK.
const INIT_BYTES: usize = 20;

/// A packet with one chunk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    pub(super) verification_tag: u32,
    pub(super) chunk: Chunk,
}

/// The kinds of chunks that this module supports.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    Init { initiate_tag: u32 },
    InitAck { initiate_tag: u32, cookie: Vec<u8> },
    Abort,
}

impl Packet {
    /// Encodes the packet, including its checksum.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend(self.source_port.to_be_bytes());
        bytes.extend(self.destination_port.to_be_bytes());
        bytes.extend(self.verification_tag.to_be_bytes());
        bytes.extend([0; 4]);
        match &self.chunk {
            Chunk::Init { initiate_tag } => push_init(&mut bytes, CHUNK_INIT, *initiate_tag, &[]),
            Chunk::InitAck { initiate_tag, cookie } => push_init(&mut bytes, CHUNK_INIT_ACK, *initiate_tag, cookie),
            Chunk::Abort => bytes.extend([CHUNK_ABORT, 0, 0, 4]),
        }
        let checksum = crc32c(&bytes);
        bytes[8..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a packet. Returns `None` for a truncated packet, a wrong checksum or another kind of
    /// chunk.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let half = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let mut unsigned = bytes.to_vec();
        unsigned.get_mut(8..HEADER_BYTES)?.fill(0);
        if bytes.get(8..HEADER_BYTES)? != crc32c(&unsigned).to_le_bytes() {
            return None;
        }
        let initiate_tag = || word(HEADER_BYTES + 4);
        let chunk = match *bytes.get(HEADER_BYTES)? {
            CHUNK_INIT => Chunk::Init { initiate_tag: initiate_tag()? },
            CHUNK_INIT_ACK => {
                let parameter = HEADER_BYTES + INIT_BYTES;
                if half(parameter)? != PARAMETER_STATE_COOKIE {
                    return None;
                }
                let end = parameter + usize::from(half(parameter + 2)?);
                Chunk::InitAck { initiate_tag: initiate_tag()?, cookie: bytes.get(parameter + 4..end)?.to_vec() }
            }
            CHUNK_ABORT => Chunk::Abort,
            _ => return None,
        };
        Some(Self { source_port: half(0)?, destination_port: half(2)?, verification_tag: word(4)?, chunk })
    }
}

fn push_init(bytes: &mut Vec<u8>, kind: u8, initiate_tag: u32, cookie: &[u8]) {
    let as_u16 = |length: usize| u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
    // A parameter's length excludes its padding. The chunk's length excludes the padding of its
    // last parameter.
    let parameter_bytes = if cookie.is_empty() { 0 } else { 4 + cookie.len() };
    bytes.extend([kind, 0]);
    bytes.extend(as_u16(INIT_BYTES + parameter_bytes));
    bytes.extend(initiate_tag.to_be_bytes());
    // The receive window, one stream in each direction, and the first TSN. RFC 9260 suggests to use
    // the tag as the first TSN.
    bytes.extend(65_536_u32.to_be_bytes());
    bytes.extend([0, 1, 0, 1]);
    bytes.extend(initiate_tag.to_be_bytes());
    if !cookie.is_empty() {
        bytes.extend(PARAMETER_STATE_COOKIE.to_be_bytes());
        bytes.extend(as_u16(parameter_bytes));
        bytes.extend(cookie);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
}

/// CRC32c (Castagnoli), computed bit by bit, because the packets are small.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    })
}

/// A raw socket for SCTP, bound to `address`. The socket is wrapped as a `UdpSocket`, which has
/// `send_to` and `recv_from`. For a raw socket, the kernel ignores the ports in addresses.
pub(super) fn raw_socket(address: IpAddr) -> io::Result<UdpSocket> {
    let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(PROTOCOL_NUMBER)))?;
    socket.bind(&SocketAddr::new(address, 0).into())?;
    Ok(socket.into())
}

/// The SCTP packet in data from a raw socket. The data include the IP header for IPv4 only.
pub(super) fn payload(family: Family, received: &[u8]) -> &[u8] {
    match family {
        Family::V6 => received,
        Family::V4 => {
            let header_bytes = received.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
            received.get(header_bytes..).unwrap_or_default()
        }
    }
}

/// Sends INIT from `source` to the SCTP server at `to`, and returns the server's answer.
///
/// # Errors
/// `ConnectionRefused` for an ABORT or an ICMP port unreachable, `TimedOut` if nothing arrives, and
/// other errors of sockets.
pub(super) fn ask(source: SocketAddr, to: SocketAddr, timeout: Duration) -> io::Result<String> {
    let family = Family::of(to.ip());
    let socket = raw_socket(source.ip())?;
    // Only a connected raw socket receives ICMP errors.
    socket.connect(SocketAddr::new(to.ip(), 0))?;
    let initiate_tag = fastrand::u32(1..);
    let init = Packet {
        source_port: source.port(),
        destination_port: to.port(),
        verification_tag: 0,
        chunk: Chunk::Init { initiate_tag },
    };
    let deadline = Instant::now() + timeout;
    let mut send_at = Instant::now();
    let mut buffer = [0; 2048];
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if now >= send_at {
            tolerate_local_filter(socket.send(&init.encode()))?;
            send_at = now + RETRANSMISSION_TIMEOUT;
        }
        socket.set_read_timeout(Some(deadline.min(send_at).saturating_duration_since(now)))?;
        let length = match socket.recv(&mut buffer) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => continue,
            received => received?,
        };
        let Some(packet) = Packet::decode(payload(family, &buffer[..length])) else { continue };
        if packet.source_port != to.port()
            || packet.destination_port != source.port()
            || packet.verification_tag != initiate_tag
        {
            continue;
        }
        return match packet.chunk {
            Chunk::InitAck { cookie, .. } => String::from_utf8(cookie).map_err(io::Error::other),
            Chunk::Abort => Err(io::ErrorKind::ConnectionRefused.into()),
            Chunk::Init { .. } => continue,
        };
    }
}
