//! The pods of the honest tenant: servers that say which of them answers.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tokio::{io::AsyncWriteExt as _, net::TcpListener};
use tokio_util::sync::CancellationToken;

use crate::testbed::netns::Namespace;

/// The port at which all pods listen.
pub(super) const POD_PORT: u16 = 8080;

/// The running servers. Dropping this value ends them.
pub(super) struct PodServers {
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    accepted: Arc<[Mutex<Vec<Instant>>]>,
}

impl PodServers {
    /// Starts a server at each address in `namespace`. A server writes its number as one byte to
    /// each connection, and closes the connection.
    ///
    /// # Errors
    /// A server cannot listen.
    pub(super) fn start(namespace: &Namespace, addresses: &[Ipv4Addr]) -> Result<Self> {
        let listeners = namespace.run(|| {
            let listen = |address: &Ipv4Addr| {
                let listener = std::net::TcpListener::bind((*address, POD_PORT))?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            };
            addresses.iter().map(listen).collect::<Result<Vec<_>>>().context("starting the servers of pods")
        })?;
        let accepted: Arc<[Mutex<Vec<Instant>>]> = addresses.iter().map(|_| Mutex::default()).collect();
        let (stop, runtime) = (
            CancellationToken::new(),
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting a runtime")?,
        );
        let (stops, times) = (stop.clone(), Arc::clone(&accepted));
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                for (number, listener) in (0_u8..).zip(listeners) {
                    tokio::spawn(serve(number, listener, Arc::clone(&times)));
                }
                stops.cancelled().await;
            });
        });
        Ok(Self { stop, thread: Some(thread), accepted })
    }

    /// When the server with this number has accepted connections since the last call.
    pub(super) fn take_accepted(&self, number: usize) -> Vec<Instant> {
        std::mem::take(&mut *self.accepted[number].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for PodServers {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("warning: the servers of the pods have failed");
        }
    }
}

async fn serve(number: u8, listener: std::net::TcpListener, accepted: Arc<[Mutex<Vec<Instant>>]>) {
    // The conversion fails only outside of a runtime.
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            // File descriptors ran out, which an attack of this process may cause for a moment.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        accepted[usize::from(number)].lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        // A client that has gone needs no answer.
        let _ = stream.write_all(&[number]).await;
    }
}
