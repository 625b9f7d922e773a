//! Runs real `etcd` and `kube-apiserver` binaries from the folder in `KUBEBUILDER_ASSETS`.
//!
//! Both programs use free ports and a temporary data folder. The flags follow controller-runtime's
//! envtest. In addition, the API server has a static token, and a serving certificate that clients
//! verify.

use std::{
    env,
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use tempfile::TempDir;

use crate::testbed::{
    process::{KilledOnDrop, log_tail},
    spawn::spawn_in,
};

/// The environment variable that Kubernetes test suites use for the folder with the binaries.
pub const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";

/// How long a binary may take until it serves.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The number of attempts to start. An attempt fails if another process takes a port between the
/// search for a free port and its use.
const ATTEMPTS: usize = 3;

/// Why the real binaries do not run.
#[derive(Debug, thiserror::Error)]
pub enum RealServerError {
    /// A binary does not exist.
    #[error("{} is not a file: point {ASSETS_VARIABLE} at a folder with etcd and kube-apiserver", .0.display())]
    MissingBinary(PathBuf),
    /// An operation on files or processes failed.
    #[error("could not {action}: {source}")]
    Host {
        /// The operation, as a verb with its object.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Keys or certificates could not be generated.
    #[error("could not generate keys for the real API server: {0}")]
    Keys(#[from] rcgen::Error),
    /// A binary ended, or did not serve in time.
    #[error("{program} {what}; its log ends with:\n{log}")]
    NotServing {
        /// `etcd` or `kube-apiserver`.
        program: &'static str,
        /// What the binary did, such as "did not serve in time".
        what: &'static str,
        /// The last lines of the binary's output.
        log: String,
    },
}

fn host(action: &'static str) -> impl FnOnce(io::Error) -> RealServerError {
    move |source| RealServerError::Host { action, source }
}

/// Starts a program in the calling thread's network namespace, and appends its output to `log`.
fn start(mut command: Command, log: &Path) -> io::Result<KilledOnDrop> {
    let log = File::options().create(true).append(true).open(log)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    spawn_in(File::open("/proc/thread-self/ns/net")?, command).map(KilledOnDrop)
}

/// Running etcd and kube-apiserver processes. Dropping this value ends both processes and removes
/// their data.
pub struct RealApiServer {
    // Fields drop in this order: the API server before its etcd, the folder last.
    api_server: Option<KilledOnDrop>,
    _etcd: KilledOnDrop,
    assets: PathBuf,
    etcd_port: u16,
    address: SocketAddr,
    folder: TempDir,
}

impl std::fmt::Debug for RealApiServer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RealApiServer").field("url", &self.url()).finish_non_exhaustive()
    }
}

/// The static token of the only user. The server runs only during a test.
const TOKEN: &str = "headgate-tests";

impl RealApiServer {
    /// Starts both binaries from the folder in [`ASSETS_VARIABLE`], and blocks until `/readyz`
    /// succeeds. Returns `None` if the variable is unset or empty.
    ///
    /// # Errors
    /// The binaries do not exist, or do not serve in time.
    pub fn from_environment() -> Option<Result<Self, RealServerError>> {
        let assets = env::var_os(ASSETS_VARIABLE).filter(|value| !value.is_empty())?;
        Some(Self::start(Path::new(&assets)))
    }

    /// Starts both binaries from a folder, on loopback, and blocks until `/readyz` succeeds.
    ///
    /// # Errors
    /// The binaries do not exist, or do not serve in time.
    pub fn start(assets: &Path) -> Result<Self, RealServerError> {
        Self::start_at(assets, Ipv4Addr::LOCALHOST)
    }

    /// Starts both binaries from a folder, in the calling thread's network namespace. The API
    /// server listens on `address`. Blocks until `/readyz` succeeds.
    ///
    /// # Errors
    /// The binaries do not exist, or do not serve in time.
    pub fn start_at(assets: &Path, address: Ipv4Addr) -> Result<Self, RealServerError> {
        for program in ["etcd", "kube-apiserver"] {
            let path = assets.join(program);
            if !path.is_file() {
                return Err(RealServerError::MissingBinary(path));
            }
        }
        let mut last = Self::try_start(assets, address);
        for _ in 1..ATTEMPTS {
            match last {
                Err(RealServerError::NotServing { what: ENDED, .. }) => last = Self::try_start(assets, address),
                other => return other,
            }
        }
        last
    }

    fn try_start(assets: &Path, address: Ipv4Addr) -> Result<Self, RealServerError> {
        let folder = tempfile::Builder::new().prefix("headgate-api").tempdir().map_err(host("create a data folder"))?;
        write_credentials(folder.path(), address)?;
        let [etcd_port, peer_port, port] = free_ports()?;
        let etcd = start_etcd(assets, folder.path(), etcd_port, peer_port)?;
        let address = (address, port).into();
        let mut server = Self { api_server: None, _etcd: etcd, assets: assets.to_owned(), etcd_port, address, folder };
        server.start_api_server()?;
        Ok(server)
    }

    /// The base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The text of a kubeconfig file for this server, with a user in the group `system:masters`.
    /// The file refers to the CA by path, so it is valid only while the server runs.
    pub fn kubeconfig(&self) -> String {
        self.kubeconfig_with(TOKEN)
    }

    /// The text of a kubeconfig file with another bearer token, such as that of a ServiceAccount.
    pub fn kubeconfig_with(&self, token: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: real\nclusters:\n- name: real\n  cluster:\n    server: {}\n    \
             certificate-authority: {}\ncontexts:\n- name: real\n  context:\n    cluster: real\n    user: tester\nusers:\n\
             - name: tester\n  user:\n    token: {token}\n",
            self.url(),
            self.folder.path().join("ca.crt").display()
        )
    }

    /// Ends the API server, which cuts all connections. etcd continues to run.
    pub fn stop(&mut self) {
        self.api_server = None;
    }

    /// Ends the API server if it runs, and starts it on its port again. Blocks until `/readyz`
    /// succeeds.
    ///
    /// # Errors
    /// The API server does not serve in time.
    pub fn restart(&mut self) -> Result<(), RealServerError> {
        self.stop();
        self.start_api_server()
    }

    /// Compacts etcd at its current revision, so that watches and exact lists of earlier versions
    /// get 410. Restarts the API server too, because the watch cache of the running server still
    /// has the history.
    ///
    /// # Errors
    /// etcd refuses the compaction, or the API server does not serve in time.
    pub fn lose_history(&mut self) -> Result<(), RealServerError> {
        let status = http_post(self.etcd_port, "/v3/kv/range", r#"{"key":"AA=="}"#)
            .map_err(host("ask etcd for its revision"))?;
        let revision = revision_of(&status).ok_or_else(|| {
            host("ask etcd for its revision")(io::Error::other(format!("the answer has no revision: {status}")))
        })?;
        let order = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        http_post(self.etcd_port, "/v3/kv/compaction", &order).map_err(host("compact etcd"))?;
        self.restart()
    }

    fn start_api_server(&mut self) -> Result<(), RealServerError> {
        let folder = self.folder.path();
        let file = |name: &str| folder.join(name).display().to_string();
        let flags = [
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            format!("--secure-port={}", self.address.port()),
            format!("--bind-address={}", self.address.ip()),
            format!("--advertise-address={}", self.address.ip()),
            // Without this flag, the API server would write its own EndpointSlice during the tests.
            "--endpoint-reconciler-type=none".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112".to_owned(),
            "--authorization-mode=RBAC".to_owned(),
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--allow-privileged=true".to_owned(),
            format!("--token-auth-file={}", file("tokens.csv")),
            format!("--cert-dir={}", file("apiserver")),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--service-account-issuer={}", self.url()),
            format!("--service-account-key-file={}", file("sa.pub")),
            format!("--service-account-signing-key-file={}", file("sa.key")),
        ];
        let log = folder.join("kube-apiserver.log");
        let mut command = Command::new(self.assets.join("kube-apiserver"));
        command.args(flags);
        let mut child = start(command, &log).map_err(host("start kube-apiserver"))?;
        let is_ready = || is_ready(self.address, &folder.join("ca.crt"));
        wait_until_serving("kube-apiserver", &mut child, &log, is_ready)?;
        self.api_server = Some(child);
        Ok(())
    }
}

const ENDED: &str = "ended before it served";

fn wait_until_serving(
    program: &'static str,
    child: &mut KilledOnDrop,
    log: &Path,
    mut serves: impl FnMut() -> bool,
) -> Result<(), RealServerError> {
    let until = Instant::now() + START_TIMEOUT;
    let what = loop {
        if serves() {
            return Ok(());
        }
        if !matches!(child.0.try_wait(), Ok(None)) {
            break ENDED;
        }
        if Instant::now() > until {
            break "did not serve in time";
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let log = log_tail(log);
    Err(RealServerError::NotServing { program, what, log })
}

fn start_etcd(assets: &Path, folder: &Path, port: u16, peer_port: u16) -> Result<KilledOnDrop, RealServerError> {
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    let flags = [
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync=true".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    let log = folder.join("etcd.log");
    // etcd reports progress every ten minutes by default. kubeadm sets 5 s, and many distributions
    // do not. The tests must pass with the default.
    let mut command = Command::new(assets.join("etcd"));
    command.args(flags);
    let mut child = start(command, &log).map_err(host("start etcd"))?;
    let is_healthy = || http_get(port, "/health").is_ok_and(|answer| answer.contains("\"health\":\"true\""));
    wait_until_serving("etcd", &mut child, &log, is_healthy)?;
    Ok(child)
}

/// Writes a CA, a serving certificate for the address, a key pair for service-account tokens, and
/// the token file.
fn write_credentials(folder: &Path, address: Ipv4Addr) -> Result<(), RealServerError> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "headgate test authority");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut server = CertificateParams::new(vec!["localhost".to_owned()])?;
    server.subject_alt_names.push(SanType::IpAddress(address.into()));
    server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    let server_key = KeyPair::generate()?;
    let server = server.signed_by(&server_key, &authority)?;
    let account_key = KeyPair::generate()?;
    let files = [
        ("ca.crt", authority.pem()),
        ("server.crt", server.pem()),
        ("server.key", server_key.serialize_pem()),
        ("sa.key", account_key.serialize_pem()),
        ("sa.pub", account_key.public_key_pem()),
        ("tokens.csv", format!("{TOKEN},tester,tester,\"system:masters\"\n")),
    ];
    for (name, text) in files {
        fs::write(folder.join(name), text).map_err(host("write credentials"))?;
    }
    Ok(())
}

/// Finds free ports. All sockets stay open until the last port is found, so the ports are
/// different.
fn free_ports<const N: usize>() -> Result<[u16; N], RealServerError> {
    let mut ports = [0; N];
    let mut held = Vec::with_capacity(N);
    for port in &mut ports {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(host("find a free port"))?;
        *port = socket.local_addr().map_err(host("find a free port"))?.port();
        held.push(socket);
    }
    Ok(ports)
}

fn revision_of(answer: &str) -> Option<u64> {
    let answer: serde_json::Value = serde_json::from_str(answer).ok()?;
    // etcd's JSON gateway writes 64-bit numbers as strings.
    answer.pointer("/header/revision")?.as_str()?.parse().ok()
}

fn http_get(port: u16, path: &str) -> io::Result<String> {
    http_exchange(port, &format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))
}

fn http_post(port: u16, path: &str, body: &str) -> io::Result<String> {
    let head = format!(
        "POST {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    http_exchange(port, &(head + body))
}

/// Sends one HTTP/1.0 request, and returns the body.
///
/// # Errors
/// The request fails, or the code is not 200.
fn http_exchange(port: u16, request: &str) -> io::Result<String> {
    let mut stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    exchange_over(&mut stream, request)
}

fn exchange_over(stream: &mut (impl io::Read + io::Write), request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // A TLS peer may close the connection without close_notify.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
        _ => {}
    }
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("the answer is truncated"))?;
    let line = head.lines().next().unwrap_or_default();
    if line.split(' ').nth(1) == Some("200") {
        Ok(body.to_owned())
    } else {
        Err(io::Error::other(format!("{line}: {body}")))
    }
}

