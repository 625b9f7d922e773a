//! Parses the command line, and runs the control plane until SIGTERM or SIGINT.

use std::{
    io::{IsTerminal as _, stderr},
    process::ExitCode,
};

use anyhow::anyhow;
use clap::Parser as _;
use headgate_control_plane::{open_files, options::Options, run::run};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> ExitCode {
    match run_until_signal(&Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line for people; the error says what to do, a backtrace would not.
            eprintln!("headgate-control-plane: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run_until_signal(options: &Options) -> anyhow::Result<()> {
    // The client of the API server logs each request that fails; the source says the same in the
    // next line, with kind and remedy. --log may ask for it.
    let filter = EnvFilter::try_new(format!("kube_client=off,{}", options.log));
    let filter = filter.map_err(|error| anyhow!("--log {}: {error}; pass a level such as info", options.log))?;
    let ansi = stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(ansi).init();
    if let Err(error) = open_files::raise() {
        tracing::warn!(%error, "the limit of open files (ulimit -n) cannot be raised: each agent takes one");
    }
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let token = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        token.cancel();
    });
    Ok(run(options, shutdown).await?)
}
