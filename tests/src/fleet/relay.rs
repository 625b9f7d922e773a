//! A relay between a replica and its API server that can hold back the API server's bytes, like a
//! slow load balancer.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};

use crate::testbed::netns::{Doorway, Namespace};

/// Whether the relay holds back the API server's bytes.
#[derive(Debug, Default)]
struct Gate {
    is_held: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, is_held: bool) {
        *self.is_held.lock().unwrap_or_else(PoisonError::into_inner) = is_held;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut is_held = self.is_held.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_held {
            is_held = self.changed.wait(is_held).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A running relay. Dropping it releases all bytes and stops accepting connections. Open
/// connections continue until one side closes them.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    gate: Arc<Gate>,
    doorway: Doorway,
    is_over: Arc<Mutex<bool>>,
}

impl Relay {
    /// Starts a relay to `target` on a free port of the namespace's loopback address.
    ///
    /// # Errors
    /// The relay cannot listen, or a thread cannot be started.
    pub fn start(namespace: &Namespace, target: SocketAddr) -> Result<Self> {
        Self::start_at(namespace, (Ipv4Addr::LOCALHOST, 0).into(), target)
    }

    /// Starts a relay to `target` at this address of the namespace.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub fn start_at(namespace: &Namespace, at: SocketAddr, target: SocketAddr) -> Result<Self> {
        let listener = namespace.run(|| TcpListener::bind(at).context("binding a relay"))?;
        let address = listener.local_addr()?;
        let (gate, is_over) = (Arc::new(Gate::default()), Arc::new(Mutex::new(false)));
        let (doorway, shared, over) = (namespace.doorway()?, Arc::clone(&gate), Arc::clone(&is_over));
        let accept = move || {
            // A socket belongs to the namespace of the thread that creates it.
            let accepted = doorway.enter().and_then(|()| accept(&listener, target, &shared, &over));
            if let Err(error) = accepted {
                eprintln!("warning: a relay ends: {error:#}");
            }
        };
        std::thread::Builder::new().name("relay".to_owned()).spawn(accept).context("starting a thread")?;
        Ok(Self { address, gate, doorway: namespace.doorway()?, is_over })
    }

    /// The address to which replicas connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Holds back the API server's bytes.
    pub fn hold(&self) {
        self.gate.set(true);
    }

    /// Forwards the API server's bytes again.
    pub fn release(&self) {
        self.gate.set(false);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.gate.set(false);
        // A connection from the namespace wakes the accepting thread.
        let address = self.address;
        let knocked = std::thread::scope(|scope| {
            let knock = || self.doorway.enter().is_ok() && TcpStream::connect(address).is_ok();
            scope.spawn(knock).join().unwrap_or_default()
        });
        if !knocked {
            eprintln!("warning: a relay's thread cannot be ended");
        }
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, gate: &Arc<Gate>, is_over: &Mutex<bool>) -> Result<()> {
    loop {
        let (near, _) = listener.accept().context("accepting")?;
        if *is_over.lock().unwrap_or_else(PoisonError::into_inner) {
            return Ok(());
        }
        // The API server may be stopped. Dropping the connection makes the replica connect again
        // later.
        let Ok(far) = TcpStream::connect(target) else { continue };
        let (near_too, far_too) = (near.try_clone()?, far.try_clone()?);
        let gate = Arc::clone(gate);
        std::thread::Builder::new().name("relay-up".to_owned()).spawn(move || copy(near, far, &Gate::default()))?;
        std::thread::Builder::new().name("relay-down".to_owned()).spawn(move || copy(far_too, near_too, &gate))?;
    }
}

/// Copies one direction until its end, and then shuts down that direction.
fn copy(mut from: TcpStream, mut to: TcpStream, gate: &Gate) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        gate.pass();
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // Errors mean that a socket is already closed.
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}
