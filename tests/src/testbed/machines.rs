//! The network with its servers: a testbed without a control plane and agents.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use super::client::{self, Outcome, Request};
use super::netns::Namespace;
use super::network::Network;
use super::server::Servers;

/// Machines, servers on all of them, and a folder for files, which is kept when a test fails.
#[derive(Debug)]
pub struct Machines {
    // Dropped in this order: sockets, then namespaces.
    _servers: Servers,
    network: Network,
    folder: Folder,
}

impl Machines {
    /// Builds everything anew.
    pub fn start() -> Result<Self> {
        let network = Network::create()?;
        let servers = Servers::start(&network)?;
        Ok(Self { _servers: servers, network, folder: Folder::create()? })
    }

    /// Namespace of a node, pod, outside client or the control plane's machine.
    pub fn machine(&self, name: &str) -> Result<&Namespace> {
        self.network.machine(name)
    }

    /// Asks once from a machine.
    pub fn ask(&self, from: &str, request: &Request) -> Result<Outcome> {
        client::ask(self.machine(from)?, request)
    }

    /// Where logs and manifests are.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Keeps logs and manifests, as a failing test does.
    pub fn keep_folder(&self) {
        self.folder.keep.store(true, Ordering::Relaxed);
    }

    /// Lock file that programs on `machine` which write iptables rules share in place of
    /// /run/xtables.lock, which all machines would.
    pub fn xtables_lock(&self, machine: &str) -> PathBuf {
        self.folder.path.join(format!("{machine}.xtables.lock"))
    }
}

/// A temporary folder that stays when the test that owns it panics.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    keep: AtomicBool,
}

impl Folder {
    fn create() -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("headgate-testbed-").tempdir().context("making a temporary folder")?;
        Ok(Self { path: folder.keep(), keep: AtomicBool::new(false) })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking() || self.keep.load(Ordering::Relaxed) {
            eprintln!("logs and manifests of the testbed are kept in {}", self.path.display());
        } else if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("warning: {} stays behind: {error}", self.path.display());
        }
    }
}
