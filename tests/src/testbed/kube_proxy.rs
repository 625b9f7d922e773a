//! Real kube-proxy programs on the nodes of a testbed. They follow a real API server on the machine
//! of the control plane, because they read it with their own client.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use http::Method;
use serde_json::{Value, json};

use super::machines::Machines;
use super::manifests::{Manifests, NAMESPACE};
use super::plan::{self, CLUSTER_CIDR, CONTROL};
use super::process::{Process, log_tail};
use crate::apiserver::{ASSETS_VARIABLE, Kind, RealApiServer, client};
use crate::uml::guest;

/// How long kube-proxy may take until its first rules are in the kernel.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A mode of kube-proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `--proxy-mode=iptables`, with the `iptables` that the machine prefers.
    Iptables,
    /// `--proxy-mode=iptables`, with legacy iptables.
    IptablesLegacy,
    /// `--proxy-mode=ipvs`, with legacy iptables.
    Ipvs,
    /// `--proxy-mode=nftables`.
    Nftables,
}

impl Mode {
    /// The name, as in `--proxy-mode`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Iptables | Self::IptablesLegacy => "iptables",
            Self::Ipvs => "ipvs",
            Self::Nftables => "nftables",
        }
    }
}

/// The folder in [`ASSETS_VARIABLE`], if it has kube-proxy. Otherwise prints the reason and returns
/// `None`.
pub fn assets() -> Option<PathBuf> {
    let Some(folder) = env::var_os(ASSETS_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) else {
        println!("{ASSETS_VARIABLE} is unset: this test does not run a real kube-proxy");
        return None;
    };
    if !folder.join("kube-proxy").is_file() {
        println!("{} is not a file: this test does not run a real kube-proxy", folder.join("kube-proxy").display());
        return None;
    }
    Some(folder)
}

/// A real API server with the objects of a testbed, which real kube-proxy programs follow.
pub struct RealKubeProxies {
    api: RealApiServer,
    assets: PathBuf,
    kubeconfig: PathBuf,
}

impl std::fmt::Debug for RealKubeProxies {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RealKubeProxies").field("api", &self.api).finish_non_exhaustive()
    }
}

impl RealKubeProxies {
    /// Starts the API server, and creates the objects of the manifests.
    ///
    /// The server gives the first address of Services to the Service `kubernetes`, so the first
    /// Service of the manifests must have no address.
    ///
    /// # Errors
    /// The server does not start, or refuses an object.
    pub fn start(machines: &Machines, assets: &Path, manifests: &Manifests) -> Result<Self> {
        let address = plan::address(CONTROL).context("the plan has no address for the control plane")?.v4;
        let objects = manifests.documents()?;
        let control = machines.machine(CONTROL)?;
        let api = control.run(|| RealApiServer::start_at(assets, address))?;
        let text = api.kubeconfig();
        control.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(create(&text, objects))
        })?;
        let kubeconfig = machines.folder().join("kubeconfig");
        fs::write(&kubeconfig, text).context("writing a kubeconfig")?;
        Ok(Self { api, assets: assets.to_owned(), kubeconfig })
    }

    /// A kubeconfig file for the API server.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Starts kube-proxy on a node, and waits until its rules for both families are in the kernel.
    ///
    /// # Errors
    /// kube-proxy ends, or does not write its rules in time.
    pub fn run(&self, machines: &Machines, node: &str, mode: Mode) -> Result<Process> {
        let program = self.assets.join("kube-proxy");
        let mut command = Command::new(&program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).arg(format!("--hostname-override={node}"));
        command.args(["--proxy-mode", mode.name(), "--cluster-cidr", CLUSTER_CIDR, "--v=4"]);
        command.args(["--detect-local-mode=ClusterCIDR", "--nodeport-addresses=0.0.0.0/0,::/0"]);
        command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
        command.arg("--conntrack-tcp-timeout-close-wait=0");
        if mode == Mode::Nftables && is_behind_a_gate(&program)? {
            command.arg("--feature-gates=NFTablesProxyMode=true");
        }
        command.env("XTABLES_LOCKFILE", machines.xtables_lock(node));
        if guest::is_here() || mode == Mode::IptablesLegacy {
            command.env("PATH", with_legacy_iptables(machines)?);
        }
        let log = machines.folder().join(format!("kube-proxy-{node}.log"));
        let earlier = fs::metadata(&log).map_or(0, |metadata| metadata.len());
        let mut process = Process::start("kube-proxy", machines.machine(node)?, command, &log)?;
        let until = Instant::now() + START_TIMEOUT;
        loop {
            process.check_running()?;
            let text = fs::read(&log).context("reading the log of kube-proxy")?;
            let text = String::from_utf8_lossy(&text[usize::try_from(earlier)?..]);
            // One sync for each family. Mode ipvs writes the first letter small. Versions before
            // 1.31 do not name the family.
            let complete: Vec<&str> = text.lines().filter(|line| line.contains("yncProxyRules complete")).collect();
            let of = |family: &str| complete.iter().any(|line| line.contains(family));
            if of("IPv4") && of("IPv6") || complete.len() >= 2 && !of("IPv") {
                return Ok(process);
            }
            if Instant::now() > until {
                bail!("kube-proxy has written no rules; the end of its log:\n{}", log_tail(&log));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A `PATH` on which the programs of iptables are the legacy variant.
fn with_legacy_iptables(machines: &Machines) -> Result<String> {
    let path = env::var("PATH").context("PATH is not set")?;
    let folder = machines.folder().join("legacy");
    fs::create_dir_all(&folder).context("creating a folder of programs")?;
    for family in ["iptables", "ip6tables"] {
        for suffix in ["", "-save", "-restore"] {
            let legacy = format!("{family}-legacy{suffix}");
            let found = env::split_paths(&path).map(|folder| folder.join(&legacy)).find(|file| file.is_file());
            let found = found.with_context(|| format!("{legacy} is not on PATH"))?;
            let link = folder.join(format!("{family}{suffix}"));
            if !link.exists() {
                symlink(found, link).context("linking a program of iptables")?;
            }
        }
    }
    Ok(format!("{}:{path}", folder.display()))
}

/// Whether a feature gate turns on mode nftables, as before Kubernetes 1.31.
fn is_behind_a_gate(program: &Path) -> Result<bool> {
    let help = Command::new(program).arg("--help").output().context("running kube-proxy --help")?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("NFTablesProxyMode=true|false (ALPHA"))
}

/// Creates objects at an API server.
async fn create(kubeconfig: &str, objects: Vec<Value>) -> Result<()> {
    let client = client(kubeconfig).await?;
    let send = async |method: Method, path: String, content_type: &str, body: &Value| -> Result<()> {
        let request = http::Request::builder().method(method).uri(&path).header("content-type", content_type);
        let sent = client.request::<Value>(request.body(body.to_string().into_bytes())?).await;
        sent.map(drop).with_context(|| format!("{path}: {body}"))
    };
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    send(Method::POST, "/api/v1/namespaces".into(), "application/json", &namespace).await?;
    for object in objects {
        let kind = Kind::of(&object).context("the API server does not serve this kind")?;
        send(Method::POST, kind.collection_path(Some(NAMESPACE)), "application/json", &object).await?;
        // The API server ignores the status when it creates a Service, so a second request sets it.
        if let (Kind::Service, Some(status)) = (kind, object.get("status")) {
            let name = object["metadata"]["name"].as_str().context("a Service has no name")?;
            let path = kind.object_path(NAMESPACE, name) + "/status";
            send(Method::PATCH, path, "application/merge-patch+json", &json!({ "status": status })).await?;
        }
    }
    Ok(())
}
