//! What the programs that contain an agent share: the log, the signals, and the tasks that end.

use std::io::{IsTerminal as _, stderr};

use anyhow::{Context as _, anyhow};
use headgate_settings as settings;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use crate::{
    dataplane::{ErrorKind, iptables},
    dataplane_choice,
    options::{LogFormat, Options},
    persist, run,
};

/// Starts the log of the process, on standard error.
///
/// # Errors
/// `--log` is no filter.
pub fn start_log(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| anyhow!("--log: {error}; write a filter such as info or headgate_node_agent=debug"))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(stderr().is_terminal());
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}

/// Returns a token that SIGTERM and SIGINT cancel. Must be called in a tokio runtime.
///
/// # Errors
/// The system registers no signal handler.
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
/// false if they name no task.
///
/// # Errors
/// The task failed. The error names the remedy.
pub fn run_task(options: &Options) -> anyhow::Result<bool> {
    if let Some(path) = &options.write_config_to {
        settings::write_defaults(path)?;
        info!(path = %path.display(), "wrote the default configuration");
    } else if options.cleanup {
        clean(options)?;
    } else if options.init_only {
        let settings = options.configured()?.settings;
        run::prepare(&settings)?;
        dataplane_choice::prepare(&settings)?;
        info!("--init-only: kernel parameters are set");
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn clean(options: &Options) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for leftover in dataplane_choice::leftovers(&options.configured()?.settings) {
        let backend = leftover.name;
        match leftover.remove() {
            Ok(()) => info!(backend, "no rules or other objects of this backend remain"),
            Err(error) if error.kind == ErrorKind::Unavailable => {
                info!(backend, %error, "this machine does not support the backend, so nothing had to be removed");
            }
            Err(error) => {
                error!(backend, %error, "cannot remove everything");
                failed.push(backend);
            }
        }
    }
    if let Some(sentence) = iptables::left_settings() {
        warn!("{sentence}");
    }
    if let Some(folder) = options.state_folder() {
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
