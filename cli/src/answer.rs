//! Collects and writes the answers of a replica, and describes why a command failed.

use std::io::{self, Write};

use serde_json::Value;
use tonic::{Code, Status, Streaming};

use crate::certs::CertsError;
use crate::client::{self, ConnectError};
use crate::render;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line is wrong.
    #[error("{0}\nFor more information, try '--help'.")]
    Usage(String),
    /// The replica cannot be reached.
    #[error(transparent)]
    Connect(ConnectError),
    /// The requested object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The replica returned a gRPC error, or the connection broke.
    #[error("{server} answered {code:?}: {message}")]
    Server {
        /// The URL of the replica.
        server: String,
        /// The gRPC status code.
        code: Code,
        /// The message of the replica.
        message: String,
    },
    /// Some replicas did not answer, so the output is incomplete.
    #[error("the agents of {} of {replicas} replicas are missing:{}", failures.len(), listed(failures))]
    Missing {
        /// Number of replicas.
        replicas: usize,
        /// One failure for each replica that did not answer.
        failures: Vec<Failure>,
    },
    /// The certificates cannot be created.
    #[error(transparent)]
    Certs(#[from] CertsError),
    /// The wait timed out before all nodes had programmed the change.
    #[error("{0}")]
    TimedOut(String),
    /// Standard output cannot be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Whether the reader of the answer has closed the pipe.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The exit code: 2 for wrong usage, 3 for a wait that timed out, otherwise 1.
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

/// Formats each failure on a new line.
fn listed(failures: &[Failure]) -> String {
    failures.iter().map(|failure| format!("\n{failure}")).collect()
}

/// Collects all items of a streamed answer.
pub(crate) async fn collect<T>(
    server: &str,
    answer: Result<tonic::Response<Streaming<T>>, Status>,
) -> Result<Vec<T>, Failure> {
    let mut stream = answer.map_err(|status| of_status(server, &status))?.into_inner();
    let mut items = Vec::new();
    while let Some(item) = stream.message().await.map_err(|status| of_status(server, &status))? {
        items.push(item);
    }
    Ok(items)
}

/// Writes indented JSON and a line feed.
pub(crate) fn write_json(out: &mut dyn Write, value: &Value) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}

/// Converts a gRPC status to a failure that names the server.
pub(crate) fn of_status(server: &str, status: &Status) -> Failure {
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

/// The current time in milliseconds since the Unix epoch.
pub(crate) fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
