//! Clients that send requests from inside a namespace and report the outcome.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::{
    libc,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::netns::Namespace;
use super::sctp;
use super::turn::in_turn;

/// How long to wait for an expected answer. This time is long, because a client waits for the whole
/// time only when a test fails, and because a busy machine may pause for seconds.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait where silence is expected. An answer or a refusal takes about a millisecond.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);

/// The protocol of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// One line over a TCP connection.
    Tcp,
    /// One datagram over a connected UDP socket.
    Udp,
    /// The first two packets of an SCTP association.
    Sctp,
    /// `GET /` over HTTP/1.1.
    Http,
}

impl Transport {
    /// Whether the transport uses TCP.
    pub fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::Http)
    }
}

/// The answer of a test server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The name of the server's pod or node.
    pub server: String,
    /// The port at which the server was reached, after translation.
    pub port: u16,
    /// The client's address and port, as the server saw them.
    pub source: SocketAddr,
}

impl Answer {
    pub(super) fn new(server: &str, port: u16, source: SocketAddr) -> Self {
        Self { server: server.to_owned(), port, source }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {} {}", self.server, self.port, self.source)
    }
}

impl FromStr for Answer {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace();
        let (Some(server), Some(port), Some(source), None) = (words.next(), words.next(), words.next(), words.next())
        else {
            bail!("a test server answered {text:?} instead of its name, its port and the client's address");
        };
        Ok(Self { server: server.to_owned(), port: port.parse()?, source: source.parse()? })
    }
}

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A server answered.
    Answered(Answer),
    /// The request was refused at once, by RST, ABORT or ICMP port unreachable.
    Refused,
    /// Nothing arrived before the time-out: the packets were dropped.
    TimedOut,
    /// ICMP reported that the host or network is unreachable, or the client had no route.
    Unreachable,
    /// The request was not sent: another socket holds its source port.
    PortTaken,
    /// Any other outcome, such as a reset of an established connection.
    Broken(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(answer) => {
                write!(formatter, "answered by {} port {}, which saw {}", answer.server, answer.port, answer.source)
            }
            Self::Refused => formatter.write_str("refused"),
            Self::TimedOut => formatter.write_str("timed out"),
            Self::Unreachable => formatter.write_str("unreachable"),
            Self::PortTaken => formatter.write_str("another socket holds the source port"),
            Self::Broken(reason) => write!(formatter, "broken: {reason}"),
        }
    }
}

/// One request of a client.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// The protocol.
    pub transport: Transport,
    /// The target.
    pub to: SocketAddr,
    /// The source address; `None` for the address that the client's machine chooses.
    pub from_address: Option<IpAddr>,
    /// The source port; `None` for any port.
    pub from_port: Option<u16>,
    /// How long to wait for an answer.
    pub timeout: Duration,
    /// UDP only: the length of the datagram and of its reply, in bytes. Shorter texts are padded to
    /// this length.
    pub datagram_bytes: usize,
}

impl Request {
    /// A request from any port, with the time-out for expected answers.
    pub fn new(transport: Transport, to: SocketAddr) -> Self {
        Self { transport, to, from_address: None, from_port: None, timeout: ANSWER_TIMEOUT, datagram_bytes: 0 }
    }

    /// Returns this request with the short time-out for packets that should be dropped.
    #[must_use]
    pub fn expecting_silence(self) -> Self {
        Self { timeout: SILENCE_TIMEOUT, ..self }
    }
}

/// Sends one request from `namespace`. Unlike [`ask_many`], this function does not wait for series
/// of other clients, because one request does not disturb a series.
pub fn ask(namespace: &Namespace, request: &Request) -> Result<Outcome> {
    namespace.run(|| Ok(outcome(request)))
}

/// Sends `count` requests one after the other, each from its own socket. During this time no other
/// series is sent to the same target (see [`super::turn`]). Stops at the first time-out, to save
/// time.
pub fn ask_many(namespace: &Namespace, request: &Request, count: usize) -> Result<Vec<Outcome>> {
    ask_until(namespace, request, count, |_| false)
}

