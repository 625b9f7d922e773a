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

/// A UDP socket.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    state: UdpSocketState,
}

impl Socket {
    /// Prepares a socket. Datagrams that are too large for the path are fragmented, as the client
    /// sent them.
    pub(super) fn new(fd: OwnedFd, is_ipv4: bool) -> io::Result<Self> {
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
        Ok(Self { fd, state })
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

    /// Sends the datagrams of a batch to `to`.
    pub(super) fn send_to(&self, batch: Batch<'_>, to: SocketAddr) -> Result<(), Lost> {
        self.send_pieces(batch, |contents, segment_size| {
            let transmit = Transmit { destination: to, ecn: None, contents, segment_size, src_ip: None };
            self.state.try_send((&self.fd).into(), &transmit)
        })
    }

    /// Sends the datagrams of a batch to the address to which the socket is connected.
    pub(super) fn send(&self, batch: Batch<'_>, connected_to: SocketAddr) -> Result<(), Lost> {
        self.send_pieces(batch, |contents, segment_size| {
            if segment_size.is_some() {
                let transmit = Transmit { destination: connected_to, ecn: None, contents, segment_size, src_ip: None };
                return self.state.try_send((&self.fd).into(), &transmit);
            }
            Ok(send(&self.fd, contents, SendFlags::NOSIGNAL).map(drop)?)
        })
    }

    /// Sends pieces of as many datagrams as GSO allows. Some drivers and paths refuse GSO only at
    /// the first send, with EIO or EINVAL: the datagrams of that piece are then sent one by one. If
    /// the endpoint is unreachable, the rest of the batch is not sent.
    fn send_pieces(&self, batch: Batch<'_>, send: impl Fn(&[u8], Option<usize>) -> io::Result<()>) -> Result<(), Lost> {
        let Batch { bytes, stride, .. } = batch;
        if bytes.len() <= stride || stride == 0 {
            return send(bytes, None).map_err(|error| Lost { datagrams: 1, bytes: bytes.len() as u64, error });
        }
        let (mut lost, mut rest): (Option<Lost>, _) = (None, bytes);
        let mut lose = |not_sent: &[u8], error| {
            let lost = lost.get_or_insert(Lost { datagrams: 0, bytes: 0, error });
            lost.datagrams += not_sent.len().div_ceil(stride) as u64;
            lost.bytes += not_sent.len() as u64;
        };
        'pieces: while !rest.is_empty() {
            let segments = self.state.max_gso_segments().min(BUFFER_BYTES / 2 / stride).max(1);
            let (piece, after) = rest.split_at((segments * stride).min(rest.len()));
            if piece.len() > stride {
                match send(piece, Some(stride)) {
                    Ok(()) => {
                        rest = after;
                        continue;
                    }
                    Err(error) if is_unreachable(&error) => {
                        lose(rest, error);
                        break;
                    }
                    Err(_) => {}
                }
            }
            while rest.len() > after.len() {
                let (datagram, others) = rest.split_at(stride.min(rest.len()));
                match send(datagram, None) {
                    Ok(()) => {}
                    Err(error) if is_unreachable(&error) => {
                        lose(rest, error);
                        break 'pieces;
                    }
                    Err(error) => lose(datagram, error),
                }
                rest = others;
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
