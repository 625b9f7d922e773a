//! A UDP socket with batches: GRO and `recvmmsg` for receiving, GSO for sending.

use std::{
    io::{self, IoSliceMut},
    net::SocketAddr,
    os::fd::OwnedFd,
};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use rustix::{
    io::Errno,
    net::{
        SendFlags, send,
        sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery},
    },
};

use crate::unsafe_calls::allow_fragments;

/// The datagrams or GRO batches of one receive.
const BATCH: usize = quinn_udp::BATCH_SIZE;
/// The largest GRO batch.
const BUFFER_BYTES: usize = 65_535;
/// The most bytes of joined datagrams.
const JOINED_BYTES: usize = 32_000;
/// The most receives when a socket closes.
const MOST_DISCARDS: usize = 3_000;
/// The wanted size of the kernel's receive buffer. `net.core.rmem_max` limits it.
const RECEIVE_BUFFER_BYTES: usize = 2 << 20;

/// Datagrams of one sender in one buffer. All datagrams except the last have `stride` bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
    pub(super) sender: SocketAddr,
}

impl Batch<'_> {
    /// The number of datagrams. An empty datagram is one too.
    pub(super) fn count(&self) -> u64 {
        self.bytes.len().div_ceil(self.stride.max(1)).max(1) as u64
    }
}

/// Buffers that all sockets of a thread share.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes: Vec<[u8; BUFFER_BYTES]>,
    metas: Vec<RecvMeta>,
    /// The number of buffers of the last receive.
    count: usize,
    /// Joined datagrams of several buffers.
    joined: Vec<u8>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        let (bytes, metas) = (vec![[0; BUFFER_BYTES]; BATCH], vec![RecvMeta::default(); BATCH]);
        Self { bytes, metas, count: 0, joined: Vec::with_capacity(JOINED_BYTES) }
    }

    /// Whether the last receive filled all buffers, so that more datagrams may wait.
    pub(super) fn is_full(&self) -> bool {
        self.count == BATCH
    }

    /// The received datagrams from buffer `at` on, and moves `at` behind them. Neighbouring buffers
    /// of one sender are joined, so that one send with GSO suffices for them.
    pub(super) fn next_batch(&mut self, at: &mut usize) -> Option<Batch<'_>> {
        let first = *at;
        let meta = self.metas[..self.count].get(first)?;
        let (mut end, mut length) = (first + 1, meta.len);
        while length > 0
            && length % meta.stride == 0
            && let Some(next) = self.metas[..self.count].get(end)
            && next.addr == meta.addr
            && next.len > 0
            // The last datagram of a batch may be shorter.
            && (next.stride == meta.stride || next.len < meta.stride)
            && length + next.len <= JOINED_BYTES
        {
            length += next.len;
            end += 1;
        }
        *at = end;
        let bytes = if end == first + 1 {
            &self.bytes[first][..length]
        } else {
            self.joined.clear();
            for (bytes, meta) in self.bytes[first..end].iter().zip(&self.metas[first..end]) {
                self.joined.extend_from_slice(&bytes[..meta.len]);
            }
            &self.joined[..]
        };
        Some(Batch { bytes, stride: meta.stride, sender: meta.addr })
    }
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    state: UdpSocketState,
    is_connected: bool,
}

impl Socket {
    /// Prepares a socket. Datagrams too large for the path are fragmented.
    pub(super) fn new(fd: OwnedFd, is_ipv4: bool, is_connected: bool) -> io::Result<Self> {
        let state = UdpSocketState::new((&fd).into())?;
        if is_ipv4 {
            sockopt::set_ip_mtu_discover(&fd, Ipv4PathMtuDiscovery::DONT)?;
        } else {
            sockopt::set_ipv6_mtu_discover(&fd, Ipv6PathMtuDiscovery::DONT)?;
            // quinn-udp sets this option.
            allow_fragments(&fd)?;
        }
        // The kernel sets a smaller size if its limit is lower.
        sockopt::set_socket_recv_buffer_size(&fd, RECEIVE_BUFFER_BYTES)?;
        Ok(Self { fd, state, is_connected })
    }

