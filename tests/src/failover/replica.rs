//! One replica: a real process on loopback that reaches its API server through a [`Gate`].

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use headgate_proto::v1::{
    AgentInfo, GetStatusRequest, GetStatusResponse, ListAgentsRequest, inspect_client::InspectClient,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::sleep,
};

use super::gate::{Gate, Mode};
use crate::{
    apiserver::ApiServer,
    testbed::process::{self, KilledOnDrop, control_plane_addresses, program},
};

/// How long a replica may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// One replica. Dropping it ends the process.
#[derive(Debug)]
pub struct Replica {
    /// The relay between the replica and its API server.
    pub gate: Gate,
    name: String,
    log: PathBuf,
    _process: KilledOnDrop,
    address: SocketAddr,
    inspect: SocketAddr,
    metrics: SocketAddr,
}

impl Replica {
    /// Starts a replica, with its files in `folder`.
    ///
    /// # Errors
    /// The program does not listen within 30 seconds.
    pub async fn start(name: &str, folder: &Path, api: &ApiServer, mode: Mode) -> Result<Self> {
        let gate = Gate::start(api.address(), mode).await?;
        let kubeconfig = folder.join(format!("{name}.kubeconfig"));
        let text = api.kubeconfig().replace(&api.url(), &format!("http://{}", gate.address));
        fs::write(&kubeconfig, text).with_context(|| format!("writing {}", kubeconfig.display()))?;
        let log = folder.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut command = Command::new(program("headgate-control-plane")?);
        command.args(["--source=kubernetes", "--insecure-loopback", "--replica-name", name]);
        command.args(["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]);
        command.arg(format!("--kubeconfig={}", kubeconfig.display())).env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("starting headgate-control-plane")?;
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let _process = KilledOnDrop(child);
        let (name, [address, inspect, metrics]) = (name.to_owned(), [unknown; 3]);
        let mut replica = Self { gate, name, log, _process, address, inspect, metrics };
        replica.find_addresses().await?;
        Ok(replica)
    }

    /// Waits until the log has the replica's addresses.
    async fn find_addresses(&mut self) -> Result<()> {
        let until = Instant::now() + START_LIMIT;
        loop {
            let log = fs::read_to_string(&self.log)?;
            if let Some(addresses) = control_plane_addresses(&log) {
                [self.address, self.inspect, self.metrics] = addresses;
                return Ok(());
            }
            ensure!(Instant::now() < until, "{} does not start: {log}", self.name);
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// The URL for agents.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The URL for headgatectl.
    #[must_use]
    pub fn inspect_url(&self) -> String {
        format!("http://{}", self.inspect)
    }

    /// The end of the replica's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        process::log_tail(&self.log)
    }

    /// The replica's status.
    ///
    /// # Errors
    /// The replica does not answer.
    pub async fn status(&self) -> Result<GetStatusResponse> {
        let mut client = InspectClient::connect(self.inspect_url()).await.context("connecting to a replica")?;
        Ok(client.get_status(GetStatusRequest::default()).await?.into_inner())
    }

    /// The replica's agents.
    ///
    /// # Errors
    /// The replica does not answer.
    pub async fn agents(&self) -> Result<Vec<AgentInfo>> {
        let mut client = InspectClient::connect(self.inspect_url()).await.context("connecting to a replica")?;
        let mut stream =
            client.list_agents(ListAgentsRequest { only_this_replica: true, ..Default::default() }).await?.into_inner();
        let mut agents = Vec::new();
        while let Some(agent) = stream.message().await? {
            agents.push(agent);
        }
        Ok(agents)
    }

    /// Whether `/readyz` answers 200.
    ///
    /// # Errors
    /// The page cannot be read.
    pub async fn is_ready(&self) -> Result<bool> {
        let mut stream = TcpStream::connect(self.metrics).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n").await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok(page.starts_with("HTTP/1.1 200"))
    }
}
