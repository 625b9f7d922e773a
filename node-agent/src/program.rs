//! What the programs that contain an agent share: the log, the signals, and the tasks that end.

mod cleanup;

use std::io::{IsTerminal as _, stderr};

use anyhow::{Context as _, anyhow};
use headgate_settings as settings;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use crate::{
    dataplane::iptables,
    dataplane_choice, instance,
    options::{CleanupStay, LogFormat, Options},
    other_proxy::{self, Looker, ReadRules},
    persist, run,
};

/// Starts the log of the process, on standard error. Errors: `--log` is no filter.
pub fn start_log(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| anyhow!("--log: {error}; write a filter such as info or headgate_node_agent=debug"))?;
    // The program goes on if nobody reads the log any more. The subscriber would print the error of
    // a write to standard error, and panic there.
    let log = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let log = log.with_writer(stderr).with_ansi(stderr().is_terminal());
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}

/// Returns a token that SIGTERM and SIGINT cancel. Must be called in a tokio runtime.
/// Errors: the system registers no signal handler.
pub fn cancelled_by_signals() -> std::io::Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("stopping");
        stop.cancel();
    });
    Ok(shutdown)
}

/// Runs the task that the options name: `--write-config-to`, `--cleanup` or `--init-only`. Returns
/// false if they name no task. Errors: the task failed. The error names the remedy.
pub fn run_task(options: &Options) -> anyhow::Result<bool> {
    if let Some(path) = &options.write_config_to {
        settings::write_defaults(path)?;
        info!(path = %path.display(), "wrote the default configuration");
    } else if options.cleanup {
        let is_beside_proxy = options.cleanup_stay == Some(CleanupStay::BesideProxy);
        if is_beside_proxy {
            cleanup::until_replaced(options)?;
        }
        clean(options, is_beside_proxy)?;
        if options.cleanup_stay.is_some() {
            cleanup::stay()?;
        }
    } else if options.init_only {
        let settings = options.configured()?.settings;
        if let Some(other) = other_proxy::that_works(options, &settings) {
            info!("--init-only: no kernel parameter is set, because {other} runs on this node");
            return Ok(true);
        }
        run::prepare(&settings)?;
        dataplane_choice::prepare(&settings, options.iptables_variant)?;
        info!("--init-only: kernel parameters are set");
    } else {
        return Ok(false);
    }
    Ok(true)
}

/// Removes everything of Headgate. Beside another proxy, an agent stands by and writes nothing.
fn clean(options: &Options, is_beside_proxy: bool) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("starting a runtime")?;
    let agent = runtime.block_on(instance::running()).context("--cleanup: looking for an agent on this node")?;
    if let Some(process) = agent.filter(|_| !is_beside_proxy) {
        let process = if process == 0 { "in another container".into() } else { format!("process {process}") };
        anyhow::bail!(
            "--cleanup: an agent of Headgate runs on this node ({process}), and would write its rules again: stop the agent, and repeat --cleanup"
        );
    }
    let settings = options.configured()?.settings;
    let other = Looker::new(&settings).look(ReadRules::No).other;
    let running = other.as_ref().map(|other| {
        info!("{other} runs on this node: its rules and other objects stay");
        other.uses().with_context(|| {
            format!("--cleanup: {other} runs on this node, and does not tell its mode; write the address of kube-proxy's metrics as --metrics-bind-address, or stop it")
        })
    });
    let running = running.transpose()?;
    let failed = dataplane_choice::remove_leftovers(&settings, running);
    if let Some(sentence) = iptables::left_settings() {
        warn!("{sentence}");
    }
    if let Some(folder) = options.state_folder().filter(|_| agent.is_none()) {
        let help = || format!("--cleanup: removing the saved state in {}", folder.display());
        persist::remove(folder).with_context(help)?;
    }
    anyhow::ensure!(
        failed.is_empty(),
        "--cleanup: rules or other objects of {} may remain; see the errors above",
        failed.join(", ")
    );
    Ok(())
}