/// Whether `/readyz` answers 200 over TLS, with a certificate that the CA has signed.
fn is_ready(address: SocketAddr, authority: &Path) -> bool {
    match try_readyz(address, authority) {
        Ok(_) => true,
        Err(error) => {
            tracing::trace!(%error, "kube-apiserver is not ready");
            false
        }
    }
}

fn try_readyz(address: SocketAddr, authority: &Path) -> io::Result<String> {
    use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};

    let authority = CertificateDer::from_pem_file(authority).map_err(io::Error::other)?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority).map_err(io::Error::other)?;
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::IpAddress(address.ip().into());
    let mut session = rustls::ClientConnection::new(std::sync::Arc::new(config), name).map_err(io::Error::other)?;
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = rustls::Stream::new(&mut session, &mut stream);
    exchange_over(
        &mut stream,
        &format!("GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_error_names_missing_binaries() {
        let folder = tempfile::tempdir().unwrap();
        let error = RealApiServer::start(folder.path()).unwrap_err().to_string();
        assert!(error.contains("etcd") && error.contains(ASSETS_VARIABLE), "{error}");
    }

    #[test]
    fn the_error_for_a_binary_that_ends_at_once_includes_its_log() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        for program in ["etcd", "kube-apiserver"] {
            let path = folder.path().join(program);
            fs::write(&path, "#!/bin/sh\necho cannot start with $1\nexit 1\n").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let error = RealApiServer::start(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("etcd ended before it served") && error.contains("cannot start with --data-dir"),
            "{error}"
        );
    }

    #[test]
    fn credentials_are_complete_and_the_certificate_is_valid() {
        let folder = tempfile::tempdir().unwrap();
        write_credentials(folder.path(), Ipv4Addr::LOCALHOST).unwrap();
        for (name, mark) in
            [("ca.crt", "BEGIN CERTIFICATE"), ("sa.pub", "BEGIN PUBLIC KEY"), ("sa.key", "BEGIN PRIVATE KEY")]
        {
            assert!(fs::read_to_string(folder.path().join(name)).unwrap().contains(mark), "{name}");
        }
        let [port] = free_ports().unwrap();
        serve_one_readyz(folder.path(), port);
        let answer = loop {
            match try_readyz((Ipv4Addr::LOCALHOST, port).into(), &folder.path().join("ca.crt")) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => break other.unwrap(),
            }
        };
        assert_eq!(answer, "ok");
    }

    /// Starts a TLS server with the written certificate. The server answers one request.
    fn serve_one_readyz(folder: &Path, port: u16) {
        use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
        let certificate = CertificateDer::from_pem_file(folder.join("server.crt")).unwrap();
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).unwrap();
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut socket, _) = listener.accept().unwrap();
            let mut session = rustls::ServerConnection::new(std::sync::Arc::new(config)).unwrap();
            let mut stream = rustls::Stream::new(&mut session, &mut socket);
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).unwrap() > 0);
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nok").unwrap();
            session.send_close_notify();
            session.write_tls(&mut socket).unwrap();
        });
    }

    #[test]
    fn the_revision_is_read_from_etcds_answer() {
        assert_eq!(revision_of(r#"{"header":{"revision":"41"}}"#), Some(41));
        assert_eq!(revision_of("{}"), None);
    }
}
