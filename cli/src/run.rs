//! Runs a command and writes its answer.

use std::io::{self, Write};

use headgate_proto::v1::inspect_client::InspectClient;
use headgate_proto::v1::{GetStatusRequest, ListEndpointsRequest, ListServicesRequest, WatchRequest};
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::args::{Args, Command, Output, Selected, Selection};
use crate::certs::{self, CertsArgs, CertsError};
use crate::client::{self, ConnectError};
use crate::json;
use crate::render::{self, Style};
use crate::{agents, wait};

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line cannot be followed.
    #[error("{0}\nFor more information, try '--help'.")]
    Usage(String),
    /// No connection.
    #[error(transparent)]
    Connect(ConnectError),
    /// What was asked for does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The replica refused or broke off.
    #[error("{server} answered {code:?}: {message}")]
    Server {
        /// The URL asked.
        server: String,
        /// gRPC code.
        code: Code,
        /// What it said.
        message: String,
    },
    /// Some replicas could not be asked, so that what was shown is not all.
    #[error("this is without the agents of {} of {replicas} replicas:{}", failures.len(), listed(failures))]
    Missing {
        /// How many there are.
        replicas: usize,
        /// Why the others could not be asked.
        failures: Vec<Failure>,
    },
    /// Certificates cannot be made.
    #[error(transparent)]
    Certs(#[from] CertsError),
    /// The time is up and some nodes have not programmed what was waited for.
    #[error("{0}")]
    TimedOut(String),
    /// Standard output cannot be written.
    #[error("writing the answer: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Whether the reader of the answer has closed the pipe.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// 2 for usage, 3 for a wait whose time is up, 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Connect(ConnectError::Usage(_)) | Self::Certs(CertsError::Usage(_)) => 2,
            Self::TimedOut(_) => 3,
            Self::Connect(_)
            | Self::Certs(_)
            | Self::NotFound(_)
            | Self::Server { .. }
            | Self::Missing { .. }
            | Self::Output(_) => 1,
        }
    }
}

/// Each on lines of its own.
fn listed(failures: &[Failure]) -> String {
    failures.iter().map(|failure| format!("\n{failure}")).collect()
}

/// Runs one command and writes its answer to `out`. A reader that closes the pipe early (`| head`) ends it in peace.
pub async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let done = match &args.command {
        Command::Certs(certs) => make_certs(certs, args.output, out),
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
            Command::Agents(_) | Command::Status | Command::Certs(_) => {
                Selected { namespace: String::new(), name: String::new() }
            }
        };
        match &args.command {
            Command::Agents(agents) => return agents::run(args, agents, style, out).await,
            Command::Wait(wait) => return wait::run(args, wait, selected, out).await,
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
            Command::Agents(_) | Command::Wait(_) | Command::Certs(_) => Ok(()),
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
        self.list(&services, json::service, render::services, &empty)
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
        self.list(&endpoints, json::endpoint, render::endpoints, &empty)
    }

    async fn status(&mut self) -> Result<(), Failure> {
        let answer = self.client.get_status(GetStatusRequest {}).await;
        let status = answer.map_err(|status| self.refused(&status))?.into_inner();
        match self.output {
            Output::Json => self.write_json(&json::status(&status)),
            Output::Table | Output::Wide => Ok(self.out.write_all(render::status(&status, self.style).as_bytes())?),
        }
    }

    async fn watch(&mut self, selected: Selected) -> Result<(), Failure> {
        let request = WatchRequest { namespace: selected.namespace, name: selected.name };
        let answer = self.client.watch(request).await;
        let mut events = answer.map_err(|status| self.refused(&status))?.into_inner();
        while let Some(event) = events.message().await.map_err(|status| self.refused(&status))? {
            match self.output {
                Output::Json => serde_json::to_writer(&mut *self.out, &json::event(&event)).map_err(io::Error::from)?,
                Output::Table | Output::Wide => self.out.write_all(render::event(&event, self.style).as_bytes())?,
            }
            self.out.write_all(b"\n")?;
            self.out.flush()?;
        }
        let message = "the replica ended the watch; start it again to follow on".to_owned();
        Err(Failure::Server { server: self.server.to_owned(), code: Code::Unavailable, message })
    }

    async fn collect<T>(&self, answer: Result<tonic::Response<Streaming<T>>, Status>) -> Result<Vec<T>, Failure> {
        collect(self.server, answer).await
    }

    fn list<T>(
        &mut self,
        items: &[T],
        to_json: impl Fn(&T) -> Value,
        to_table: impl Fn(&[T], Style) -> String,
        empty: &str,
    ) -> Result<(), Failure> {
        match self.output {
            Output::Json => self.write_json(&Value::Array(items.iter().map(to_json).collect())),
            Output::Table | Output::Wide if items.is_empty() => Ok(writeln!(self.out, "{empty}")?),
            Output::Table | Output::Wide => Ok(self.out.write_all(to_table(items, self.style).as_bytes())?),
        }
    }

    fn write_json(&mut self, value: &Value) -> Result<(), Failure> {
        write_json(self.out, value)
    }

    fn refused(&self, status: &Status) -> Failure {
        refused(self.server, status)
    }
}

pub(crate) async fn collect<T>(
    server: &str,
    answer: Result<tonic::Response<Streaming<T>>, Status>,
) -> Result<Vec<T>, Failure> {
    let mut stream = answer.map_err(|status| refused(server, &status))?.into_inner();
    let mut items = Vec::new();
    while let Some(item) = stream.message().await.map_err(|status| refused(server, &status))? {
        items.push(item);
    }
    Ok(items)
}

pub(crate) fn write_json(out: &mut dyn Write, value: &Value) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}

pub(crate) fn refused(server: &str, status: &Status) -> Failure {
    if client::is_silence(status) {
        return Failure::Connect(client::silent(server));
    }
    if let Some(misaddressed) = client::misaddressed(server, status) {
        return Failure::Connect(misaddressed);
    }
    if let Some(broken) = client::broken(server, status) {
        return Failure::Connect(broken);
    }
    let message = if status.message().is_empty() { client::chain(status) } else { status.message().to_owned() };
    let message = render::plain(&message).into_owned();
    Failure::Server { server: server.to_owned(), code: status.code(), message }
}

fn resolve(selection: &Selection) -> Result<Selected, Failure> {
    selection.resolve().map_err(Failure::Usage)
}

fn no_such_service(selected: &Selected) -> String {
    format!("no service {}/{}: `headgatectl services` lists those that there are", selected.namespace, selected.name)
}

pub(crate) fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
