//! The sockets of the stand-in API server. A runtime of its own serves them while the server runs.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::{Builder, Runtime},
};

use super::{http::answer, state::Shared};
use crate::testbed::port::ReservedPort;

/// The port, and the runtime that serves it. While the server is stopped, the port stays reserved
/// and connections are refused.
#[derive(Debug)]
pub(super) struct Server {
    /// `None` for a server that only its own process can call.
    port: Option<ReservedPort>,
    running: Mutex<Option<Runtime>>,
}

impl Server {
    pub(super) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let server = Self { port: Some(ReservedPort::reserve()?), running: Mutex::new(None) };
        server.listen(shared)?;
        Ok(server)
    }

    /// A server without a port.
    pub(super) fn without_port() -> Self {
        Self { port: None, running: Mutex::new(None) }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.port.as_ref().map_or(SocketAddr::from(([0; 4], 0)), ReservedPort::address)
    }

    /// Listens in the calling thread's network namespace.
    pub(super) fn listen(&self, shared: &Arc<Shared>) -> io::Result<()> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&self.address().into())?;
        socket.listen(1_024)?;
        socket.set_nonblocking(true)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("stand-in-api").enable_all().build()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(socket.into())?
        };
        runtime.spawn(accept(shared.clone(), listener));
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(runtime);
        Ok(())
    }

    /// Closes all sockets.
    pub(super) fn stop(&self) {
        let runtime = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread of a runtime must not wait for the end of another runtime, so a thread of its
        // own does. The sockets are closed when it ends.
        let waiting = std::thread::spawn(move || drop(runtime));
        if waiting.join().is_err() {
            tracing::error!("the stand-in API server's thread panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve_connection(shared.clone(), stream));
            }
            Err(error) => {
                tracing::warn!(%error, "the stand-in API server could not accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
    }
}

async fn serve_connection(shared: Arc<Shared>, stream: TcpStream) {
    // The second handle sets the linger time when a test cuts the connection.
    let socket = match stream.set_nodelay(true).and_then(|()| SockRef::from(&stream).try_clone()) {
        Ok(socket) => Some(Arc::new(socket)),
        Err(error) => return tracing::warn!(%error, "the stand-in API server could not serve a connection"),
    };
    let service = service_fn(move |request| answer(shared.clone(), socket.clone(), request));
    let connection = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        // The client closed the connection, or a test cut it.
        tracing::debug!(%error, "a connection to the stand-in API server ended early");
    }
}
