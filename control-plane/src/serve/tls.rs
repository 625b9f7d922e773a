//! TLS with PEM files that may change while the control plane runs.
//!
//! At the start, it is an error if files are missing or malformed or do not match each other.
//! Later, the last good files stay in use until all files are good again. A reload does not affect
//! open connections, except those of denied peers: each handshake uses the configuration that is
//! current when it begins. `ClientVerifier` verifies the certificates of clients.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use headgate_tls::{Denied, FileError, Files, Loaded, Material, Reloader, Validity, date, replica_client};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
    client::{Resumption, danger::HandshakeSignatureValid},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, UnixTime},
    server::{
        NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::SingleCertAndKey,
};
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    identity::{self, Identity},
    metrics::Metrics,
};

/// How often the files are read. What one read alone finds does not count, because programs write
/// certificate, key and authorities one after the other.
const POLL: Duration = Duration::from_secs(1);

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

/// TLS of a replica, versions 1.2 and 1.3: as a server, and for its links to other replicas.
#[derive(Debug)]
pub struct ServerTls {
    files: Files,
    reloader: Mutex<Reloader<Configs>>,
    current: ArcSwap<Loaded<Configs>>,
    /// Changes after `current`.
    reloaded: watch::Sender<()>,
}

/// The configurations of the two listeners and of the links to other replicas.
#[derive(Debug)]
struct Configs {
    /// HTTP/2. Every client must have a certificate.
    streams: Arc<ServerConfig>,
    /// HTTP/1.1, without sessions. A client may have a certificate.
    enrolment: Arc<ServerConfig>,
    /// How this replica joins others.
    links: Arc<ClientConfig>,
    /// The holders and certificates that are denied.
    denied: Denied,
}

impl ServerTls {
    /// Reads the files of a server.
    ///
    /// # Errors
    ///
    /// The first error in the files. A retry helps only after the files have changed.
    pub fn load(files: Files) -> Result<Arc<Self>, FileError> {
        let mut reloader = Reloader::new(files.clone(), configs);
        let current = ArcSwap::new(reloader.load(SystemTime::now())?);
        Ok(Arc::new(Self { files, reloader: Mutex::new(reloader), current, reloaded: watch::Sender::default() }))
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

    /// Returns the configuration for the next connection to another replica.
    pub(crate) fn link_config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.current.load().config.links)
    }

    /// Returns true if the files deny a holder or certificate with one of these entries.
    pub(crate) fn denies(&self, entries: &[String]) -> bool {
        self.current.load().config.denied.contains(entries)
    }

    /// Waits until the files deny a holder or certificate with one of these entries.
    pub(crate) async fn denied(&self, entries: &[String]) {
        let mut reloaded = self.reloaded.subscribe();
        // The sender exists as long as this value, so the wait for a change does not fail.
        while !self.denies(entries) && reloaded.changed().await.is_ok() {}
    }

    /// Reloads the files whenever they change, until `shutdown` is cancelled.
    pub(crate) async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.follow_files(&metrics)).await;
    }

    async fn follow_files(self: &Arc<Self>, metrics: &Metrics) {
        self.report(metrics);
        let mut in_force: FoundFiles = Ok(self.current.load_full());
        let mut last = in_force.clone();
        loop {
            sleep(POLL).await;
            let found = self.read().await;
            if counts(&found, &last, &in_force) {
                in_force = found.clone();
                match &found {
                    Ok(loaded) => {
                        self.current.store(Arc::clone(loaded));
                        self.reloaded.send_replace(());
                        metrics.tls_reloads.of(["success"]).inc();
                        self.report(metrics);
                    }
                    Err(problem) => {
                        metrics.tls_reloads.of(["failure"]).inc();
                        tracing::error!("{problem}. The earlier files stay in use");
                    }
                }
            }
            last = found;
        }
    }

    async fn read(self: &Arc<Self>) -> FoundFiles {
        let tls = Arc::clone(self);
        let load = move || {
            let mut reloader = tls.reloader.lock().unwrap_or_else(PoisonError::into_inner);
            reloader.load(SystemTime::now()).map_err(|error| error.to_string())
        };
        spawn_blocking(load).await.unwrap_or_else(|defect| Err(format!("TLS files could not be read: {defect}")))
    }

    /// Reports the current files in the log and the metrics.
    fn report(&self, metrics: &Metrics) {
        let Loaded { validity, authorities_not_after, .. } = **self.current.load();
        let authorities = Validity { not_after: authorities_not_after, ..validity };
        for (file, validity) in [("cert", validity), ("client_ca", authorities)] {
            metrics.tls_not_after.of([file]).set(validity.not_after_unix_seconds());
        }
        let (not_after, authorities_not_after) = (date(validity.not_after), date(authorities_not_after));
        tracing::info!(cert = %self.files.cert.display(), not_after, authorities_not_after, "TLS files in use");
    }
}

/// What a read of the files has found: a configuration, or a problem.
type FoundFiles = Result<Arc<Loaded<Configs>>, String>;

/// Returns true if the result of a read replaces the one in force: if the read before found the
/// same result. A configuration also replaces it if the read before found any other result than the
/// one in force, because a program may write the files more often than they are read.
fn counts(found: &FoundFiles, before: &FoundFiles, in_force: &FoundFiles) -> bool {
    !is_same(found, in_force) && (is_same(found, before) || found.is_ok() && !is_same(before, in_force))
}