/// Sends requests like [`ask_many`] until each of `servers` servers has answered, so often that a
/// further server, with an equal share, would answer with a probability of 99.9 %.
pub fn ask_all(namespace: &Namespace, request: &Request, servers: usize) -> Result<Vec<Outcome>> {
    // (most, least): the probability that one of the servers gets none of `most` requests is below
    // 10⁻⁹. Both numbers are slightly larger than necessary for more than four servers.
    let (most, least) = match servers {
        0 | 1 => (3, 3),
        2 => (31, 18),
        3 => (54, 25),
        4 => (77, 32),
        more => (24 * more, 8 * more),
    };
    ask_until(namespace, request, most, |outcomes| {
        let answered = outcomes.iter().filter_map(|outcome| match outcome {
            Outcome::Answered(answer) => Some(&answer.server),
            _ => None,
        });
        outcomes.len() >= least && answered.collect::<BTreeSet<_>>().len() >= servers
    })
}

fn ask_until(
    namespace: &Namespace,
    request: &Request,
    most: usize,
    is_enough: impl Fn(&[Outcome]) -> bool + Sync,
) -> Result<Vec<Outcome>> {
    let series = || {
        let mut outcomes = Vec::with_capacity(most);
        while outcomes.len() < most && outcomes.last() != Some(&Outcome::TimedOut) && !is_enough(&outcomes) {
            outcomes.push(outcome(request));
        }
        Ok(outcomes)
    };
    in_turn(request, || namespace.run(series))
}

/// Sends one request from the namespace of the calling thread.
pub(crate) fn outcome(request: &Request) -> Outcome {
    let text = match request.transport {
        Transport::Tcp => ask_tcp(request),
        Transport::Udp => ask_udp(request),
        Transport::Sctp => ask_sctp(request),
        Transport::Http => http(request, "GET / HTTP/1.1", &[]),
    };
    match text {
        Ok(text) => match text.parse() {
            Ok(answer) => Outcome::Answered(answer),
            Err(error) => Outcome::Broken(format!("{error:#}")),
        },
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Outcome::Refused,
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Outcome::TimedOut,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Outcome::Unreachable,
            io::ErrorKind::AddrInUse => Outcome::PortTaken,
            _ => Outcome::Broken(error.to_string()),
        },
    }
}

/// Calls `ask` with random source ports until the port is free. The ports are below the kernel's
/// ephemeral ports and below the node ports. Servers on the machine, such as the agent's own pages,
/// may hold some of these ports. Returns the port and the outcome.
pub fn ask_from_low_port(mut ask: impl FnMut(u16) -> Result<Outcome>) -> Result<(u16, Outcome)> {
    let mut outcome = Outcome::PortTaken;
    for _ in 0..LOW_PORT_DRAWS {
        let port = fastrand::u16(LOW_PORTS);
        outcome = ask(port)?;
        if outcome != Outcome::PortTaken {
            return Ok((port, outcome));
        }
    }
    bail!("{outcome}, {LOW_PORT_DRAWS} times in a row with ports drawn from {LOW_PORTS:?}")
}

const LOW_PORTS: Range<u16> = 10_000..30_000;
/// A machine holds few of these ports, so ten taken ports in a row mean a defect.
const LOW_PORT_DRAWS: usize = 10;

