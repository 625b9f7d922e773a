//! `--cleanup-stay`: the cleanup of a DaemonSet, whose pods wait for another proxy, clean their
//! node, and stay.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tracing::info;

use crate::{
    options::Options,
    other_proxy::{Looker, ReadRules, Synced},
};

/// How long a pod waits for another proxy, before it ends with the reason. The kubelet starts it
/// again.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_secs(1);
/// The time between an older kube-proxy's rules of its first IP family and those of the other,
/// which its metrics do not tell apart.
const OTHER_FAMILY: Duration = Duration::from_secs(10);
/// What the probe of the pod looks for.
const IS_CLEAN: &str = "/tmp/headgate-is-clean";

/// Waits until another proxy has written its rules. The error says that none has.
pub(super) fn until_replaced(options: &Options) -> anyhow::Result<()> {
    let settings = options.configured()?.settings;
    let (mut looker, began) = (Looker::new(&settings), Instant::now());
    loop {
        match looker.look(ReadRules::No).synced {
            Some(Synced::All) => break,
            Some(Synced::Some) if began.elapsed() >= Synced::NO_MORE_AFTER => break,
            Some(Synced::Some) => {}
            Some(Synced::None) | None => anyhow::ensure!(
                began.elapsed() < PATIENCE,
                "--cleanup-stay: no other service proxy says in its metrics that it has written its rules on this node, \
                 so Headgate's rules stay, because nothing else would forward. Let kube-proxy return first (headgatectl \
                 migrate run --back), write the address of its metrics as --metrics-bind-address, or remove the rules in \
                 any case (--cleanup-stay=always)"
            ),
        }
        thread::sleep(PAUSE);
    }
    thread::sleep(OTHER_FAMILY);
    Ok(())
}

/// Tells the probe that the node is clean, and returns only with an error.
pub(super) fn stay() -> anyhow::Result<()> {
    fs::write(IS_CLEAN, "").with_context(|| format!("--cleanup-stay: writing {IS_CLEAN}"))?;
    info!("this node is clean");
    loop {
        thread::park();
    }
}
