//! Runs a command and writes its answer.

use std::io::{self, Write};

use headgate_proto::v1::{GetStatusRequest, ListEndpointsRequest, ListServicesRequest, WatchRequest};
use serde::Serialize;
use tonic::Code;

use crate::answer::{Failure, Session};
use crate::args::{Args, Command, MigrateArgs, Output, Selected};
use crate::certs::{self, CertsError, Written, rotation};
use crate::render::{self, Style};
use crate::{agents, dashboard, drain, explain, migrate, node, shadow, verify, wait};

/// Runs one command and writes its answer to `out`, until the reader closes the pipe.
pub async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let done = match &args.command {
        Command::Certs(certs) => local(certs::make(certs), args.output, out),
        Command::Ca(ca) => local(rotation::run(ca), args.output, out),
        Command::Migrate(MigrateArgs::Check(check)) => migrate::check(check, args.output, style, out),
        Command::Dashboard(wanted) => dashboard::run(args, wanted, out).await,
        _ => ask(args, style, out).await,
    };
    match done {
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Writes what a command has done that contacts no server.
fn local(written: Result<Written, CertsError>, output: Output, out: &mut dyn Write) -> Result<(), Failure> {
    let Written { text, json } = written?;
    match output {
        Output::Json => Ok(writeln!(out, "{json:#}")?),
        Output::Table | Output::Wide => Ok(out.write_all(text.as_bytes())?),
    }
}

/// Runs a command that asks a replica.
async fn ask(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    // The selection is checked before any connection is opened.
    let selected = args.command.selected().map_err(Failure::Usage)?;
    let mut session = Session::open(args, style, out).await?;
    let session = &mut session;
    match &args.command {
        Command::Services(_) => session.services(selected).await,
        Command::Endpoints(_) => session.endpoints(selected).await,
        Command::Watch(_) => session.watch(selected).await,
        Command::Status => session.status().await,
        Command::Agents(wanted) => agents::run(session, wanted).await,
        Command::Node(wanted) => node::run(session, wanted).await,
        Command::Counters(wanted) => node::counters(session, wanted, selected).await,
        Command::Connections(wanted) => node::connections(session, wanted, selected).await,
        Command::Explain(wanted) => explain::run(session, wanted, selected).await,
        Command::Verify(wanted) => verify::run(session, wanted).await,
        Command::Shadow(wanted) => shadow::run(session, wanted).await,
        Command::Wait(wanted) => wait::run(session, wanted, selected).await,
        Command::Drain(wanted) => drain::run(session, wanted).await,
        // These commands contact no server, or connect themselves.
        Command::Certs(_) | Command::Ca(_) | Command::Migrate(_) | Command::Dashboard(_) => Ok(()),
    }
}

impl Session<'_> {
    async fn services(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = ListServicesRequest { namespace: selected.namespace.clone(), name: selected.name.clone() };
        let answer = self.replica.client.list_services(request).await;
        let services = self.collect(answer).await?;
        if services.is_empty() && !selected.name.is_empty() {
            return Err(Failure::NotFound(no_such_service(&selected)));
        }
        let empty = if selected.namespace.is_empty() {
            "No services.".to_owned()
        } else {
            format!("No services in namespace {}.", selected.namespace)
        };
        self.list(&services, render::services, &empty)
    }

    async fn endpoints(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = ListEndpointsRequest { namespace: selected.namespace.clone(), name: selected.name.clone() };
        let answer = self.replica.client.list_endpoints(request).await;
        let endpoints = match self.collect(answer).await {
            Err(Failure::NotFound(_)) => return Err(Failure::NotFound(no_such_service(&selected))),
            result => result?,
        };
        let empty = if selected.name.is_empty() {
            "No endpoints.".to_owned()
        } else {
            format!("Service {}/{} has no endpoints.", selected.namespace, selected.name)
        };
        self.list(&endpoints, render::endpoints, &empty)
    }

    async fn status(&mut self) -> Result<(), Failure> {
        let answer = self.replica.client.get_status(GetStatusRequest::default()).await;
        let mut status = answer.map_err(|status| self.refused(&status))?.into_inner();
        status.fleet.get_or_insert_default();
        match self.output {
            Output::Json => self.write_json(&status),
            Output::Table | Output::Wide => self.write(&render::status(&status, self.style)),
        }
    }

    async fn watch(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = WatchRequest { namespace: selected.namespace, name: selected.name };
        let answer = self.replica.client.watch(request).await;
        let mut events = answer.map_err(|status| self.refused(&status))?.into_inner();
        while let Some(event) = events.message().await.map_err(|status| self.refused(&status))? {
            match self.output {
                Output::Json => {
                    let value = serde_json::to_value(event).map_err(io::Error::from)?;
                    write!(self.out, "{}", render::plain_json(&value.to_string()))?;
                }
                Output::Table | Output::Wide => self.out.write_all(render::event(&event, self.style).as_bytes())?,
            }
            self.out.write_all(b"\n")?;
            self.out.flush()?;
        }
        let message = "the replica ended the watch; run the command again to continue".to_owned();
        Err(Failure::Server { server: self.replica.server.clone(), code: Code::Unavailable, message })
    }

    fn list<T: Serialize>(
        &mut self,
        items: &[T],
        to_table: impl Fn(&[T], Style) -> String,
        empty: &str,
    ) -> Result<(), Failure> {
        match self.output {
            Output::Json => self.write_json(&items),
            Output::Table | Output::Wide if items.is_empty() => self.write(&format!("{empty}\n")),
            Output::Table | Output::Wide => self.write(&to_table(items, self.style)),
        }
    }
}

fn no_such_service(selected: &Selected) -> String {
    format!("no service {}/{}: `headgatectl services` lists the existing services", selected.namespace, selected.name)
}
