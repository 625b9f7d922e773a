//! Collects and writes the answers of a replica, and describes why a command failed.

use std::io::{self, Write};

use headgate_settings::ConfigError;
use serde::Serialize;
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
    /// Some nodes differ, or are not verified. The output names them.
    #[error("{0}")]
    Unverified(String),
    /// kube-proxy's configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Settings of kube-proxy are invalid. The output names them.
    #[error("{0}")]
    Invalid(String),
    /// The wait timed out before all nodes had programmed the change.
    #[error("{0}")]
    TimedOut(String),
    /// Standard output cannot be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Returns whether the reader of the answer has closed the pipe.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The exit code: 2 for a wrong command line, 3 for a wait that timed out, and 1 for any other
    /// failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Connect(ConnectError::Usage(_)) | Self::Certs(CertsError::Usage(_)) => 2,
            Self::TimedOut(_) => 3,
            Self::Connect(_)
            | Self::Certs(_)
            | Self::Config(_)
            | Self::Invalid(_)
            | Self::Unverified(_)
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

/// Writes an answer as indented JSON and a line feed. Field names and units are the same as in
/// `headgate.v1.Inspect`. The JSON always contains every field, so that programs can rely on each
/// field.
pub(crate) fn write_json(out: &mut dyn Write, answer: &impl Serialize) -> Result<(), Failure> {
    let value = serde_json::to_value(answer).map_err(io::Error::from)?;
    Ok(writeln!(out, "{value:#}")?)
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use headgate_proto::v1;

    use super::*;

    /// The field names of a message in the compiled protocol.
    fn fields_of(message: &str) -> BTreeSet<String> {
        use prost::Message as _;
        let set = prost_types::FileDescriptorSet::decode(headgate_proto::FILE_DESCRIPTOR_SET).unwrap();
        let found = set.file.iter().flat_map(|file| &file.message_type).find(|found| found.name() == message);
        found.unwrap().field.iter().map(|field| field.name().to_owned()).collect()
    }

    fn keys(answer: &impl Serialize) -> BTreeSet<String> {
        serde_json::to_value(answer).unwrap().as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn json_contains_every_field_of_the_protocol_under_its_name() {
        assert_eq!(keys(&v1::ServiceInfo::default()), fields_of("ServiceInfo"));
        assert_eq!(keys(&v1::ServicePortInfo::default()), fields_of("ServicePortInfo"));
        assert_eq!(keys(&v1::EndpointInfo::default()), fields_of("EndpointInfo"));
        assert_eq!(keys(&v1::AgentInfo::default()), fields_of("AgentInfo"));
        assert_eq!(keys(&v1::GetStatusResponse::default()), fields_of("GetStatusResponse"));
        assert_eq!(keys(&v1::Problem::default()), fields_of("Problem"));
        assert_eq!(keys(&v1::FleetInfo::default()), fields_of("FleetInfo"));
        assert_eq!(keys(&v1::SourceAge::default()), fields_of("SourceAge"));
        assert_eq!(keys(&v1::SourcePosition::default()), fields_of("SourcePosition"));
        assert_eq!(keys(&v1::WaitProgress::default()), fields_of("WaitProgress"));
        assert_eq!(keys(&v1::Laggard::default()), fields_of("Laggard"));
        assert_eq!(keys(&v1::WatchEvent::default()), fields_of("WatchEvent"));
        assert_eq!(keys(&v1::NodeStatus::default()), fields_of("NodeStatus"));
        assert_eq!(keys(&v1::Rejection::default()), fields_of("Rejection"));
        assert_eq!(keys(&v1::ServiceCounters::default()), fields_of("ServiceCounters"));
        assert_eq!(keys(&v1::Connections::default()), fields_of("Connections"));
        assert_eq!(keys(&v1::OpenConnection::default()), fields_of("OpenConnection"));
        assert_eq!(keys(&v1::Explanation::default()), fields_of("Explanation"));
        assert_eq!(keys(&v1::Drift::default()), fields_of("Drift"));
        assert_eq!(keys(&v1::NodeVerification::default()), fields_of("NodeVerification"));
        assert_eq!(keys(&v1::ExplainedEndpoint::default()), fields_of("ExplainedEndpoint"));
    }

    #[test]
    fn kinds_of_positions_are_written_by_name() {
        let mut position = v1::SourcePosition { position: 7, ..Default::default() };
        position.set_kind(v1::source_position::Kind::EndpointSlices);
        let value = serde_json::to_value(position).unwrap();
        assert_eq!(value, serde_json::json!({ "kind": "ENDPOINT_SLICES", "position": 7 }));
    }
}
