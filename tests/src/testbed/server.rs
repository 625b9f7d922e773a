//! The servers in pods and on nodes. Each server answers with its name, the port at which it was
//! reached, and the client's address as the server saw it.
//!
//! One thread serves a whole testbed. A socket belongs to the namespace in which it was created.
//! The thread therefore enters each namespace once to open its listeners, and then serves all
//! listeners.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::oneshot;

use super::client::Answer;
use super::network::Network;
use super::plan::{self, Family, HTTP_PORT, LINE_PORT, NODES, SECOND_LINE_PORT};
use super::sctp::{self, Chunk, Packet};

const LINE_PORTS: [u16; 2] = [LINE_PORT, SECOND_LINE_PORT];
/// Longest datagram that IP can carry, rounded up.
const MAX_DATAGRAM_BYTES: usize = 65_536;

/// All servers of a testbed. The servers end when this value is dropped.
#[derive(Debug)]
pub(super) struct Servers {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Servers {
    /// Opens the listeners of every pod and node, and serves them.
    pub(super) fn start(network: &Network) -> Result<Self> {
        let mut machines = Vec::new();
        for name in NODES.iter().flat_map(|node| node.pods.iter().copied().chain([node.name])) {
            machines.push((name, network.machine(name)?.doorway()?));
        }
        let (stop, stopped) = oneshot::channel();
        let (report, opened) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("servers".to_owned())
            .spawn(move || {
                let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(report.send(Err(error.into()))),
                };
                runtime.block_on(async {
                    let result = machines.iter().try_for_each(|(name, doorway)| {
                        doorway.enter()?;
                        open(name).with_context(|| format!("opening the servers of {name}"))
                    });
                    // Close the handles, since an open handle keeps its namespace alive.
                    drop(machines);
                    if report.send(result).is_ok() {
                        // Dropping the sender is the request to stop, so an error is expected.
                        let _ = stopped.await;
                    }
                });
            })
            .context("starting the servers' thread")?;
        opened.recv().context("the servers' thread ended before it had opened anything")??;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("warning: the thread of the testbed's servers panicked");
        }
    }
}

/// Opens the servers of one machine. The thread must be in the machine's namespace.
fn open(name: &'static str) -> Result<()> {
    let addresses = plan::address(name).context("the plan has no address")?;
    for address in addresses.both() {
        for port in LINE_PORTS {
            tokio::spawn(accept(listen(address, port)?, move |stream| serve_lines(name, stream)));
            let datagrams = std::net::UdpSocket::bind((address, port))?;
            datagrams.set_nonblocking(true)?;
            tokio::spawn(serve_datagrams(name, UdpSocket::from_std(datagrams)?));
        }
        tokio::spawn(accept(listen(address, HTTP_PORT)?, move |stream| serve_http(name, stream)));
        let raw = sctp::raw_socket(address)?;
        raw.set_nonblocking(true)?;
        tokio::spawn(serve_sctp(name, address, UdpSocket::from_std(raw)?));
    }
    Ok(())
}

fn listen(address: IpAddr, port: u16) -> Result<TcpListener> {
    let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(address, port).into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket.into())?)
}

async fn accept<F, S>(listener: TcpListener, serve: F)
where
    F: Fn(TcpStream) -> S,
    S: Future<Output = std::io::Result<()>> + Send + 'static,
{
    loop {
        match listener.accept().await {
            // Errors of a connection are ignored, because the client reports them.
            Ok((stream, _)) => drop(tokio::spawn(serve(stream))),
            Err(error) => {
                eprintln!("warning: a test server cannot accept: {error}");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

/// Serves the line protocol: replies to `who` with the [`Answer`], and echoes any other line.
async fn serve_lines(name: &'static str, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let answer = Answer::new(name, stream.local_addr()?.port(), stream.peer_addr()?).to_string();
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Some(line) = lines.next_line().await? {
        let reply = if line == "who" { &answer } else { &line };
        writer.write_all(format!("{reply}\n").as_bytes()).await?;
    }
    Ok(())
}

/// Replies to each datagram with the [`Answer`], padded with spaces to the length of the request.
async fn serve_datagrams(name: &'static str, socket: UdpSocket) -> std::io::Result<()> {
    let port = socket.local_addr()?.port();
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    loop {
        // Errors are ICMP messages about earlier replies whose clients have closed their sockets.
        let Ok((length, source)) = socket.recv_from(&mut buffer).await else { continue };
        let answer = Answer::new(name, port, source).to_string();
        let _ = socket.send_to(format!("{answer:length$}").as_bytes(), source).await;
    }
}

async fn serve_sctp(name: &'static str, own: IpAddr, socket: UdpSocket) -> std::io::Result<()> {
    let family = Family::of(own);
    let mut buffer = [0; 2048];
    loop {
        let Ok((length, source)) = socket.recv_from(&mut buffer).await else { continue };
        let Some(request) = Packet::decode(sctp::payload(family, &buffer[..length])) else { continue };
        let Chunk::Init { initiate_tag } = request.chunk else { continue };
        let chunk = if LINE_PORTS.contains(&request.destination_port) {
            let seen = SocketAddr::new(source.ip(), request.source_port);
            let answer = Answer::new(name, request.destination_port, seen).to_string();
            Chunk::InitAck { initiate_tag: fastrand::u32(1..), cookie: answer.into_bytes() }
        } else {
            Chunk::Abort
        };
        let reply = Packet {
            source_port: request.destination_port,
            destination_port: request.source_port,
            verification_tag: initiate_tag,
            chunk,
        };
        let _ = socket.send_to(&reply.encode(), SocketAddr::new(source.ip(), 0)).await;
    }
}

/// Serves HTTP/1.1: `GET /` returns the [`Answer`], `GET /bytes/N` returns N bytes, and
/// `POST /count` returns the length of the request's body.
async fn serve_http(name: &'static str, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let answer = Answer::new(name, stream.local_addr()?.port(), stream.peer_addr()?).to_string();
    let service = service_fn(move |request| respond(answer.clone(), request));
    let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    connection.await.map_err(std::io::Error::other)
}

async fn respond(
    answer: String,
    request: hyper::Request<Incoming>,
) -> Result<hyper::Response<Full<Bytes>>, Infallible> {
    let plain = |status: StatusCode, body: Bytes| {
        let mut response = hyper::Response::new(Full::new(body));
        *response.status_mut() = status;
        response
    };
    let path = request.uri().path().to_owned();
    let length = path.strip_prefix("/bytes/").and_then(|length| length.parse::<usize>().ok());
    Ok(match (request.method(), path.as_str(), length) {
        (&Method::GET, "/", _) => plain(StatusCode::OK, answer.into()),
        (&Method::GET, _, Some(length)) => plain(StatusCode::OK, vec![b'x'; length].into()),
        (&Method::POST, "/count", _) => match request.into_body().collect().await {
            Ok(body) => plain(StatusCode::OK, body.to_bytes().len().to_string().into()),
            Err(error) => plain(StatusCode::BAD_REQUEST, error.to_string().into()),
        },
        _ => plain(StatusCode::NOT_FOUND, Bytes::new()),
    })
}
