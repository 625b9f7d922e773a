//! `rollouts`: the six pods of a Service are replaced again and again while pods, a node and a
//! machine outside of the cluster open connections. The bench fails if a request fails while pods
//! ask the drain barrier before they stop.
//!
//! A second part compares the barrier with a sleep of 5 seconds and with no wait, on nodes that
//! change their rules as slowly as kube-proxy can. Every write of IPv4 rules takes a second, which
//! is kube-proxy's default `minSyncPeriod`, and on one of the three nodes `--slow-node-seconds`.
//! The default of 5 seconds is what one write takes for 10,000
//! Services in kube-proxy's shape. A change that arrives during a write waits for the end of the
//! write, and then for its own write, as with kube-proxy.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::report::Figure;
use crate::{
    cases::{
        rollout::{self, Seen, Wait},
        wrap_restore,
    },
    testbed::{Backend, Manifests, Testbed, netns, plan::NODES},
};

/// The pods, in the batches in which they are replaced.
const BATCHES: [&[&str]; 2] = [&["a1", "b1", "c1"], &["a2", "b2", "c2"]];
/// The node whose rules change most slowly. Its own connections and its pods' connections use them.
const SLOW_NODE: &str = "node-c";
/// The time of a write on the other nodes, in seconds.
const USUAL_SECONDS: f64 = 1.0;
const SLEEP: Duration = Duration::from_secs(5);
/// The second part has one roll for this number of rolls, because each of its rolls takes about
/// half a minute.
const SLOW_SHARE: usize = 20;

/// Options of the bench.
#[derive(Debug, Clone, clap::Args)]
pub struct Rollouts {
    /// How often all pods are replaced (rollouts)
    #[arg(long, value_name = "N", default_value_t = if cfg!(debug_assertions) { 3 } else { 200 })]
    pub rolls: usize,
    /// Time of each write of rules on the slowest node (rollouts)
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub slow_node_seconds: f64,
}

/// Runs the bench.
///
/// # Errors
/// A program does not start, or a request fails while pods ask the barrier.
pub fn run(options: &Rollouts) -> Result<Vec<Figure>> {
    netns::check_prerequisites()?;
    netns::sweep_stale()?;
    let slow_rolls = options.rolls.div_ceil(SLOW_SHARE);
    let fast = measure(options.rolls, Wait::Barrier, None)?;
    let slow = |wait| measure(slow_rolls, wait, Some(options.slow_node_seconds));
    let (barrier, sleep, none) = (slow(Wait::Barrier)?, slow(Wait::Sleep(SLEEP))?, slow(Wait::Sleep(Duration::ZERO))?);
    let mut figures = Vec::new();
    let parts = [
        ("barrier", &fast, options.rolls, None),
        ("slow-nodes/barrier", &barrier, slow_rolls, Some(&sleep)),
        ("slow-nodes/sleep-5s", &sleep, slow_rolls, None),
        ("slow-nodes/no-wait", &none, slow_rolls, Some(&sleep)),
    ];
    for (what, total, rolls, anchor) in parts {
        let mut add = |figure: &str, unit, value: &dyn Fn(&Total) -> f64| {
            let name = format!("rollouts/{what}/{figure}/{rolls}");
            figures.push(match anchor {
                Some(anchor) => Figure::against(name, value(total), unit, "sleep 5", value(anchor)),
                None => Figure::alone(name, value(total), unit),
            });
        };
        add("failed-requests", "", &|total| total.failed as f64);
        add("requests", "", &|total| total.requests as f64);
        add("average-time-to-stop", "s", &Total::average_seconds);
    }
    Ok(figures)
}

#[derive(Debug, Default)]
struct Total {
    requests: usize,
    failed: usize,
    waits: Vec<Duration>,
}

impl Total {
    fn average_seconds(&self) -> f64 {
        self.waits.iter().map(Duration::as_secs_f64).sum::<f64>() / self.waits.len().max(1) as f64
    }
}

/// Replaces all pods `rolls` times. With `slow_node_seconds`, writes of rules are delayed.
fn measure(rolls: usize, wait: Wait, slow_node_seconds: Option<f64>) -> Result<Total> {
    let folder = tempfile::tempdir().context("creating a folder")?;
    let mut tools: BTreeMap<&str, PathBuf> = BTreeMap::new();
    if let Some(slow_seconds) = slow_node_seconds {
        for node in &NODES {
            let seconds = if node.name == SLOW_NODE { slow_seconds } else { USUAL_SECONDS };
            let path = folder.path().join(node.name);
            std::fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
            // The agent's questions to the program are not delayed.
            wrap_restore(&path, &["iptables"], |_, program| {
                let program = program.display();
                format!("case \"$*\" in *--version*|*--test*) ;; *) sleep {seconds} ;; esac\nexec '{program}' \"$@\"\n")
            })?;
            tools.insert(node.name, path);
        }
    }
    let bed = Testbed::machines_only(Backend::IptablesNft, Manifests::default())?;
    rollout::start(&bed, &BATCHES.concat(), |node| tools.get(node).cloned())?;
    let mut total = Total::default();
    for number in 1..=rolls {
        let Seen { requests, failed, waits } = rollout::roll(&bed, &BATCHES, 1, wait)?;
        ensure!(
            failed.is_empty() || !matches!(wait, Wait::Barrier),
            "{} of {requests} requests failed in roll {number} although pods asked the barrier: {failed:?}",
            failed.len()
        );
        total.requests += requests;
        total.failed += failed.len();
        total.waits.extend(waits);
    }
    Ok(total)
}
