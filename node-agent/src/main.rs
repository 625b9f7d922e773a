//! Parses the command line, builds, runs.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use headgate_node_agent::{backend, options::Options};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let options = Options::parse();
    match start(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            eprintln!("headgate-node-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: Options) -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_new(&options.log).context("--log: not a filter such as info or headgate_node_agent=debug")?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    if options.cleanup {
        for sentence in backend::cleanup_all(&options)? {
            info!("{sentence}");
        }
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(options))
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
