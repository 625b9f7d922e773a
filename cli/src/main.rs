//! Queries control plane replicas through their `Inspect` service. See `headgatectl --help`.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use headgatectl::args;
use headgatectl::render::{self, Style};
use terminal_size::terminal_size_of;

fn main() -> ExitCode {
    headgatectl::answer_shell();
    let args = args::parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = terminal_size_of(std::io::stdout()).map(|(width, _)| width.0.into());
    let style = Style { colour: std::io::stdout().is_terminal() && !plain, width };
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
    let width = terminal_size_of(std::io::stderr()).map(|(width, _)| width.0.into());
    let text = format!("headgatectl: {}", text.join("\n"));
    let _ = writeln!(std::io::stderr(), "{}", render::fit(&text, Style { colour: false, width }));
    ExitCode::from(failure.exit_code())
}
