//! Parses the command line, and runs the control plane until SIGTERM or SIGINT.

use anyhow::Context as _;
use clap::Parser as _;
use headgate_control_plane::{options::Options, run::run};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let filter = EnvFilter::try_new(&options.log).with_context(|| format!("--log {:?}", options.log))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
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
    Ok(run(&options, shutdown).await?)
}
