//! A TCP relay between a replica and its API server, which can refuse connections or fall silent.

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

/// What the relay does with connections, open ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It carries them.
    Open,
    /// It resets them.
    Refusing,
    /// It accepts them and carries nothing, as a network that drops every packet.
    Silent,
}

/// The relay. Dropping it closes everything.
#[derive(Debug)]
pub struct Gate {
    /// Where the replica connects.
    pub address: SocketAddr,
    mode: watch::Sender<Mode>,
    /// Connections that carry bytes.
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
    /// When there is no port.
    pub async fn start(server: SocketAddr, mode: Mode) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listening for a relay")?;
        let address = listener.local_addr()?;
        let (mode, carrying) = (watch::Sender::new(mode), watch::Sender::new(0));
        let accepting = tokio::spawn(accept(listener, server, mode.clone(), carrying.clone()));
        Ok(Self { address, mode, carrying, accepting })
    }

    /// Changes what it does from now on. Unless it opens, nothing more is carried when this
    /// returns.
    pub async fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
        if mode != Mode::Open {
            // The sender is ours: this cannot fail.
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
    // Counted before the look at the mode, so that a change of it waits for this connection.
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
    // A silent connection never speaks again: a network that comes back knows it no more.
    while *mode.borrow_and_update() == Mode::Silent {
        if mode.changed().await.is_err() {
            break;
        }
    }
    // A reset that cannot be had becomes an end of file, which ends the connection as well.
    let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
}
