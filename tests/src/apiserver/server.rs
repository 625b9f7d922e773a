//! The thread of the stand-in API server. The thread accepts connections. On request, the thread
//! stops listening, and listens again on the same port.

use std::{
    net::{SocketAddr, TcpListener as StdListener},
    sync::{Arc, mpsc as std_mpsc},
    thread,
};

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{Domain, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
};

use super::{
    Shared, StartError,
    connection::{ConnectionState, CountedStream},
    http::answer,
};
use crate::testbed::port::ReservedPort;

enum Control {
    Stop(std_mpsc::Sender<()>),
    Listen(StdListener, std_mpsc::Sender<std::io::Result<()>>),
}

/// The capacity of the queue of orders. Each caller waits until its order is executed, so the queue
/// is full only if 64 threads send orders at the same time.
const ORDERS: usize = 64;

/// The handle of the thread. Dropping it ends the thread.
pub(super) struct Server {
    /// The port. While the server is stopped, the port stays reserved and connections are refused.
    port: ReservedPort,
    control: Option<mpsc::Sender<Control>>,
    thread: Option<thread::JoinHandle<()>>,
}

fn failed(action: &'static str) -> impl FnOnce(std::io::Error) -> StartError {
    move |source| StartError { action, source }
}

impl Server {
    pub(super) fn start(shared: Arc<Shared>) -> Result<Self, StartError> {
        let port = ReservedPort::reserve().map_err(failed("reserve a port of 127.0.0.1"))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("make a runtime"))?;
        let (control, orders) = mpsc::channel(ORDERS);
        let work = move || runtime.block_on(serve(shared, orders));
        let thread =
            thread::Builder::new().name("stand-in-api".to_owned()).spawn(work).map_err(failed("start a thread"))?;
        let server = Self { port, control: Some(control), thread: Some(thread) };
        server.listen()?;
        Ok(server)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.port.address()
    }

    pub(super) fn listen(&self) -> Result<(), StartError> {
        let listener = open(self.port.address()).map_err(failed("listen on its port"))?;
        let (done, answer) = std_mpsc::channel();
        self.send(Control::Listen(listener, done));
        let taken = answer.recv().unwrap_or_else(|_| Err(std::io::Error::other("the server's thread has ended")));
        taken.map_err(failed("listen on its port"))
    }

    pub(super) fn stop(&self) {
        let (done, answer) = std_mpsc::channel();
        self.send(Control::Stop(done));
        // An error means that the thread has ended and all connections are closed.
        answer.recv().unwrap_or_default();
    }

    fn send(&self, order: Control) {
        if let Some(control) = &self.control
            && control.try_send(order).is_err()
        {
            tracing::warn!("the stand-in API server's thread accepts no orders");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.control.take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the stand-in API server's thread panicked");
        }
    }
}

fn open(address: SocketAddr) -> std::io::Result<StdListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(1_024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

async fn serve(shared: Arc<Shared>, mut orders: mpsc::Receiver<Control>) {
    let mut listener: Option<TcpListener> = None;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                None => return,
                Some(Control::Stop(done)) => {
                    listener = None;
                    connections.shutdown().await;
                    // `send` fails only if the caller no longer waits.
                    done.send(()).unwrap_or_default();
                }
                Some(Control::Listen(socket, done)) => {
                    let taken = TcpListener::from_std(socket).map(|taken| listener = Some(taken));
                    done.send(taken).unwrap_or_default();
                }
            },
            accepted = accept(listener.as_ref()) => match accepted {
                Ok(stream) => {
                    connections.spawn(serve_connection(shared.clone(), stream));
                }
                Err(error) => {
                    tracing::warn!(%error, "the stand-in API server could not accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> std::io::Result<TcpStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

async fn serve_connection(shared: Arc<Shared>, stream: TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "could not set TCP_NODELAY");
    }
    shared.counters.add_connection();
    let state = Arc::new(ConnectionState::default());
    let stream = CountedStream::new(stream, state.clone(), shared.counters.clone());
    let service = service_fn(move |request| answer(shared.clone(), state.clone(), request));
    let connection = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        // The client closed the connection, or a test cut it.
        tracing::debug!(%error, "a connection to the stand-in API server ended early");
    }
}
