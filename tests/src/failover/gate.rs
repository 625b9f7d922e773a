//! A TCP relay, for example between a replica and its API server. The relay can refuse connections,
//! keep connections open without forwarding bytes, or change bytes of the server.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// What the relay does with open and new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The relay forwards bytes.
    Open,
    /// The relay resets connections.
    Refusing,
    /// The relay accepts connections and forwards nothing, like a network that drops all packets.
    Silent,
}

/// Changes bytes that the server sends, before the relay forwards them.
pub type Edit = Arc<dyn Fn(&mut [u8]) + Send + Sync>;

/// The relay. Dropping it closes all connections.
#[derive(Debug)]
pub struct Gate {
    /// The address to which the replica connects.
    pub address: SocketAddr,
    mode: watch::Sender<Mode>,
    /// The number of connections on which the relay forwards bytes.
    carrying: watch::Sender<usize>,
    accepting: JoinHandle<()>,
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Gate {
    /// Starts a relay to `server` on a free loopback port.
    ///
    /// # Errors
    /// The relay cannot listen.
    pub async fn start(server: SocketAddr, mode: Mode) -> Result<Self> {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), server, mode, None).await
    }

    /// Starts a relay to `server` that listens on `listen`.
    ///
    /// # Errors
    /// The relay cannot listen.
    pub async fn start_at(listen: SocketAddr, server: SocketAddr, mode: Mode, edit: Option<Edit>) -> Result<Self> {
        let listener = TcpListener::bind(listen).await.context("listening for a relay")?;
        let address = listener.local_addr()?;
        let (mode, carrying) = (watch::Sender::new(mode), watch::Sender::new(0));
        let accepting = tokio::spawn(accept(listener, server, edit, mode.clone(), carrying.clone()));
        Ok(Self { address, mode, carrying, accepting })
    }

    /// Changes the mode. When this function returns and the mode is not [`Mode::Open`], the relay
    /// forwards no more bytes. If the relay has this mode already, its connections stay.
    pub async fn set(&self, mode: Mode) {
        self.mode.send_if_modified(|old| std::mem::replace(old, mode) != mode);
        if mode != Mode::Open {
            // `wait_for` cannot fail, because `self` holds the sender.
            let _ = self.carrying.subscribe().wait_for(|carrying| *carrying == 0).await;
        }
    }
}

async fn accept(
    listener: TcpListener,
    server: SocketAddr,
    edit: Option<Edit>,
    mode: watch::Sender<Mode>,
    carrying: watch::Sender<usize>,
) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(carry(client, server, edit.clone(), mode.subscribe(), carrying.clone()));
    }
}

async fn carry(
    mut client: TcpStream,
    server: SocketAddr,
    edit: Option<Edit>,
    mut mode: watch::Receiver<Mode>,
    carrying: watch::Sender<usize>,
) {
    // The connection is counted before the mode is read, so that `Gate::set` waits for the
    // connection.
    carrying.send_modify(|count| *count += 1);
    let mut has_ended = false;
    if *mode.borrow_and_update() == Mode::Open
        && let Ok(mut server) = TcpStream::connect(server).await
    {
        tokio::select! {
            biased;
            _ = mode.changed() => {}
            () = forward(&mut client, &mut server, edit) => has_ended = true,
        }
    }
    carrying.send_modify(|count| *count -= 1);
    if has_ended {
        return;
    }
    // The relay never forwards bytes on a connection that was silent. When the mode changes, the
    // relay resets this connection.
    while *mode.borrow_and_update() == Mode::Silent {
        if mode.changed().await.is_err() {
            break;
        }
    }
    // If `set_linger` fails, the connection ends without a reset.
    let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
}

/// Forwards bytes until a side closes the connection.
async fn forward(client: &mut TcpStream, server: &mut TcpStream, edit: Option<Edit>) {
    // An error means that a side has closed the connection.
    let Some(edit) = edit else { return drop(copy_bidirectional(client, server).await) };
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.split(), server.split());
    let edited = async {
        let mut bytes = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from_server.read(&mut bytes).await {
            edit(&mut bytes[..length]);
            if to_client.write_all(&bytes[..length]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = edited => {}
        _ = copy(&mut from_client, &mut to_server) => {}
    }
}
