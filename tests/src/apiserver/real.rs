//! Runs real `etcd` and `kube-apiserver` binaries from the folder in `KUBEBUILDER_ASSETS`.
//!
//! Both programs use free ports and a temporary data folder. The flags follow controller-runtime's
//! envtest. In addition, the API server has a static token, and a serving certificate that clients
//! verify.

use std::{
    env,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use serde_json::Value;
use tempfile::TempDir;

use super::{kubeconfig, under_test::client};
use crate::testbed::{
    port::ReservedPort,
    process::{KilledOnDrop, log_tail},
    spawn::spawn_in,
};

/// The environment variable that Kubernetes test suites use for the folder with the binaries.
pub const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";

/// How long a binary may take until it serves.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The static token of the only user. The server runs only during a test.
const TOKEN: &str = "headgate-tests";

/// Running etcd and kube-apiserver processes. Dropping this value ends both processes and removes
/// their data.
#[derive(Debug)]
pub struct RealApiServer {
    // Fields drop in this order: the API server before its etcd, the folder last.
    api_server: Option<KilledOnDrop>,
    _etcd: KilledOnDrop,
    assets: PathBuf,
    etcd: SocketAddr,
    address: SocketAddr,
    _ports: [ReservedPort; 3],
    folder: TempDir,
}

impl RealApiServer {
    /// Starts both binaries from the folder in [`ASSETS_VARIABLE`], and blocks until `/readyz`
    /// succeeds. Returns `None` if the variable is unset or empty.
    ///
    /// # Errors
    /// The binaries do not exist, or do not serve in time.
    pub fn from_environment() -> Option<Result<Self>> {
        let assets = env::var_os(ASSETS_VARIABLE).filter(|value| !value.is_empty())?;
        Some(Self::start_at(Path::new(&assets), Ipv4Addr::LOCALHOST))
    }

    /// Starts both binaries from a folder, in the calling thread's network namespace. The API
    /// server listens on `address`. Blocks until `/readyz` succeeds.
    ///
    /// # Errors
    /// The binaries do not exist, or do not serve in time.
    pub fn start_at(assets: &Path, address: Ipv4Addr) -> Result<Self> {
        for program in ["etcd", "kube-apiserver"] {
            let path = assets.join(program);
            let remedy = "point KUBEBUILDER_ASSETS at a folder with etcd and kube-apiserver";
            ensure!(path.is_file(), "{} is not a file: {remedy}", path.display());
        }
        let folder = tempfile::Builder::new().prefix("headgate-api").tempdir()?;
        write_credentials(folder.path(), address).context("writing credentials")?;
        let ports = [ReservedPort::reserve()?, ReservedPort::reserve()?, ReservedPort::reserve()?];
        let [etcd, peer, server] = &ports;
        let address = (address, server.number()).into();
        let running = start_etcd(assets, folder.path(), etcd.address(), peer.address())?;
        let (assets, etcd) = (assets.to_owned(), etcd.address());
        let mut server = Self { api_server: None, _etcd: running, assets, etcd, address, _ports: ports, folder };
        server.restart()?;
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
        let authority = format!("    certificate-authority: {}\n", self.folder.path().join("ca.crt").display());
        kubeconfig(&self.url(), &authority, &format!("token: {token}"))
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
    pub fn restart(&mut self) -> Result<()> {
        self.stop();
        let folder = self.folder.path();
        let file = |name: &str| folder.join(name).display().to_string();
        let mut command = Command::new(self.assets.join("kube-apiserver"));
        command.args([
            format!("--etcd-servers=http://{}", self.etcd),
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
        ]);
        let text = self.kubeconfig();
        let is_ready = move || readyz(text.clone()).is_ok();
        self.api_server = Some(start(command, &folder.join("kube-apiserver.log"), is_ready)?);
        Ok(())
    }

    /// Compacts etcd at its current revision, so that watches and exact lists of earlier versions
    /// get 410. Restarts the API server too, because the watch cache of the running server still
    /// has the history.
    ///
    /// # Errors
    /// etcd refuses the compaction, or the API server does not serve in time.
    pub fn lose_history(&mut self) -> Result<()> {
        let answer: Value = serde_json::from_str(&http(self.etcd, "POST /v3/kv/range", r#"{"key":"AA=="}"#)?)?;
        // etcd's JSON gateway writes 64-bit numbers as strings.
        let revision = answer["header"]["revision"].as_str().context("the answer of etcd has no revision")?;
        let order = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        http(self.etcd, "POST /v3/kv/compaction", &order).context("compacting etcd")?;
        self.restart()
    }
}

/// Starts a program in the calling thread's network namespace, appends its output to `log`, and
/// waits until it serves.
fn start(mut command: Command, log: &Path, serves: impl Fn() -> bool) -> Result<KilledOnDrop> {
    let output = File::options().create(true).append(true).open(log)?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    let mut child = spawn_in(File::open("/proc/thread-self/ns/net")?, command).map(KilledOnDrop)?;
    let until = Instant::now() + START_TIMEOUT;
    while !serves() {
        let has_ended = !matches!(child.0.try_wait(), Ok(None));
        if has_ended || Instant::now() > until {
            bail!("a program does not serve (ended: {has_ended}); {} ends with:\n{}", log.display(), log_tail(log));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(child)
}

fn start_etcd(assets: &Path, folder: &Path, address: SocketAddr, peer: SocketAddr) -> Result<KilledOnDrop> {
    // etcd reports progress every ten minutes by default. kubeadm sets 5 s, and many distributions
    // do not. The tests must pass with the default.
    let mut command = Command::new(assets.join("etcd"));
    command.args([
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls=http://{address}"),
        format!("--advertise-client-urls=http://{address}"),
        format!("--listen-peer-urls=http://{peer}"),
        format!("--initial-advertise-peer-urls=http://{peer}"),
        format!("--initial-cluster=default=http://{peer}"),
        "--unsafe-no-fsync=true".to_owned(),
        "--log-level=warn".to_owned(),
    ]);
    let is_healthy = || http(address, "GET /health", "").is_ok_and(|answer| answer.contains("\"health\":\"true\""));
    start(command, &folder.join("etcd.log"), is_healthy)
}

/// Writes a CA, a serving certificate for the address, a key pair for service-account tokens, and
/// the token file.
fn write_credentials(folder: &Path, address: Ipv4Addr) -> Result<()> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "headgate test authority");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut server = CertificateParams::new(vec!["localhost".to_owned()])?;
    server.subject_alt_names.push(SanType::IpAddress(address.into()));
    server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    let (server_key, account_key) = (KeyPair::generate()?, KeyPair::generate()?);
    for (name, text) in [
        ("ca.crt", authority.pem()),
        ("server.crt", server.signed_by(&server_key, &authority)?.pem()),
        ("server.key", server_key.serialize_pem()),
        ("sa.key", account_key.serialize_pem()),
        ("sa.pub", account_key.public_key_pem()),
        ("tokens.csv", format!("{TOKEN},tester,tester,\"system:masters\"\n")),
    ] {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}

/// Sends one HTTP/1.0 request to etcd, such as `GET /health`, and returns the body.
fn http(address: SocketAddr, request: &str, body: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(stream, "{request} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer of etcd is truncated")?;
    ensure!(head.split(' ').nth(1) == Some("200"), "{request}: {answer}");
    Ok(body.to_owned())
}

/// Asks the API server whether it serves. The thread of its own permits calls from a thread of a
/// runtime.
fn readyz(kubeconfig: String) -> Result<()> {
    let ask = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            let client = client(&kubeconfig).await?;
            tokio::time::timeout(Duration::from_secs(10), client.request_text(request)).await??;
            Ok(())
        })
    };
    std::thread::spawn(ask).join().unwrap_or_else(|_| bail!("the thread that asks the API server panicked"))
}
