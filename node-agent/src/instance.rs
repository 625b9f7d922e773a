//! Ensures that only one agent programs a network namespace. An agent listens on an abstract Unix
//! socket, whose name is unique there. During an upgrade, the new agent waits until the kernel
//! closes the old agent's socket. Containers need no shared folder for it.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream as StdUnixStream},
    },
    time::Duration,
};

use rustix::process::geteuid;
use tokio::{io::AsyncReadExt as _, net::UnixStream};
use tracing::{info, warn};

const NAME: &[u8] = b"headgate-node-agent";

/// The pause before another attempt, if the agent cannot connect to the other agent's socket.
const PAUSE: Duration = Duration::from_millis(100);

/// Waits until no other agent programs the network namespace of the caller, and claims it until the
/// socket is dropped. Agents of other users do not count, because any user can create this socket:
/// the function then logs a warning and returns no claim. Errors: the system creates no socket.
pub(crate) async fn claim() -> io::Result<Option<UnixListener>> {
    let address = SocketAddr::from_abstract_name(NAME)?;
    let mut is_waiting = false;
    loop {
        match UnixListener::bind_addr(&address) {
            Ok(listener) => {
                if is_waiting {
                    info!("the other agent has ended");
                }
                return Ok(Some(listener));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
        let Ok(mut other) = connect(&address) else {
            // The other agent has just ended, or many programs are connected to it.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let owner = other.peer_cred()?;
        if is_foreign(owner.uid()) {
            warn!(
                user = owner.uid(),
                process = owner.pid(),
                "a process of another user has a socket with the name of this agent's; the agent runs without protection against a second agent"
            );
            return Ok(None);
        }
        if !std::mem::replace(&mut is_waiting, true) {
            info!(process = owner.pid(), "another agent programs this network namespace; waiting until it ends");
        }
        // The other agent sends nothing. The read ends when the kernel closes the socket.
        let _ = other.read(&mut [0]).await;
    }
}

/// Returns the process of the agent that programs the network namespace of the caller, if there is
/// one. The process is 0 if the caller cannot see it, as in another container. Agents of other
/// users do not count.
/// Errors: the system does not connect to the socket of the agent.
pub(crate) async fn running() -> io::Result<Option<i32>> {
    match connect(&SocketAddr::from_abstract_name(NAME)?) {
        Ok(stream) => {
            let owner = stream.peer_cred()?;
            Ok(owner.pid().filter(|_| !is_foreign(owner.uid())))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error),
    }
}

/// True for a user who is neither root nor the user of this process.
fn is_foreign(user: u32) -> bool {
    user != 0 && user != geteuid().as_raw()
}

fn connect(address: &SocketAddr) -> io::Result<UnixStream> {
    let stream = StdUnixStream::connect_addr(address)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_second_claim_waits_until_the_first_is_dropped() {
        // The name belongs to a network namespace, so the test needs a namespace of its own.
        if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).is_err() {
            panic!("this test needs CAP_SYS_ADMIN");
        }
        assert_eq!(running().await.unwrap(), None);
        let first = claim().await.unwrap();
        assert_eq!(running().await.unwrap(), Some(std::process::id().cast_signed()));
        let second = tokio::spawn(claim());
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!second.is_finished(), "both agents have the claim");
        drop(first);
        let second = tokio::time::timeout(Duration::from_secs(60), second).await.unwrap().unwrap().unwrap();
        drop(second);
        claim().await.unwrap();
    }

    /// Cleanup runs in a container beside that of the agent.
    #[tokio::test]
    async fn an_agent_in_another_container_is_process_0() {
        const NAME: &str = "instance::tests::an_agent_in_another_container_is_process_0";
        if std::env::var_os("IN_CONTAINER").is_some() {
            assert_eq!(running().await.unwrap(), Some(0));
            return;
        }
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let _claim = claim().await.unwrap();
        let status = std::process::Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", NAME])
            .env("IN_CONTAINER", "yes")
            .status()
            .unwrap();
        assert!(status.success());
    }
}
