//! Runs a command and writes its answer.

use std::io::Write;
use std::time::Duration;

use headgate_proto::v1::{GetStatusRequest, GetStatusResponse, WatchAgentsRequest, WatchEvent, WatchRequest};
use tokio::time::interval;
use tonic::Streaming;

use crate::answer::{Failure, Session, data};
use crate::args::{self, Args, Command, MigrateArgs, Output, Selected};
use crate::certs::{self, CertsError, Written, rotation};
use crate::render::{self, Style};
use crate::{agents, cleanup, complete, dashboard, drain, explain, list, migrate, node, shadow, verify, version, wait};

/// How often --watch may print.
const REDRAW: Duration = Duration::from_secs(1);
/// After how many such times a terminal is drawn anew although only the time has changed.
const IDLE: u32 = 15;

/// Runs one command and writes its answer to `out`, until the reader closes the pipe.
pub async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let has_names = matches!(args.command, Command::Services(_) | Command::Endpoints(_) | Command::Agents(_));
    if args.output == Output::Name && !has_names {
        return Err(Failure::Usage("--output name works with services, endpoints and agents".to_owned()));
    }
    let done = match &args.command {
        Command::Certs(certs) => local(certs::make(certs), args, style, out),
        Command::Ca(ca) => local(rotation::run(ca), args, style, out),
        Command::Migrate(MigrateArgs::Check(check)) => migrate::check(check, args.output, style, out),
        Command::Migrate(MigrateArgs::Run(wanted)) => migrate::run::run(args, wanted, style, out).await,
        Command::Cleanup(wanted) => cleanup::run(wanted, out).await,
        Command::Dashboard { port } => dashboard::run(args, *port, out).await,
        Command::Version => version::run(args, style, out).await,
        Command::Completion { shell } => complete::script(shell, out),
        Command::Man { folder } => clap_mangen::generate_to(args::command(), folder)
            .map_err(|error| Failure::Faulty(format!("{}: {error}", folder.display()))),
        _ => ask(args, style, out).await,
    };
    match done {
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Writes what a command has done that contacts no server.
fn local(written: Result<Written, CertsError>, args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let Written { text, json } = written?;
    let text = match args.output.is_data() {
        true => data(args.output, &json, false)?,
        false => render::fit(&text, style).into_owned(),
    };
    Ok(out.write_all(text.as_bytes())?)
}

/// Runs a command that asks a replica.
async fn ask(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    // The selection is checked before any connection is opened.
    let selected = args.command.selected().map_err(Failure::Usage)?;
    let mut session = Session::open(args, style, out).await?;
    let session = &mut session;
    match &args.command {
        Command::Watch(_) => session.watch(&selected).await,
        command if command.is_watch() => session.follow(command, &selected).await,
        command => session.answer(command, &selected).await,
    }
}

impl Session<'_> {
    /// Answers once.
    pub(crate) async fn answer(&mut self, command: &Command, selected: &Selected) -> Result<(), Failure> {
        match command {
            Command::Services(wanted) => list::services(self, wanted, selected).await,
            Command::Endpoints(wanted) => list::endpoints(self, wanted, selected).await,
            Command::Status { .. } => {
                let status = self.status(0).await?;
                self.show(&status, |style| render::status(&status, style))
            }
            Command::Agents(wanted) => agents::run(self, wanted).await,
            Command::Node(wanted) => node::run(self, wanted).await,
            Command::Counters(wanted) => node::counters(self, wanted, selected).await,
            Command::Connections(wanted) => node::connections(self, wanted, selected).await,
            Command::Explain(wanted) => explain::run(self, wanted, selected).await,
            Command::Verify(wanted) => verify::run(self, wanted).await,
            Command::Shadow(wanted) => shadow::run(self, wanted).await,
            Command::Wait(wanted) => wait::run(self, wanted, selected).await,
            Command::Drain(wanted) => drain::run(self, wanted).await,
            // These commands contact no server, or connect themselves.
            _ => Ok(()),
        }
    }

    /// The status of the replica, with this number of the last changes.
    pub(crate) async fn status(&mut self, last_changes: u32) -> Result<GetStatusResponse, Failure> {
        let request = GetStatusRequest { last_changes, ..GetStatusRequest::default() };
        let answer = self.replica.client.get_status(request).await;
        let mut status = answer.map_err(|status| self.refused(&status))?.into_inner();
        status.fleet.get_or_insert_default();
        Ok(status)
    }

    /// Answers when the selected Services, their endpoints or the nodes change. A terminal shows
    /// only the last answer.
    async fn follow(&mut self, command: &Command, selected: &Selected) -> Result<(), Failure> {
        let (mut events, mut nodes) = (None, None);
        if !matches!(command, Command::Agents(_)) {
            events = Some(self.events(selected).await?);
        }
        if matches!(command, Command::Agents(_) | Command::Status { .. }) {
            let answer = self.replica.client.watch_agents(WatchAgentsRequest::default()).await;
            nodes = Some(self.stream(answer)?);
        }
        let is_terminal = self.style.width.is_some() && !self.output.is_data();
        let (mut ticks, mut has_changed, mut idle) = (interval(REDRAW), true, 0);
        loop {
            tokio::select! {
                changed = self.changed(&mut events) => has_changed = changed?,
                changed = self.changed(&mut nodes) => has_changed = changed?,
                _ = ticks.tick() => {
                    idle += 1;
                    if has_changed || (is_terminal && idle >= IDLE) {
                        write!(self.out, "{}", if is_terminal { "\u{1b}[H\u{1b}[J" } else { "" })?;
                        self.answer(command, selected).await?;
                        (has_changed, idle) = (false, 0);
                    }
                }
            }
        }
    }

    /// Waits for a message of a stream, or without end.
    async fn changed<T>(&self, stream: &mut Option<Streaming<T>>) -> Result<bool, Failure> {
        match stream {
            Some(stream) => self.next(stream).await.map(|_| true),
            None => std::future::pending().await,
        }
    }

    /// Follows changes from now on.
    async fn events(&mut self, of: &Selected) -> Result<Streaming<WatchEvent>, Failure> {
        let request = WatchRequest { namespace: of.namespace.clone(), name: of.name.clone() };
        let answer = self.replica.client.watch(request).await;
        self.stream(answer)
    }

    async fn watch(&mut self, of: &Selected) -> Result<(), Failure> {
        let mut events = self.events(of).await?;
        loop {
            let event = self.next(&mut events).await?;
            self.show(&event, |style| render::event(&event, style) + "\n")?;
        }
    }
}
