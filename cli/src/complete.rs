//! Completion in shells. The shell runs this program with its words, and gets the candidates.

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use clap::FromArgMatches as _;
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCandidates, CompletionCandidate},
    env::Shells,
};

use crate::answer::{Failure, Session};
use crate::args::{self, Output, Selected, TlsArgs};
use crate::list::Row as _;
use crate::render::Style;
use crate::{agents, client};

/// The environment variable by which the script of a shell asks for candidates.
const VARIABLE: &str = "HEADGATECTL_COMPLETE";
/// The longest time for the names. The shell waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Answers a shell that asks for candidates, and ends the program. Returns if no shell asks.
pub fn answer_shell() {
    CompleteEnv::with_factory(args::command).var(VARIABLE).complete();
}

/// Writes the script of a shell.
pub(crate) fn script(shell: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let name = "headgatectl";
    // The command line allows only shells that the library knows.
    Ok(Shells::builtins()
        .completer(shell)
        .ok_or_else(|| io::Error::other("unknown shell"))?
        .write_registration(VARIABLE, name, name, name, out)?)
}

/// Completes the name of a node.
pub(crate) fn nodes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        candidates(async |session| {
            let agents = agents::list(session, "").await?;
            Ok(agents.into_iter().map(|agent| agent.node).collect())
        })
    })
}

/// Completes the name of a Service.
pub(crate) fn services() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        candidates(async |session| {
            let all = Selected { namespace: String::new(), name: String::new() };
            Ok(session.services(&all).await?.iter().map(|service| service.name()).collect())
        })
    })
}

/// Asks a replica for names. None if no replica answers in time: a shell shows no errors.
fn candidates(ask: impl AsyncFn(&mut Session<'_>) -> Result<Vec<String>, Failure>) -> Vec<CompletionCandidate> {
    let names = || {
        // The words of the user's line come after "--".
        let line = std::env::args_os().skip_while(|word| word != "--").skip(1).collect::<Vec<OsString>>();
        let matches = args::command().ignore_errors(true).try_get_matches_from(line).ok()?;
        let servers: Vec<String> = matches.get_many("server")?.cloned().collect();
        let tls = TlsArgs::from_arg_matches(&matches).ok()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let names = runtime.block_on(tokio::time::timeout(TIMEOUT, async {
            let replica = client::connect(&servers, &tls).await.ok()?;
            let mut sink = io::sink();
            let mut session = Session { replica, output: Output::Name, style: Style::default(), out: &mut sink };
            ask(&mut session).await.ok()
        }));
        names.ok().flatten()
    };
    names().unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}
