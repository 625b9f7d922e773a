//! The control plane and the agent of a cluster with one node, in one process. The agent's stream
//! uses a socket that only the user of the process can open, so no certificates are needed.

mod options;

use std::{io::Write as _, pin::pin, process::ExitCode};

use headgate_control_plane::run::{ControlPlane, RunError};
use headgate_node_agent::{memory, program};
use tokio_util::sync::CancellationToken;

use self::options::Options;

fn main() -> ExitCode {
    let options = Options::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let Err(error) = start(options) else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stderr(), "headgate: {error:#}");
    ExitCode::FAILURE
}

fn start(options: Options) -> anyhow::Result<()> {
    memory::use_one_heap();
    // The source logs each failed request with its kind and remedy, so the log of the API client is
    // off unless --log turns it on.
    program::start_log(&format!("kube_client=off,{}", options.agent.log), options.agent.log_format)?;
    if program::run_task(&options.agent)? {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(run(options))
}

async fn run(Options { control_plane, agent }: Options) -> anyhow::Result<()> {
    let agent_shutdown = program::cancelled_by_signals()?;
    // The control plane serves until the agent has ended, because an agent in mode userspace
    // programs changes while its connections end.
    let shutdown = CancellationToken::new();
    let control_plane =
        ControlPlane::start(&control_plane, shutdown.clone()).await.map_err(|error| sentence(&error))?;
    let mut control_plane = tokio::spawn(control_plane.run());
    let mut agent = pin!(headgate_node_agent::run(agent, agent_shutdown.clone()));
    tokio::select! {
        ended = &mut agent => {
            shutdown.cancel();
            control_plane.await?.map_err(|error| sentence(&error))?;
            ended?;
        }
        ended = &mut control_plane => {
            agent_shutdown.cancel();
            agent.await?;
            ended?.map_err(|error| sentence(&error))?;
        }
    }
    Ok(())
}

/// An error of the control plane contains its causes, so the printed error has none.
fn sentence(error: &RunError) -> anyhow::Error {
    anyhow::Error::msg(error.to_string())
}
