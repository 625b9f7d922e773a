//! How connections between the programs are made and accepted, if not over TCP.

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::{TryFutureExt as _, future::BoxFuture};
use hyper::Uri;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{UnixListener, lookup_host},
};
use tower::Service;

/// One end of a connection.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Makes and accepts connections, in place of TCP.
pub trait Carrier: fmt::Debug + Send + Sync {
    /// Connects to an address.
    fn connect(&self, to: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Io>>>;

    /// Finds the addresses of a name.
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;

    /// Listens on an address. Port 0 means any free port. Also returns the address with its port.
    /// Errors: nobody can listen on the address, or somebody does already.
    fn listen(&self, at: SocketAddr) -> io::Result<(Box<dyn Accept>, SocketAddr)>;
}

/// Accepts the connections to one address, until it is dropped.
pub trait Accept: Send {
    /// Returns the next connection and the address of its client, or wakes `cx` for it.
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn Io>, SocketAddr)>>;
}

/// The connections of a Unix socket come from this machine.
impl Accept for UnixListener {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn Io>, SocketAddr)>> {
        let (stream, _) = ready!(Self::poll_accept(self, cx))?;
        Poll::Ready(Ok((Box::new(stream), (Ipv4Addr::LOCALHOST, 0).into())))
    }
}

/// Finds the addresses of a name, as the host does if there is no other carrier than TCP.
/// Errors: the name has no address, or cannot be resolved at the moment.
pub async fn resolve(carrier: Option<&dyn Carrier>, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match carrier {
        Some(carrier) => carrier.resolve(host, port).await,
        None => Ok(lookup_host((host, port)).await?.collect()),
    }
}

/// Returns a connector for gRPC that connects to an address, whatever the URL is.
pub fn connector(
    carrier: Arc<dyn Carrier>,
    to: SocketAddr,
) -> impl Service<Uri, Response = TokioIo<Box<dyn Io>>, Error = io::Error, Future: Send> + Send + 'static {
    tower::service_fn(move |_| carrier.connect(to).map_ok(TokioIo::new))
}
