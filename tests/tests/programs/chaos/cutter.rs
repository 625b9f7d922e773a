//! A TCP relay in front of a replica. The relay cuts connections at any byte.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// How one connection ends.
#[derive(Debug, Clone, Copy)]
struct Fate {
    /// The relay cuts the connection after this many bytes in both directions together. With
    /// `None`, the relay cuts the connection only when [`Cutter::cut_all`] or
    /// [`Cutter::stop_cutting`] is called.
    after_bytes: Option<u64>,
    /// Whether the relay cuts the connection with a TCP reset. If false, both sides see an end of
    /// file, possibly in the middle of a message.
    resets: bool,
}

/// The state that the relay's tasks share.
struct Relay {
    target: Mutex<Option<SocketAddr>>,
    rng: Mutex<Rng>,
    is_calm: AtomicBool,
    cut_all: watch::Sender<u64>,
    connections: AtomicU64,
    cuts: AtomicU64,
}

/// The relay. Its address stays the same when its target changes. Dropping the relay closes all its
/// connections.
pub(crate) struct Cutter {
    pub(crate) address: SocketAddr,
    relay: Arc<Relay>,
    accepting: JoinHandle<()>,
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.accepting.abort();
        self.relay.cut();
    }
}

impl Cutter {
    /// Starts a relay without a target. `seed` decides how connections end.
    pub(crate) async fn start(seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let relay = Arc::new(Relay {
            target: Mutex::default(),
            rng: Mutex::new(Rng::with_seed(seed)),
            is_calm: AtomicBool::new(false),
            cut_all: watch::channel(0).0,
            connections: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&relay)));
        Self { address, relay, accepting }
    }

    /// Forwards new connections to `target`.
    pub(crate) fn forward_to(&self, target: SocketAddr) {
        *self.relay.target.lock().unwrap() = Some(target);
    }

    /// Cuts every open connection.
    pub(crate) fn cut_all(&self) {
        self.relay.cut();
    }

    /// Stops cutting new connections. Cuts all current connections, because some of them would
    /// otherwise be cut later.
    pub(crate) fn stop_cutting(&self) {
        self.relay.is_calm.store(true, Ordering::SeqCst);
        self.relay.cut();
    }

    /// The number of connections that reached the target.
    pub(crate) fn connections(&self) -> u64 {
        self.relay.connections.load(Ordering::SeqCst)
    }

    /// The number of connections that the relay cut.
    pub(crate) fn cuts(&self) -> u64 {
        self.relay.cuts.load(Ordering::SeqCst)
    }
}

impl Relay {
    fn cut(&self) {
        self.cut_all.send_modify(|cuts| *cuts += 1);
    }

    /// Draws at random how a connection ends. The upper limit of the number of bytes is a random
    /// power of two, so that handshakes, snapshots and batches are all cut.
    fn draw(&self) -> Fate {
        let mut rng = self.rng.lock().unwrap();
        let is_cut_early = rng.f32() < 0.6 && !self.is_calm.load(Ordering::SeqCst);
        let bound = 1 << rng.u32(4..18);
        Fate { after_bytes: is_cut_early.then(|| rng.u64(0..bound)), resets: rng.bool() }
    }
}

async fn accept(listener: TcpListener, relay: Arc<Relay>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (relay, fate) = (Arc::clone(&relay), relay.draw());
        tokio::spawn(async move {
            let target = *relay.target.lock().unwrap();
            let Some(target) = target else { return };
            let Ok(server) = TcpStream::connect(target).await else { return };
            relay.connections.fetch_add(1, Ordering::SeqCst);
            if relay_bytes(client, server, fate, relay.cut_all.subscribe()).await {
                relay.cuts.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
}

/// Copies bytes in both directions until one side closes the connection or the relay cuts it.
/// Returns whether the relay cut the connection.
async fn relay_bytes(
    mut client: TcpStream,
    mut server: TcpStream,
    fate: Fate,
    mut cut_all: watch::Receiver<u64>,
) -> bool {
    let (mut up, mut down) = (vec![0; 16 * 1024], vec![0; 16 * 1024]);
    let mut left = fate.after_bytes.unwrap_or(u64::MAX);
    let is_cut = loop {
        let (read, bytes, to) = tokio::select! {
            read = client.read(&mut up) => (read, &up, &mut server),
            read = server.read(&mut down) => (read, &down, &mut client),
            _ = cut_all.changed() => break true,
        };
        let Ok(read @ 1..) = read else { break false };
        let passed = usize::try_from(left).unwrap_or(usize::MAX).min(read);
        if to.write_all(&bytes[..passed]).await.is_err() {
            break false;
        }
        left -= passed as u64;
        if left == 0 {
            break true;
        }
    };
    if is_cut && fate.resets {
        for socket in [&client, &server] {
            // If this call fails, the connection ends by an end of file instead of a reset.
            let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
        }
    }
    is_cut
}
