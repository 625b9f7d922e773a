//! The program: parses the command line, then runs the agent or the one task that a flag names.

use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use headgate_node_agent::{
    dataplane::{ErrorKind, iptables},
    dataplane_choice,
    options::{LogFormat, Options},
    persist,
};
use headgate_settings as settings;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let options = Options::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    match start(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("headgate-node-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: Options) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&options.log)
        .map_err(|error| anyhow!("--log: {error}; write a filter such as info or headgate_node_agent=debug"))?;
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    match options.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    if let Some(path) = &options.write_config_to {
        settings::write_defaults(path)?;
        info!(path = %path.display(), "wrote the default configuration");
        return Ok(());
    }
    if options.cleanup {
        return clean(&options);
    }
    if options.init_only {
        let settings = options.configured()?.settings;
        headgate_node_agent::prepare(&settings)?;
        dataplane_choice::prepare(&settings)?;
        info!("--init-only: kernel parameters are set");
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(options))
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

async fn run(options: Options) -> anyhow::Result<()> {
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
    Ok(headgate_node_agent::run(options, shutdown).await?)
}
