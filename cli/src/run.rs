//! Runs a command and writes its answer.

use std::io::{self, Write};

use headgate_proto::v1::inspect_client::InspectClient;
use headgate_proto::v1::{GetStatusRequest, ListEndpointsRequest, ListServicesRequest, WatchRequest};
use serde::Serialize;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::answer::{Failure, collect, of_status, write_json};
use crate::args::{Args, Command, MigrateArgs, Output, Selected, Selection};
use crate::certs::{
    self, CertsArgs,
    rotation::{self, CaArgs},
};
use crate::client;
use crate::render::{self, Style};
use crate::{agents, drain, explain, migrate, node, verify, wait};

/// Runs one command and writes its answer to `out`. If the reader closes the pipe early (`| head`),
/// the command ends without an error.
pub async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let done = match &args.command {
        Command::Certs(certs) => make_certs(certs, args.output, out),
        Command::Ca(ca) => change_authority(ca, args.output, out),
        Command::Migrate(MigrateArgs::Check(check)) => migrate::check(check, args.output, style, out),
        _ => Session::run(args, style, out).await,
    };
    match done {
        Err(failure) if failure.is_closed_pipe() => Ok(()),
        result => result,
    }
}

fn make_certs(args: &CertsArgs, output: Output, out: &mut dyn Write) -> Result<(), Failure> {
    let made = certs::make(args)?;
    match output {
        Output::Json => Ok(writeln!(out, "{:#}", made.json())?),
        Output::Table | Output::Wide => Ok(out.write_all(made.text().as_bytes())?),
    }
}

fn change_authority(args: &CaArgs, output: Output, out: &mut dyn Write) -> Result<(), Failure> {
    let changed = rotation::run(args)?;
    match output {
        Output::Json => Ok(writeln!(out, "{:#}", changed.json())?),
        Output::Table | Output::Wide => Ok(out.write_all(changed.text().as_bytes())?),
    }
}

struct Session<'a> {
    client: InspectClient<Channel>,
    server: &'a str,
    output: Output,
    style: Style,
    out: &'a mut dyn Write,
}

impl<'a> Session<'a> {
    async fn run(args: &'a Args, style: Style, out: &'a mut dyn Write) -> Result<(), Failure> {
        // The selection is checked before any connection is opened.
        let selected = match &args.command {
            Command::Services(selection) | Command::Endpoints(selection) | Command::Watch(selection) => {
                resolve(selection)?
            }
            Command::Wait(wait) => wait.resolve().map_err(Failure::Usage)?,
            Command::Explain(explain) => explain.resolve().map_err(Failure::Usage)?,
            Command::Agents(_)
            | Command::Node(_)
            | Command::Counters(_)
            | Command::Connections(_)
            | Command::Drain(_)
            | Command::Verify(_)
            | Command::Status
            | Command::Certs(_)
            | Command::Ca(_)
            | Command::Migrate(_) => Selected { namespace: String::new(), name: String::new() },
        };
        match &args.command {
            Command::Agents(agents) => return agents::run(args, agents, style, out).await,
            Command::Node(wanted) => return node::run(args, wanted, style, out).await,
            Command::Counters(wanted) => {
                let selected = wanted.resolve().map_err(Failure::Usage)?;
                return node::counters(args, wanted, selected, style, out).await;
            }
            Command::Connections(wanted) => {
                let selected = wanted.of.resolve().map_err(Failure::Usage)?;
                return node::connections(args, wanted, selected, style, out).await;
            }
            Command::Wait(wait) => return wait::run(args, wait, selected, out).await,
            Command::Explain(wanted) => return explain::run(args, wanted, selected, style, out).await,
            Command::Verify(wanted) => return verify::run(args, wanted, style, out).await,
            Command::Drain(pod) => return drain::run(args, pod, out).await,
            _ => {}
        }
        let server = args.server.first().map_or("", String::as_str);
        let client = client::connect(server, &args.tls).await.map_err(Failure::Connect)?;
        let mut session = Self { client, server, output: args.output, style, out };
        match &args.command {
            Command::Services(_) => session.services(selected).await,
            Command::Endpoints(_) => session.endpoints(selected).await,
            Command::Watch(_) => session.watch(selected).await,
            Command::Status => session.status().await,
            // These commands are handled above.
            Command::Agents(_)
            | Command::Node(_)
            | Command::Counters(_)
            | Command::Connections(_)
            | Command::Explain(_)
            | Command::Wait(_)
            | Command::Drain(_)
            | Command::Verify(_)
            | Command::Certs(_)
            | Command::Ca(_)
            | Command::Migrate(_) => Ok(()),
        }
    }

    async fn services(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = ListServicesRequest { namespace: selected.namespace.clone(), name: selected.name.clone() };
        let answer = self.client.list_services(request).await;
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
        let answer = self.client.list_endpoints(request).await;
        let endpoints = match self.collect(answer).await {
            Err(Failure::Server { code: Code::NotFound, .. }) => {
                return Err(Failure::NotFound(no_such_service(&selected)));
            }
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
        let answer = self.client.get_status(GetStatusRequest {}).await;
        let mut status = answer.map_err(|status| self.refused(&status))?.into_inner();
        status.fleet.get_or_insert_default();
        match self.output {
            Output::Json => write_json(self.out, &status),
            Output::Table | Output::Wide => Ok(self.out.write_all(render::status(&status, self.style).as_bytes())?),
        }
    }

    async fn watch(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = WatchRequest { namespace: selected.namespace, name: selected.name };
        let answer = self.client.watch(request).await;
        let mut events = answer.map_err(|status| self.refused(&status))?.into_inner();
        while let Some(event) = events.message().await.map_err(|status| self.refused(&status))? {
            match self.output {
                Output::Json => write!(self.out, "{}", serde_json::to_value(event).map_err(io::Error::from)?)?,
                Output::Table | Output::Wide => self.out.write_all(render::event(&event, self.style).as_bytes())?,
            }
            self.out.write_all(b"\n")?;
            self.out.flush()?;
        }
        let message = "the replica ended the watch; run the command again to continue".to_owned();
        Err(Failure::Server { server: self.server.to_owned(), code: Code::Unavailable, message })
    }

    async fn collect<T>(&self, answer: Result<tonic::Response<Streaming<T>>, Status>) -> Result<Vec<T>, Failure> {
        collect(self.server, answer).await
    }

    fn list<T: Serialize>(
        &mut self,
        items: &[T],
        to_table: impl Fn(&[T], Style) -> String,
        empty: &str,
    ) -> Result<(), Failure> {
        match self.output {
            Output::Json => write_json(self.out, &items),
            Output::Table | Output::Wide if items.is_empty() => Ok(writeln!(self.out, "{empty}")?),
            Output::Table | Output::Wide => Ok(self.out.write_all(to_table(items, self.style).as_bytes())?),
        }
    }

    fn refused(&self, status: &Status) -> Failure {
        of_status(self.server, status)
    }
}

fn resolve(selection: &Selection) -> Result<Selected, Failure> {
    selection.resolve().map_err(Failure::Usage)
}

fn no_such_service(selected: &Selected) -> String {
    format!("no service {}/{}: `headgatectl services` lists the existing services", selected.namespace, selected.name)
}