fn unspecified(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Counts the ports that this module has chosen for requests that set no source port. The chosen
/// ports are above the node ports.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);
const FIRST_PORT: u16 = 33_000;
const PORTS: u16 = 32_000;

/// A port that this process has not used for a long time.
fn next_port() -> u16 {
    FIRST_PORT + NEXT_PORT.fetch_add(1, Ordering::Relaxed) % PORTS
}

/// Calls `bind` with the request's source port, or else with a port that this process has not used
/// for a long time.
///
/// IPVS does not translate source ports. If a client uses one port for two services with the same
/// endpoint, both connections look equal to the endpoint and to conntrack, until both have deleted
/// the state of the first connection. The kernel could choose such a port, because it reuses a port
/// for other destinations.
pub(super) fn from_a_port<T>(request: &Request, bind: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let address = request.from_address.unwrap_or_else(|| unspecified(request.to));
    let from = |port| SocketAddr::new(address, port);
    if let Some(port) = request.from_port {
        return bind(from(port));
    }
    loop {
        match bind(from(next_port())) {
            // Another socket holds this port. Try the next port.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
}

/// How many ports [`connect`] tries that an earlier connection to the same target holds.
const HELD_PORTS: usize = 20;

fn connect(request: &Request) -> io::Result<TcpStream> {
    let mut left = if request.from_port.is_some() { 0 } else { HELD_PORTS };
    loop {
        match connect_from_one_port(request) {
            // An earlier connection from this port is in the state TIME_WAIT: the process has sent
            // more requests than there are ports.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && left > 0 => left -= 1,
            result => return result,
        }
    }
}

fn connect_from_one_port(request: &Request) -> io::Result<TcpStream> {
    let domain = Domain::for_address(request.to);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    from_a_port(request, |from| socket.bind(&from.into()))?;
    queue_icmp_errors(&socket, true)?;
    let connected = socket.connect_timeout(&request.to.into(), request.timeout);
    connected.map_err(|error| icmp_error(&socket).unwrap_or(error))?;
    queue_icmp_errors(&socket, false)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(request.timeout))?;
    stream.set_write_timeout(Some(request.timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Turns the socket's error queue on or off.
///
/// An ICMP message may arrive while `connect` still holds the socket's lock. Linux then only stores
/// the message as a soft error, and `connect` fails after the next SYN, a second later. The error
/// queue contains the message at once.
fn queue_icmp_errors(socket: &Socket, queue: bool) -> io::Result<()> {
    match socket.domain()? {
        Domain::IPV4 => setsockopt(socket, sockopt::Ipv4RecvErr, &queue)?,
        _ => setsockopt(socket, sockopt::Ipv6RecvErr, &queue)?,
    }
    Ok(())
}

/// The error of an ICMP message in the socket's error queue.
fn icmp_error(socket: &Socket) -> Option<io::Error> {
    let mut space = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut [], Some(&mut space), flags).ok()?;
    message.cmsgs().ok()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4RecvErr(error, _) | ControlMessageOwned::Ipv6RecvErr(error, _) => {
            Some(io::Error::from_raw_os_error(error.ee_errno.cast_signed()))
        }
        _ => None,
    })
}

fn ask_tcp(request: &Request) -> io::Result<String> {
    exchange_line(&mut BufReader::new(connect(request)?), "who")
}

fn exchange_line(stream: &mut BufReader<TcpStream>, line: &str) -> io::Result<String> {
    stream.get_mut().write_all(format!("{line}\n").as_bytes())?;
    let mut reply = String::new();
    if stream.read_line(&mut reply)? == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
    }
    Ok(reply.trim_end().to_owned())
}

fn ask_udp(request: &Request) -> io::Result<String> {
    let socket = from_a_port(request, UdpSocket::bind)?;
    socket.connect(request.to)?;
    socket.set_read_timeout(Some(request.timeout))?;
    let length = request.datagram_bytes;
    tolerate_local_filter(socket.send(format!("{:length$}", "who").as_bytes()))?;
    let mut buffer = vec![0; length.max(1024)];
    let received = socket.recv(&mut buffer)?;
    if received < length {
        return Err(io::Error::other(format!("a reply of {received} bytes to a request of {length}")));
    }
    buffer.truncate(received);
    String::from_utf8(buffer).map_err(io::Error::other)
}

/// Ignores `EPERM` from sending. The kernel returns this error when rules of the sender's own
/// machine reject or drop the packet. The caller sees the difference later: an ICMP message follows
/// a rejection, and nothing follows a drop.
pub(super) fn tolerate_local_filter(sent: io::Result<usize>) -> io::Result<()> {
    match sent {
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

fn ask_sctp(request: &Request) -> io::Result<String> {
    let route = UdpSocket::bind((unspecified(request.to), 0))?;
    route.connect(request.to)?;
    let own = route.local_addr()?.ip();
    let _turn = SctpTurn::wait(own, request.to.ip());
    let port = request.from_port.unwrap_or_else(next_port);
    sctp::ask(SocketAddr::new(own, port), request.to, request.timeout)
}

/// Holds the right to exchange SCTP packets between two addresses. A raw socket receives all SCTP
/// packets of its peer and all errors about them, so only one exchange runs at a time.
struct SctpTurn(IpAddr, IpAddr);

static SCTP_BUSY: Mutex<BTreeSet<(IpAddr, IpAddr)>> = Mutex::new(BTreeSet::new());
static SCTP_FREED: Condvar = Condvar::new();

impl SctpTurn {
    fn wait(own: IpAddr, peer: IpAddr) -> Self {
        let busy = SCTP_BUSY.lock().unwrap_or_else(PoisonError::into_inner);
        let mut busy =
            SCTP_FREED.wait_while(busy, |busy| busy.contains(&(own, peer))).unwrap_or_else(PoisonError::into_inner);
        busy.insert((own, peer));
        Self(own, peer)
    }
}

impl Drop for SctpTurn {
    fn drop(&mut self) {
        SCTP_BUSY.lock().unwrap_or_else(PoisonError::into_inner).remove(&(self.0, self.1));
        SCTP_FREED.notify_all();
    }
}

/// Sends one HTTP request on its own connection, and returns the body of a 200 response.
fn http(request: &Request, request_line: &str, body: &[u8]) -> io::Result<String> {
    let mut stream = connect(request)?;
    let head = format!(
        "{request_line}\r\nHost: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        request.to,
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let malformed = || io::Error::other(format!("malformed HTTP response {:?}", response.get(..200)));
    let (head, body) = response.split_once("\r\n\r\n").ok_or_else(malformed)?;
    let status = head.lines().next().unwrap_or_default();
    if !status.contains(" 200 ") {
        return Err(io::Error::other(format!("HTTP status {status}")));
    }
    let length: usize = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok())
        .ok_or_else(malformed)?;
    if body.len() != length {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a shorter body than announced"));
    }
    Ok(body.to_owned())
}

/// Fetches a body of `bytes` bytes from the HTTP server at `to`, and sends a body of equal length.
pub fn exchange_large_bodies(namespace: &Namespace, to: SocketAddr, bytes: usize) -> Result<()> {
    namespace.run(|| {
        let request = Request::new(Transport::Http, to);
        let body = http(&request, &format!("GET /bytes/{bytes} HTTP/1.1"), &[]).context("fetching a large body")?;
        ensure!(
            body.len() == bytes && body.bytes().all(|byte| byte == b'x'),
            "the received body differs from the requested one"
        );
        let counted = http(&request, "POST /count HTTP/1.1", &vec![b'y'; bytes]).context("sending a large body")?;
        ensure!(counted == bytes.to_string(), "the server counted {counted} bytes of {bytes}");
        Ok(())
    })
}

/// A TCP connection that stays open while rules change.
#[derive(Debug)]
pub struct HeldConnection {
    stream: BufReader<TcpStream>,
    /// The answer to the first request on the connection.
    pub answer: Answer,
}

impl HeldConnection {
    /// Connects from `namespace` to the line server behind `to`.
    pub fn open(namespace: &Namespace, to: SocketAddr) -> Result<Self> {
        namespace.run(|| {
            let stream = connect(&Request::new(Transport::Tcp, to)).with_context(|| format!("connecting to {to}"))?;
            let mut stream = BufReader::new(stream);
            let answer = exchange_line(&mut stream, "who")?.parse()?;
            Ok(Self { stream, answer })
        })
    }

    /// Ends the connection with a reset, so that conntrack soon forgets it.
    pub fn reset(self) -> Result<()> {
        let stream = self.stream.into_inner();
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).context("asking for a reset")
    }

    /// Sends a line and expects that the server sends an equal line back. An error means that the
    /// connection is broken.
    pub fn check(&mut self) -> Result<()> {
        let line = format!("still there {}", fastrand::u64(..));
        let reply = exchange_line(&mut self.stream, &line)
            .with_context(|| format!("a connection held to {}", self.answer.server))?;
        ensure!(reply == line, "{} sent back {reply:?} for {line:?}", self.answer.server);
        Ok(())
    }
}
