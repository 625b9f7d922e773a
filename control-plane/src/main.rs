//! Parses the command line, and runs the control plane until SIGTERM or SIGINT.

use std::{
    io::{IsTerminal as _, Write as _, stderr},
    process::ExitCode,
};

use anyhow::anyhow;
use clap::Parser as _;
use headgate_control_plane::{
    options::{LogFormat, Options},
    run::run,
};
use headgate_listener::open_files;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> ExitCode {
    let Err(error) = run_until_signal(&Options::parse()).await else { return ExitCode::SUCCESS };
    // The error names its remedy, so a backtrace is not needed.
    let _ = writeln!(stderr(), "headgate-control-plane: {error}");
    ExitCode::FAILURE
}

async fn run_until_signal(options: &Options) -> anyhow::Result<()> {
    // The source logs each failed request with its kind and remedy, so the log of the API client is
    // off unless --log turns it on.
    let filter = EnvFilter::try_new(format!("kube_client=off,{}", options.log));
    let filter = filter.map_err(|error| anyhow!("--log {}: {error}; pass a level such as info", options.log))?;
    let ansi = stderr().is_terminal();
    // The program goes on if nobody reads the log any more. The subscriber would print the error of
    // a write to standard error, and panic there.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(ansi);
    let log = log.log_internal_errors(false);
    match options.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    open_files::raise();
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
