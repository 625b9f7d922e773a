//! Queries control plane replicas through their `Inspect` service. See `headgatectl --help`.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use headgatectl::args::Args;
use headgatectl::render::{self, Style};

fn main() -> ExitCode {
    let args = Args::parse();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let style = Style { colour: std::io::stdout().is_terminal() && !plain };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "headgatectl: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(headgatectl::run(&args, style, &mut std::io::stdout().lock()));
    let Err(failure) = done else { return ExitCode::SUCCESS };
    // Parts of the text may come from a replica or from manifests.
    let text: Vec<String> = failure.to_string().lines().map(|line| render::plain(line).into_owned()).collect();
    let _ = writeln!(std::io::stderr(), "headgatectl: {}", text.join("\n"));
    ExitCode::from(failure.exit_code())
}
