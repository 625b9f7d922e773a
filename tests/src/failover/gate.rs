//! A TCP relay between a replica and its API server. The relay can refuse connections, or keep
//! connections open without forwarding bytes.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use socket2::SockRef;
use tokio::{
    io::copy_bidirectional,
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
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listening for a relay")?;
        let address = listener.local_addr()?;
        let (mode, carrying) = (watch::Sender::new(mode), watch::Sender::new(0));
        let accepting = tokio::spawn(accept(listener, server, mode.clone(), carrying.clone()));
        Ok(Self { address, mode, carrying, accepting })
    }

    /// Changes the mode. When this function returns and the mode is not [`Mode::Open`], the relay
    /// forwards no more bytes.
    pub async fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
        if mode != Mode::Open {
            // `wait_for` cannot fail, because `self` holds the sender.
            let _ = self.carrying.subscribe().wait_for(|carrying| *carrying == 0).await;
        }
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, mode: watch::Sender<Mode>, carrying: watch::Sender<usize>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(carry(client, server, mode.subscribe(), carrying.clone()));
    }
}

async fn carry(
    mut client: TcpStream,
    server: SocketAddr,
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
            _ = copy_bidirectional(&mut client, &mut server) => has_ended = true,
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
