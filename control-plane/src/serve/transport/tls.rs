//! TLS with PEM files that may change while the control plane runs.
//!
//! At the start, it is an error if files are missing or malformed or do not match each other.
//! Later, the last good files stay in use until all files are good again. A reload does not affect
//! open connections: each handshake uses the configuration that is current when it begins.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use headgate_tls::{FileError, Files, Loaded, Material, Reloader, Side, date};
use notify::{
    EventKind, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use rustls::{
    ServerConfig,
    crypto::ring,
    server::{ClientCertVerifierBuilder, NoServerSessionStorage, WebPkiClientVerifier},
    sign::SingleCertAndKey,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// How often the files are read without a notification of the file system. Notifications can be
/// lost, and the targets of symbolic links into other folders cause no notifications.
const POLL: Duration = Duration::from_secs(30);

/// After a notification, the files are read once there was no further notification for this time.
const QUIET: Duration = Duration::from_millis(200);

/// The longest time to wait for [`QUIET`] while notifications continue.
const LONGEST_SETTLING: Duration = Duration::from_secs(2);

/// How long to wait before files with an error are read again after a notification. The error is
/// logged only if it remains, because certificate and key may be written one after the other.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The number of session tickets that a client receives in a handshake. One ticket is enough,
/// because a client has one connection at a time.
const TICKETS: usize = 1;

/// How connections are secured.
#[derive(Clone)]
pub enum Security {
    /// Without TLS (`--insecure-loopback`). [`crate::options::Options::security`] checks that the
    /// address is allowed without TLS.
    Plaintext,
    /// TLS with client certificates.
    Tls(Arc<ServerTls>),
}

/// The server's side of TLS, versions 1.2 and 1.3.
#[derive(Debug)]
pub struct ServerTls {
    files: Files,
    reloader: Mutex<Reloader<Configs>>,
    current: ArcSwap<Loaded<Configs>>,
}

/// The configurations of the two listeners.
#[derive(Debug)]
struct Configs {
    /// HTTP/2. Every client must have a certificate.
    streams: Arc<ServerConfig>,
    /// HTTP/1.1, without sessions. A client may have a certificate.
    enrolment: Arc<ServerConfig>,
}

impl ServerTls {
    /// Reads the files of `--tls-cert`, `--tls-key` and `--tls-client-ca`.
    ///
    /// # Errors
    ///
    /// The first error in the files. A retry helps only after the files have changed.
    pub fn load(cert: PathBuf, key: PathBuf, client_ca: PathBuf) -> Result<Arc<Self>, FileError> {
        let files = Files { side: Side::Server, cert, key, ca: client_ca };
        let mut reloader = Reloader::new(files.clone(), configs);
        let current = ArcSwap::new(reloader.load(SystemTime::now())?);
        Ok(Arc::new(Self { files, reloader: Mutex::new(reloader), current }))
    }

    /// Returns the paths of the files.
    #[must_use]
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the configuration for the next handshake.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.load().config.streams)
    }

    /// Returns the configuration for the next handshake of the enrolment listener.
    pub(crate) fn enrolment_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.load().config.enrolment)
    }

    /// Reloads the files whenever they change, until `shutdown` is cancelled.
    pub(crate) async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.follow_every(POLL, &metrics)).await;
    }

    async fn follow_every(self: &Arc<Self>, poll: Duration, metrics: &Metrics) {
        self.report(metrics);
        let (sender, mut notices) = mpsc::channel(1);
        let watcher = watch(&self.files, sender);
        let _watcher = watcher.inspect_err(|error| {
            let seconds = poll.as_secs();
            tracing::warn!(
                "TLS files are checked for changes only every {seconds} seconds, because they cannot be watched: {error}"
            );
        });
        let mut problem = None;
        // The first pass finds changes between the first reading and the beginning of the watch.
        let mut is_notified = true;
        loop {
            let mut result = self.reload().await;
            if result.is_err() && is_notified {
                sleep(RETRY_AFTER).await;
                result = self.reload().await;
            }
            match result {
                Ok(is_new) => {
                    if is_new || problem.take().is_some() {
                        metrics.count_tls_reload("success");
                        self.report(metrics);
                    }
                    problem = None;
                }
                Err(error) => {
                    let text = error.to_string();
                    if problem.as_ref() != Some(&text) {
                        metrics.count_tls_reload("failure");
                        tracing::error!("{text}. The earlier files stay in use");
                        problem = Some(text);
                    }
                }
            }
            // Without a watcher the channel is closed, and only the timeout ends the wait.
            let notified = timeout(poll, async {
                match notices.recv().await {
                    Some(()) => settled(&mut notices).await,
                    None => std::future::pending().await,
                }
            });
            is_notified = notified.await.is_ok();
        }
    }

    /// Reads the files. Returns true if their contents are new.
    async fn reload(self: &Arc<Self>) -> Result<bool, FileError> {
        let tls = Arc::clone(self);
        let load = move || {
            let mut reloader = tls.reloader.lock().unwrap_or_else(PoisonError::into_inner);
            let loaded = reloader.load(SystemTime::now())?;
            let is_new = !Arc::ptr_eq(&loaded, &tls.current.load());
            tls.current.store(loaded);
            Ok(is_new)
        };
        match tokio::task::spawn_blocking(load).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "TLS files could not be read because of a defect");
                Ok(false)
            }
        }
    }

    /// Reports the current files in the log and the metrics.
    fn report(&self, metrics: &Metrics) {
        let current = self.current.load();
        metrics.set_tls_not_after(&current);
        let (not_after, authorities) = (date(current.validity.not_after), date(current.authorities_not_after));
        tracing::info!(cert = %self.files.cert.display(), not_after, authorities_not_after = authorities, "TLS files in use");
    }
}

