//! Runs a command and writes its answer.

use std::io::Write;
use std::time::Duration;

use headgate_proto::v1::{GetStatusRequest, GetStatusResponse, WatchAgentsRequest};
use tokio::time::interval;

use crate::answer::{Failure, Session, write_data};
use crate::args::{self, Args, Command, MigrateArgs, Output, Selected};
use crate::certs::{self, CertsError, Written, rotation};
use crate::render::{self, Style};
use crate::{agents, complete, dashboard, drain, explain, list, migrate, node, verify, version, wait};

/// How often `status --watch` may print, and after how many times it prints although nothing has
/// changed but the time.
const REDRAW: (Duration, u32) = (Duration::from_secs(1), 15);

/// Runs one command and writes its answer to `out`, until the reader closes the pipe.
pub async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let has_names = matches!(args.command, Command::Services(_) | Command::Endpoints(_) | Command::Agents(_));
    if args.output == Output::Name && !has_names {
        return Err(Failure::Usage("--output name works with services, endpoints and agents".to_owned()));
    }
    let done = match &args.command {
        Command::Certs(certs) => local(certs::make(certs), args.output, style, out),
        Command::Ca(ca) => local(rotation::run(ca), args.output, style, out),
        Command::Migrate(MigrateArgs::Check(check)) => migrate::check(check, args.output, style, out),
        Command::Dashboard(wanted) => dashboard::run(args, wanted, out).await,
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
fn local(
    written: Result<Written, CertsError>,
    output: Output,
    style: Style,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let Written { text, json } = written?;
    match output.is_data() {
        true => write_data(out, output, &json),
        false => Ok(out.write_all(render::fit(&text, style).as_bytes())?),
    }
}

/// Runs a command that asks a replica.
async fn ask(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    // The selection is checked before any connection is opened.
    let selected = args.command.selected().map_err(Failure::Usage)?;
    let mut session = Session::open(args, style, out).await?;
    let session = &mut session;
    match &args.command {
        Command::Services(wanted) => list::services(session, wanted, selected).await,
        Command::Endpoints(wanted) => list::endpoints(session, wanted, selected).await,
        Command::Watch(_) => session.watch(selected).await,
        Command::Status { watch: false } => session.print_status(false).await,
        Command::Status { watch: true } => session.watch_status().await,
        Command::Agents(wanted) => agents::run(session, wanted).await,
        Command::Node(wanted) => node::run(session, wanted).await,
        Command::Counters(wanted) => node::counters(session, wanted, selected).await,
        Command::Connections(wanted) => node::connections(session, wanted, selected).await,
        Command::Explain(wanted) => explain::run(session, wanted, selected).await,
        Command::Verify(wanted) => verify::run(session, wanted).await,
        Command::Wait(wanted) => wait::run(session, wanted, selected).await,
        Command::Drain(wanted) => drain::run(session, wanted).await,
        // These commands contact no server, or connect themselves.
        _ => Ok(()),
    }
}

impl Session<'_> {
    pub(crate) async fn status(&mut self) -> Result<GetStatusResponse, Failure> {
        let answer = self.replica.client.get_status(GetStatusRequest::default()).await;
        let mut status = answer.map_err(|status| self.refused(&status))?.into_inner();
        status.fleet.get_or_insert_default();
        Ok(status)
    }

    async fn print_status(&mut self, is_watch: bool) -> Result<(), Failure> {
        let status = self.status().await?;
        match self.output.is_data() {
            true if is_watch => self.write_item(&status),
            true => self.write_data(&status),
            false => self.write(&render::status(&status, self.style)),
        }
    }

    /// Prints the status when the Services or the nodes change. A terminal shows only the last one.
    async fn watch_status(&mut self) -> Result<(), Failure> {
        let everything = Selected { namespace: String::new(), name: String::new() };
        let mut events = self.events(&everything).await?;
        let answer = self.replica.client.watch_agents(WatchAgentsRequest::default()).await;
        let mut agents = self.stream(answer)?;
        let is_terminal = self.style.width.is_some() && !self.output.is_data();
        let (mut ticks, mut idle) = (interval(REDRAW.0), REDRAW.1);
        loop {
            tokio::select! {
                event = self.next(&mut events) => {
                    event?;
                    idle = REDRAW.1;
                }
                change = self.next(&mut agents) => {
                    change?;
                    idle = REDRAW.1;
                }
                _ = ticks.tick() => {
                    idle += 1;
                    if idle > REDRAW.1 {
                        idle = 0;
                        let clear = if is_terminal { "\u{1b}[H\u{1b}[J" } else { "" };
                        self.out.write_all(clear.as_bytes())?;
                        self.print_status(true).await?;
                        self.out.flush()?;
                    }
                }
            }
        }
    }

    async fn watch(&mut self, selected: Selected) -> Result<(), Failure> {
        let mut events = self.events(&selected).await?;
        loop {
            let event = self.next(&mut events).await?;
            match self.output.is_data() {
                true => self.write_item(&event)?,
                false => self.write(&(render::event(&event, self.style) + "\n"))?,
            }
            self.out.flush()?;
        }
    }
}
