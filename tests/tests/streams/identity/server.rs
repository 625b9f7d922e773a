//! A control plane in the test's process, with files that the test replaces.

use std::{ops::Deref, path::PathBuf, time::Duration};

use headgate_control_plane::{
    model::Sink as _,
    serve::{Security, Settings},
};
use tempfile::TempDir;

use super::authority::{Authority, Pair, load};
pub(crate) use crate::client::{GUARD, eventually};
use crate::replica::{Replica, service};

pub(crate) struct Server {
    folder: TempDir,
    replica: Replica,
}

impl Deref for Server {
    type Target = Replica;

    fn deref(&self) -> &Replica {
        &self.replica
    }
}

impl Server {
    /// Starts a server that trusts a new authority.
    pub(crate) async fn of_new_authority() -> (Authority, Self) {
        let authority = Authority::new("authority");
        let server = Self::start(&authority).await;
        (authority, server)
    }

    /// Starts a server that trusts `authority`. Its own certificate, for 127.0.0.1, comes from the
    /// same authority.
    pub(crate) async fn start(authority: &Authority) -> Self {
        Self::start_with(&authority.server(|_| {}), authority, Settings::default()).await
    }

    pub(crate) async fn start_with(own: &Pair, clients: &Authority, settings: Settings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        own.write(folder.path(), &[clients]);
        Self::in_folder(folder, settings).await
    }

    /// Starts a server with the TLS files in `folder`.
    pub(crate) async fn in_folder(folder: TempDir, settings: Settings) -> Self {
        let security = Security::Tls(load(folder.path()));
        let settings = Settings { drain_grace: Duration::from_millis(100), ..settings };
        let server = Self { folder, replica: Replica::start_with(settings, security).await };
        server.store.synced();
        server.put(1);
        server
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.running.local_addr)
    }

    /// Commits a Service.
    pub(crate) fn put(&self, number: u8) {
        self.put_at(Some(number.into()), [service(number.into(), 80)]);
    }

    pub(crate) async fn stop(self) {
        self.replica.running.stop().await;
    }

    pub(crate) async fn until_metric(&self, sample: &str, value: u64) {
        eventually(sample, || async { self.metric(sample) == value }).await;
    }
}