/// Returns configurations with new keys for session tickets. So no session of an earlier
/// configuration can be resumed, and each client is verified against the present authorities. A
/// session, including the client certificate, is stored only in the client's ticket, and needs no
/// memory of the server.
fn configs(material: &Material) -> Result<Configs, rustls::Error> {
    let provider = Arc::new(ring::default_provider());
    let roots = Arc::new(material.authorities.clone());
    let own = Arc::new(SingleCertAndKey::from(Arc::clone(&material.own)));
    let verifier = || WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let config = |verifier: ClientCertVerifierBuilder, protocol: &str| {
        let verifier = verifier.build().map_err(|error| rustls::Error::General(error.to_string()))?;
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(own.clone());
        config.alpn_protocols = vec![protocol.into()];
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok::<_, rustls::Error>(config)
    };
    let mut streams = config(verifier(), "h2")?;
    streams.ticketer = ring::Ticketer::new()?;
    streams.send_tls13_tickets = TICKETS;
    let enrolment = config(verifier().allow_unauthenticated(), "http/1.1")?;
    Ok(Configs { streams: Arc::new(streams), enrolment: Arc::new(enrolment) })
}

/// Waits until there was no notification for [`QUIET`], for at most [`LONGEST_SETTLING`].
async fn settled(notices: &mut mpsc::Receiver<()>) {
    let deadline = Instant::now() + LONGEST_SETTLING;
    while Instant::now() < deadline && timeout(QUIET, notices.recv()).await.is_ok_and(|notice| notice.is_some()) {}
}

/// Watches the folders of the files. Watching the files themselves would miss changes: files are
/// often replaced by new files, and in a mounted Secret only the link `..data` is replaced.
fn watch(files: &Files, sender: mpsc::Sender<()>) -> notify::Result<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let is_read = |event: &notify::Event| match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
            EventKind::Access(_) => true,
            _ => false,
        };
        if !event.is_ok_and(|event| is_read(&event)) {
            // If the channel is full, it already holds a notification. If it is closed, the
            // receiver no longer exists.
            let _ = sender.try_send(());
        }
    })?;
    let folder = |file: &Path| match file.parent() {
        Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
        Some(folder) => folder.to_owned(),
        None => file.to_owned(),
    };
    let folders: BTreeSet<PathBuf> = [&files.cert, &files.key, &files.ca].map(|file| folder(file)).into();
    for folder in folders {
        watcher.watch(&folder, RecursiveMode::NonRecursive)?;
    }
    Ok(watcher)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, os::unix::fs::symlink};

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    struct Folder {
        folder: tempfile::TempDir,
    }

    impl Folder {
        fn new() -> Self {
            let new = Self { folder: tempfile::tempdir().unwrap() };
            new.write("");
            new
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn write(&self, below: &str) {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
            for (name, text) in
                [("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem()), ("ca.crt", certificate.pem())]
            {
                fs::write(self.path(below).join(name), text).unwrap();
            }
        }

        fn load(&self) -> Result<Arc<ServerTls>, FileError> {
            ServerTls::load(self.path("tls.crt"), self.path("tls.key"), self.path("ca.crt"))
        }
    }

    #[test]
    fn good_files_are_accepted_and_bad_files_refused() {
        let folder = Folder::new();
        let config = folder.load().unwrap().config();
        assert_eq!(config.alpn_protocols, [b"h2".to_vec()]);
        assert!(config.ticketer.enabled() && !config.session_storage.can_cache());
        fs::write(folder.path("ca.crt"), "garbage").unwrap();
        let error = folder.load().map(drop).unwrap_err().to_string();
        assert!(error.contains("--tls-client-ca") && error.contains("the file contains no certificate"), "{error}");
    }

    /// Waits until the configuration differs from `old`. Fails after a minute.
    async fn replaced(tls: &ServerTls, old: &Arc<ServerConfig>) {
        let replaced = async {
            while Arc::ptr_eq(&tls.config(), old) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), replaced).await.expect("the new files are not in use");
    }

    #[tokio::test]
    async fn links_into_other_folders_are_followed_by_polling() {
        let folder = Folder::new();
        fs::create_dir(folder.path("far")).unwrap();
        folder.write("far");
        for name in ["tls.crt", "tls.key", "ca.crt"] {
            fs::remove_file(folder.path(name)).unwrap();
            symlink(folder.path("far").join(name), folder.path(name)).unwrap();
        }
        let (tls, metrics) = (folder.load().unwrap(), Metrics::default());
        let old = tls.config();
        folder.write("far");
        tokio::select! {
            () = tls.follow_every(Duration::from_millis(20), &metrics) => unreachable!(),
            () = replaced(&tls, &old) => {}
        }
    }
}