    /// Receives what waits, without blocking.
    pub(super) fn receive(&self, buffers: &mut Buffers) -> io::Result<()> {
        buffers.count = 0;
        let mut slices = buffers.bytes.iter_mut();
        let mut slices: [IoSliceMut<'_>; BATCH] =
            std::array::from_fn(|_| IoSliceMut::new(slices.next().map_or(&mut [][..], |bytes| &mut bytes[..])));
        buffers.count = self.state.recv((&self.fd).into(), &mut slices, &mut buffers.metas)?;
        Ok(())
    }

    /// Takes what waits, and returns the number of datagrams. For a socket that closes.
    pub(super) fn discard(&self, buffers: &mut Buffers) -> u64 {
        let mut count = 0;
        for _ in 0..MOST_DISCARDS {
            match self.receive(buffers) {
                Ok(()) => {
                    let mut at = 0;
                    while let Some(batch) = buffers.next_batch(&mut at) {
                        count += batch.count();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The ICMP error of an earlier datagram.
                Err(_) => {}
            }
        }
        count
    }

    /// Sends a batch to `to` (for a connected socket, its endpoint) in pieces that GSO allows. Some
    /// drivers and paths refuse GSO only at the first send, with EIO or EINVAL: then one by one. If
    /// the endpoint is unreachable, the rest is not sent.
    pub(super) fn send(&self, batch: Batch<'_>, to: SocketAddr) -> Result<(), Lost> {
        let send_piece = |contents: &[u8], segment_size: Option<usize>| {
            if self.is_connected && segment_size.is_none() {
                return Ok(send(&self.fd, contents, SendFlags::NOSIGNAL).map(drop)?);
            }
            let transmit = Transmit { destination: to, ecn: None, contents, segment_size, src_ip: None };
            self.state.try_send((&self.fd).into(), &transmit)
        };
        let stride = if batch.stride == 0 { batch.bytes.len().max(1) } else { batch.stride };
        let (mut rest, mut lost) = (batch.bytes, None);
        // While more bytes than these are left, datagrams are sent one by one.
        let mut singly_above = usize::MAX;
        loop {
            let most = self.state.max_gso_segments().min(BUFFER_BYTES / 2 / stride).max(1);
            let segments = if rest.len() > singly_above { 1 } else { most };
            let (piece, after) = rest.split_at((segments * stride).min(rest.len()));
            let is_joined = piece.len() > stride;
            match send_piece(piece, is_joined.then_some(stride)) {
                Err(error) if is_joined && !is_unreachable(&error) => {
                    singly_above = after.len();
                    continue;
                }
                Err(error) => {
                    let is_over = is_unreachable(&error);
                    let not_sent = if is_over { rest } else { piece };
                    let lost = lost.get_or_insert(Lost { datagrams: 0, bytes: 0, error });
                    lost.datagrams += not_sent.len().div_ceil(stride).max(1) as u64;
                    lost.bytes += not_sent.len() as u64;
                    if is_over {
                        break;
                    }
                }
                Ok(()) => {}
            }
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        lost.map_or(Ok(()), Err)
    }
}

/// The datagrams of a batch that the kernel did not send.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) datagrams: u64,
    pub(super) bytes: u64,
    /// The first reason.
    pub(super) error: io::Error,
}

/// Whether an error says that nobody listens at the endpoint, or that no route leads there. The
/// kernel reports ICMP errors of earlier datagrams at the next call.
pub(super) fn is_unreachable(error: &io::Error) -> bool {
    let unreachable = [Errno::CONNREFUSED, Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::ACCESS, Errno::PERM];
    Errno::from_io_error(error).is_some_and(|errno| unreachable.contains(&errno))
}
