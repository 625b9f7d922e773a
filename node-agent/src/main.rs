//! The program: parses the command line, then runs the agent or the one task that a flag names.

use std::{io::Write as _, process::ExitCode};

use headgate_node_agent::{memory, options::Options, program};

fn main() -> ExitCode {
    let options = Options::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let Err(error) = start(options) else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stderr(), "headgate-node-agent: {error:#}");
    ExitCode::FAILURE
}

fn start(options: Options) -> anyhow::Result<()> {
    memory::use_one_heap();
    program::start_log(&options.log, options.log_format)?;
    if program::run_task(&options)? {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let shutdown = program::cancelled_by_signals()?;
        Ok(headgate_node_agent::run(options, shutdown).await?)
    })
}
