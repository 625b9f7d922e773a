//! The network and its servers: a testbed without control plane and agents.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use super::client::{self, Outcome, Request};
use super::netns::Namespace;
use super::network::Network;
use super::server::Servers;

/// Machines with their servers, and a folder for files. The folder is kept when a test fails.
#[derive(Debug)]
pub struct Machines {
    // Fields are dropped in this order: sockets, then namespaces.
    _servers: Servers,
    network: Network,
    folder: Folder,
}

impl Machines {
    /// Creates the network, the servers and the folder.
    pub fn start() -> Result<Self> {
        let network = Network::create()?;
        let servers = Servers::start(&network)?;
        Ok(Self { _servers: servers, network, folder: Folder::create()? })
    }

    /// The namespace of a node, a pod, an outside client or the control plane's machine.
    pub fn machine(&self, name: &str) -> Result<&Namespace> {
        self.network.machine(name)
    }

    /// Sends one request from a machine.
    pub fn ask(&self, from: &str, request: &Request) -> Result<Outcome> {
        client::ask(self.machine(from)?, request)
    }

    /// The folder of logs and manifests.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Keeps the folder of logs and manifests when this value is dropped.
    pub fn keep_folder(&self) {
        self.folder.keep.store(true, Ordering::Relaxed);
    }

    /// The iptables lock file of `machine`. The file replaces /run/xtables.lock, which all machines
    /// would share.
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
            tempfile::Builder::new().prefix("headgate-testbed-").tempdir().context("creating a temporary folder")?;
        Ok(Self { path: folder.keep(), keep: AtomicBool::new(false) })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking() || self.keep.load(Ordering::Relaxed) {
            eprintln!("logs and manifests of the testbed are kept in {}", self.path.display());
        } else if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("warning: {} cannot be removed: {error}", self.path.display());
        }
    }
}
