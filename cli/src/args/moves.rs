//! The arguments of `migrate run` and `cleanup`.

use std::path::PathBuf;
use std::time::Duration;

use crate::migrate::plan::{self, Batch};
use crate::units;

/// How to reach the API server.
#[derive(Debug, Clone, clap::Args)]
pub struct ClusterArgs {
    /// Kubeconfig file. Default: the files of the variable KUBECONFIG, or ~/.kube/config, or the
    /// service account of the pod
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig. Default: the current one
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace in which Headgate is installed
    #[arg(long, value_name = "NAMESPACE", default_value = "headgate-system")]
    pub install_namespace: String,
}

/// How to move.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Nodes that move together: a number, or a part of the selected nodes
    #[arg(long, value_name = "N|N%", default_value = "5%", value_parser = plan::batch)]
    pub batch: Batch,
    /// What stops the move if any node of the fleet has it: differences between kernel and state,
    /// or an agent that fails
    #[arg(long, value_name = "STATES", value_enum, value_delimiter = ',', default_value = "drift,failing")]
    pub pause_on: Vec<PauseOn>,
    /// Only these nodes
    #[arg(long, value_name = "NODE", value_delimiter = ',', conflicts_with = "selector")]
    pub nodes: Vec<String>,
    /// Only nodes that this label selector selects
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    pub selector: String,
    /// Go back to kube-proxy
    #[arg(long)]
    pub back: bool,
    /// Only print what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// The longest wait for a batch
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = units::parse_duration)]
    pub timeout: Duration,
    /// The DaemonSet of kube-proxy
    #[arg(long, value_name = "NAMESPACE/NAME", default_value = "kube-system/kube-proxy")]
    pub kube_proxy: String,
    /// The DaemonSet of kube-proxy is not managed any more, although it looks like an add-on
    #[arg(long)]
    pub unmanaged: bool,
    /// The API server.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// A state of a node that stops the move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PauseOn {
    /// The last verification found differences.
    Drift,
    /// The agent cannot program its node, or rejects a resource.
    Failing,
}

/// What to clean.
#[derive(Debug, clap::Args)]
pub struct CleanupArgs {
    /// All nodes. For one node, run `headgate-node-agent --cleanup` there
    #[arg(long, required = true)]
    pub all: bool,
    /// Wait until every node is clean, and then remove the DaemonSet
    #[arg(long)]
    pub wait: bool,
    /// Clean also nodes on which no other service proxy runs. No Service answers them afterwards
    #[arg(long)]
    pub without_proxy: bool,
    /// The image of the agent. Default: that of the DaemonSet headgate-node-agent
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// The longest wait
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = units::parse_duration)]
    pub timeout: Duration,
    /// The API server.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}
