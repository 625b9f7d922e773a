//! The arguments of `migrate run` and `cleanup`.

use std::path::PathBuf;
use std::time::Duration;

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

/// The number of nodes that move together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    number: usize,
    is_percent: bool,
}

/// Parses `10` or `5%`.
fn batch(text: &str) -> Result<Batch, &'static str> {
    let (number, is_percent) = text.strip_suffix('%').map_or((text, false), |percent| (percent, true));
    let number = number.parse().ok().filter(|number| *number > 0 && (!is_percent || *number <= 100));
    let usage = "write a number of nodes above 0, such as 10, or a part of them from 1% to 100%";
    number.map(|number| Batch { number, is_percent }).ok_or(usage)
}

impl Batch {
    /// The number of nodes of a batch of a move of `all` nodes.
    pub(crate) fn size(self, all: usize) -> usize {
        if self.is_percent { (all * self.number / 100).max(1) } else { self.number }
    }
}

/// How to move.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Nodes that move together: a number, or a part of the selected nodes
    #[arg(long, value_name = "N|N%", default_value = "5%", value_parser = batch)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_numbers_or_parts() {
        let size = |text: &str, all| batch(text).map(|batch| batch.size(all));
        for (text, all, expected) in [("5%", 10, 1), ("5%", 5000, 250), ("100%", 7, 7), ("3", 10, 3)] {
            assert_eq!(size(text, all), Ok(expected), "{text} of {all}");
        }
        for wrong in ["0", "0%", "101%", "-1", "5 %", "five", "%"] {
            assert!(size(wrong, 10).is_err(), "{wrong}");
        }
    }
}
