//! One replica: a real process on loopback that reaches its API server through a [`Gate`].

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use headgate_proto::v1::{
    AgentInfo, GetStatusRequest, GetStatusResponse, ListAgentsRequest, inspect_client::InspectClient,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::gate::{Gate, Mode};
use crate::{apiserver::ApiServer, testbed::control_plane::ControlPlane};

/// One replica. Dropping it ends the process.
#[derive(Debug)]
pub struct Replica {
    /// The relay between the replica and its API server.
    pub gate: Gate,
    program: ControlPlane,
}

impl Replica {
    /// Starts a replica, with its files in a folder of its own in `folder`.
    ///
    /// # Errors
    /// The program does not listen in time.
    pub async fn start(name: &str, folder: &Path, api: &ApiServer, mode: Mode) -> Result<Self> {
        let gate = Gate::start(api.address(), mode).await?;
        let folder = folder.join(name);
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let kubeconfig = folder.join("kubeconfig");
        let text = api.kubeconfig().replace(&api.url(), &format!("http://{}", gate.address));
        fs::write(&kubeconfig, text).with_context(|| format!("writing {}", kubeconfig.display()))?;
        let options = [
            "--source=kubernetes".to_owned(),
            "--insecure-loopback".to_owned(),
            format!("--replica-name={name}"),
            format!("--kubeconfig={}", kubeconfig.display()),
        ];
        let start = move || ControlPlane::start(&folder, &options);
        Ok(Self { gate, program: tokio::task::spawn_blocking(start).await?? })
    }

    /// The URL for agents.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.program.address)
    }

    /// The URL for headgatectl.
    #[must_use]
    pub fn inspect_url(&self) -> String {
        format!("http://{}", self.program.inspect)
    }

    /// The end of the replica's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.program.log_tail()
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
        let mut stream = TcpStream::connect(self.program.metrics).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n").await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok(page.starts_with("HTTP/1.1 200"))
    }
}
