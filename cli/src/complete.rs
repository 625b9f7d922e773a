//! Completion in shells. The shell runs this program with its words, and gets the candidates.

use std::io::{self, Write};
use std::time::Duration;

use clap::{Arg, FromArgMatches as _};
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCandidates, CompletionCandidate},
    env::Shells,
};

use crate::answer::{Failure, Session};
use crate::args::{self, Output, Selected, TlsArgs};
use crate::{agents, client, list};

/// The environment variable by which the script of a shell asks for candidates.
const VARIABLE: &str = "HEADGATECTL_COMPLETE";
/// The longest time for the names. The shell waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Answers a shell that asks for candidates, and ends the program. Returns if no shell asks.
pub fn answer_shell() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Writes the script of a shell.
pub(crate) fn script(shell: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let shells = Shells::builtins();
    // The command line allows no other shell.
    let Some(shell) = shells.completer(shell) else { return Ok(()) };
    Ok(shell.write_registration(VARIABLE, "headgatectl", "headgatectl", "headgatectl", out)?)
}

/// The command line with candidates for the names of nodes and Services.
fn command() -> clap::Command {
    let with_names = |arg: Arg| match arg.get_id().as_str() {
        "node" | "from" => arg.add(ArgValueCandidates::new(|| candidates(true).unwrap_or_default())),
        "service" => arg.add(ArgValueCandidates::new(|| candidates(false).unwrap_or_default())),
        _ => arg,
    };
    // The nodes of new certificates are not known yet.
    let is_asked = |command: &clap::Command| command.get_name() != "certs";
    args::command().mut_subcommands(|command| if is_asked(&command) { command.mut_args(with_names) } else { command })
}

/// Asks a replica for names. None if no replica answers in time: a shell shows no errors.
fn candidates(of_nodes: bool) -> Option<Vec<CompletionCandidate>> {
    // The words of the user's line come after "--".
    let line = std::env::args_os().skip_while(|word| word != "--").skip(1);
    let matches = args::command().ignore_errors(true).try_get_matches_from(line).ok()?;
    let servers: Vec<String> = matches.get_many("server")?.cloned().collect();
    let tls = TlsArgs::from_arg_matches(&matches).ok()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let names = async {
        let replica = client::connect(&servers, &tls).await.ok()?;
        let mut sink = io::sink();
        let session = &mut Session::new(replica, Output::Name, &mut sink);
        let names: Vec<String> = match of_nodes {
            true => agents::list(session, "").await.ok()?.into_iter().map(|agent| agent.node).collect(),
            false => session.services(&Selected::default()).await.ok()?.iter().map(list::name).collect(),
        };
        Some(names.into_iter().map(CompletionCandidate::new).collect())
    };
    runtime.block_on(async { tokio::time::timeout(TIMEOUT, names).await.ok().flatten() })
}