/// Returns true if two reads have found the same contents.
fn is_same(one: &FoundFiles, other: &FoundFiles) -> bool {
    match (one, other) {
        (Ok(one), Ok(other)) => Arc::ptr_eq(one, other),
        (Err(one), Err(other)) => one == other,
        _ => false,
    }
}

/// Returns configurations with new keys for session tickets. So no session of an earlier
/// configuration can be resumed, and each client is verified against the present authorities. A
/// session, including the client certificate, is stored only in the client's ticket, and needs no
/// memory of the server.
fn configs(material: &Material) -> Result<Configs, rustls::Error> {
    let provider = Arc::new(ring::default_provider());
    let own = Arc::new(SingleCertAndKey::from(Arc::clone(&material.own)));
    let config = |is_mandatory: bool, protocol: &str| {
        let verifier = ClientVerifier::new(material, &provider, is_mandatory)
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let mut config = builder.with_client_cert_verifier(Arc::new(verifier)).with_cert_resolver(own.clone());
        config.alpn_protocols = vec![protocol.into()];
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok::<_, rustls::Error>(config)
    };
    let mut streams = config(true, "h2")?;
    streams.ticketer = ring::Ticketer::new()?;
    streams.send_tls13_tickets = TICKETS;
    let enrolment = config(false, "http/1.1")?;
    let mut links = replica_client(material)?;
    // A resumed session would not look at the certificate again.
    links.resumption = Resumption::disabled();
    let (streams, enrolment, links) = (Arc::new(streams), Arc::new(enrolment), Arc::new(links));
    Ok(Configs { streams, enrolment, links, denied: material.denied.clone() })
}

// Verifies the certificates of clients. Each role has its authorities: those of nodes sign only
// for nodes, so who has their key, as each replica has for enrolment, is no reader and no replica.

/// The verifiers of the roles, and what is denied in each role.
#[derive(Debug)]
struct ClientVerifier {
    nodes: Arc<dyn ClientCertVerifier>,
    others: Arc<dyn ClientCertVerifier>,
    denied: Denied,
    is_mandatory: bool,
}

impl ClientVerifier {
    /// Returns a verifier for clients that need a certificate if `is_mandatory`.
    ///
    /// # Errors
    ///
    /// There is no authority.
    fn new(
        material: &Material,
        provider: &Arc<CryptoProvider>,
        is_mandatory: bool,
    ) -> Result<Self, VerifierBuilderError> {
        let verifier = |roots: &RootCertStore| {
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), Arc::clone(provider)).build()
        };
        let others = verifier(&material.authorities)?;
        let nodes = verifier(&material.node_authorities)?;
        Ok(Self { nodes, others, denied: material.denied.clone(), is_mandatory })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.is_mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A client has one certificate, and needs no hint to choose it.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let identity = identity::from_certificate(certificate).ok().map(|(identity, _)| identity);
        let verifier = if matches!(identity, Some(Identity::Node(_))) { &self.nodes } else { &self.others };
        let verified = verifier.verify_client_cert(certificate, intermediates, now)?;
        let entries = Denied::entries_of(certificate, identity.and_then(|identity| identity.uri()));
        if self.denied.contains(&entries) { Err(CertificateError::Revoked.into()) } else { Ok(verified) }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.others.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, iter, path::Path};

    use headgate_tls::Side;
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    /// Contents of the three files.
    fn contents() -> [String; 3] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.subject_alt_names.push(SanType::URI("headgate://replica/test".try_into().unwrap()));
        let certificate = params.self_signed(&key).unwrap().pem();
        [certificate.clone(), key.serialize_pem(), certificate]
    }

    fn load(folder: &Path) -> Result<Arc<ServerTls>, FileError> {
        let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
        ServerTls::load(Files { side: Side::Server, cert, key, node_ca: ca.clone(), ca, denied: None })
    }

    fn write(folder: &Path, contents: &[String]) {
        for (name, text) in ["tls.crt", "tls.key", "ca.crt"].iter().zip(contents) {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    /// Each step is one read of the files, with the contents that count after it.
    #[tokio::test]
    async fn what_one_read_alone_finds_does_not_count_and_contents_that_never_rest_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let sets: Vec<_> = iter::repeat_with(contents).take(5).collect();
        write(folder.path(), &sets[0]);
        let tls = load(folder.path()).unwrap();
        let mut in_force: FoundFiles = Ok(tls.current.load_full());
        let (first, mut before) = (in_force.clone(), in_force.clone());
        let mut counted = Vec::new();
        for set in [1, 0, 0, 1, 2, 2, 3, 4, 4] {
            write(folder.path(), &sets[set]);
            let found = tls.read().await;
            if counts(&found, &before, &in_force) {
                in_force = found.clone();
                tls.current.store(in_force.clone().unwrap());
            }
            counted.push(is_same(&found, &in_force));
            assert!(set != 0 || is_same(&found, &first), "the ticket keys stay");
            before = found;
        }
        assert_eq!(counted, [false, true, true, false, true, true, false, true, true]);
        fs::write(path("tls.key"), "garbage").unwrap();
        let broken = tls.read().await;
        assert!(!counts(&broken, &before, &in_force) && counts(&broken, &broken, &in_force));
    }
}
