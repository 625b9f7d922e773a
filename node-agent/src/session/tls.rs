//! The agent's side of mTLS. The files may change while the agent runs. Each new connection uses
//! the current contents of the files.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use headgate_tls::{FileError, Files, Loaded, Material, Refusal, Reloader, Side, date, explain, replica_client};
use rustls::{
    ClientConfig, HandshakeKind,
    client::{ClientSessionMemoryCache, Resumption},
    pki_types::ServerName,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::Notify,
    time::sleep,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tracing::{error, info};

use super::metrics::TlsMetrics;
use crate::state::blocking;

/// Time between two reads of the files. The files are also read while the agent opens no
/// connection, so that errors are logged before the files are needed.
const POLL: Duration = Duration::from_secs(10);

/// Number of TLS sessions that are remembered for resumption: enough for eight server names.
const SESSIONS: usize = 64;

/// The TLS files, and the configuration that was last built from these files.
#[derive(Debug)]
pub struct AgentTls {
    files: Files,
    metrics: TlsMetrics,
    state: Mutex<TlsState>,
    rejected: Notify,
}

#[derive(Debug)]
struct TlsState {
    reloader: Reloader<ClientConfig>,
    last: Option<Arc<Loaded<ClientConfig>>>,
    problem: Option<String>,
    /// Whether a control plane rejected the certificate, and none has accepted it since.
    is_rejected: bool,
}

impl AgentTls {
    /// Creates the TLS state of an agent. Does not read the files yet. If the files are unusable
    /// later, forwarding continues and the agent tries again.
    pub fn new(files: Files, metrics: TlsMetrics) -> Arc<Self> {
        debug_assert_eq!(files.side, Side::Client);
        let reloader = Reloader::new(files.clone(), client_config);
        let state = TlsState { reloader, last: None, problem: None, is_rejected: false };
        Arc::new(Self { files, metrics, state: Mutex::new(state), rejected: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, TlsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files. Returns the same `Arc` while the contents of the files do not change, so
    /// that TLS sessions can be resumed.
    /// Errors: the current files cannot be used. The earlier contents are not used either, because
    /// an operator may have removed a certificate on purpose. Retry after the files have changed.
    pub async fn load(self: &Arc<Self>) -> Result<Arc<Loaded<ClientConfig>>, FileError> {
        let tls = Arc::clone(self);
        blocking(move || tls.load_blocking()).await
    }

    fn load_blocking(&self) -> Result<Arc<Loaded<ClientConfig>>, FileError> {
        let mut state = self.state();
        let loaded = state.reloader.load(SystemTime::now());
        match &loaded {
            Ok(loaded) => self.on_loaded(&mut state, loaded),
            Err(error) => self.on_bad_files(&mut state, error.to_string()),
        }
        loaded
    }

    fn on_loaded(&self, state: &mut TlsState, loaded: &Arc<Loaded<ClientConfig>>) {
        let was_bad = state.problem.take().is_some();
        let is_new = state.last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, loaded));
        if !is_new && !was_bad {
            return;
        }
        let is_first = state.last.is_none() && !was_bad;
        state.last = Some(Arc::clone(loaded));
        state.is_rejected = false;
        self.metrics.loaded(loaded, is_first);
        info!(cert = %self.files.cert.display(), not_after = date(loaded.validity.not_after), "TLS files are in use");
    }

    fn on_bad_files(&self, state: &mut TlsState, problem: String) {
        if state.problem.as_ref() == Some(&problem) {
            return;
        }
        error!("{problem}. An open stream continues, but the agent cannot open a new stream with these files");
        self.metrics.load_failed(problem.clone());
        state.problem = Some(problem);
    }

    /// Waits until a control plane rejects the certificate.
    pub(super) async fn rejected(&self) {
        self.rejected.notified().await;
    }

    fn on_rejected(&self, refusal: &Refusal) {
        let mut state = self.state();
        state.is_rejected = true;
        if state.problem.is_none() {
            self.metrics.problem.send_replace(Some(refusal.sentence.clone()));
        }
        self.rejected.notify_waiters();
    }

    /// A control plane accepted the certificate.
    pub(super) fn on_accepted(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.is_rejected) && state.problem.is_none() {
            self.metrics.problem.send_replace(None);
        }
    }

    /// Reads the files every ten seconds. Never returns.
    pub async fn follow(self: Arc<Self>) {
        loop {
            // `load` has logged and counted an error.
            let _ = self.load().await;
            sleep(POLL).await;
        }
    }

    /// Makes the TLS handshake on a connection to `host`, a DNS name or an IP address. The server
    /// must be a replica; its certificate need not contain `host`.
    /// Errors: one side does not accept the other side's certificate, or the connection breaks.
    /// After such an error, `refused` holds the reason, if TLS reports a reason.
    pub(crate) async fn handshake(
        self: &Arc<Self>,
        config: Arc<ClientConfig>,
        stream: TcpStream,
        host: &str,
        refused: Arc<OnceLock<Refusal>>,
    ) -> io::Result<Explained> {
        let name = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(name).map_err(io::Error::other)?;
        let mut explained = Explain { tls: Arc::clone(self), refused };
        let stream = TlsConnector::from(config).connect(name, stream).await.map_err(|error| explained.note(error))?;
        let session = stream.get_ref().1;
        if session.alpn_protocol() != Some(b"h2") {
            return Err(io::Error::other(
                "the server speaks TLS but not HTTP/2; check that it is a Headgate control plane",
            ));
        }
        self.metrics.handshake(session.handshake_kind() == Some(HandshakeKind::Resumed));
        Ok(Explained { stream, explain: explained })
    }
}

fn client_config(material: &Material) -> Result<ClientConfig, rustls::Error> {
    let mut config = replica_client(material)?;
    config.resumption = Resumption::store(Arc::new(ClientSessionMemoryCache::new(SESSIONS)));
    Ok(config)
}

/// Remembers why TLS ended a connection, because the HTTP/2 client reports only a text. The error
/// may follow the handshake: in TLS 1.3, the server checks the client's certificate afterwards.
#[derive(Debug)]
struct Explain {
    tls: Arc<AgentTls>,
    refused: Arc<OnceLock<Refusal>>,
}

impl Explain {
    fn note(&mut self, error: io::Error) -> io::Error {
        if let Some(refusal) = explain(&error, &self.tls.files) {
            if refusal.is_by_peer() {
                self.tls.on_rejected(&refusal);
            }
            // Only the first reason is kept.
            let _ = self.refused.set(refusal);
        }
        error
    }
}

/// A TLS connection that records why it failed.
#[derive(Debug)]
pub(crate) struct Explained {
    stream: TlsStream<TcpStream>,
    explain: Explain,
}

impl Explained {
    fn noted<T>(&mut self, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match poll {
            Poll::Ready(Err(error)) => Poll::Ready(Err(self.explain.note(error))),
            other => other,
        }
    }
}

impl AsyncRead for Explained {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.noted(poll)
    }
}

impl AsyncWrite for Explained {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.noted(poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.noted(poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(cx);
        self.noted(poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.noted(poll)
    }
}
