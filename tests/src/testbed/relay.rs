//! A TCP relay on a machine.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context as _, Result};

use super::netns::Namespace;

/// Relays connections to `at` on a machine to `target`, until this process ends.
///
/// # Errors
/// The relay cannot listen, or a thread cannot be started.
pub fn start(machine: &Namespace, at: SocketAddr, target: SocketAddr) -> Result<()> {
    let listener = machine.run(|| TcpListener::bind(at).context("binding a relay"))?;
    let doorway = machine.doorway()?;
    let relay = move || -> Result<()> {
        // A socket belongs to the namespace of the thread that creates it.
        doorway.enter()?;
        for near in listener.incoming() {
            // The target may be stopped. Dropping the connection makes the client connect again.
            let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else { continue };
            let (near_too, far_too) = (near.try_clone()?, far.try_clone()?);
            thread::spawn(move || copy(near, far));
            thread::spawn(move || copy(far_too, near_too));
        }
        Ok(())
    };
    thread::Builder::new().name("relay".to_owned()).spawn(relay).context("starting a thread").map(drop)
}

/// Copies one direction until its end, and then shuts down that direction.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    // Errors mean that a socket is already closed.
    let _ = io::copy(&mut from, &mut to);
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}
