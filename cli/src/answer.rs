//! The connection of a command, its answer, and why it failed.

use std::io::{self, Write};

use headgate_settings::ConfigError;
use serde::Serialize;
use tonic::{Code, Response, Status, Streaming};

use crate::args::{Args, Output};
use crate::certs::CertsError;
use crate::client::{self, ConnectError, Replica};
use crate::render::{self, Style};
use crate::units;

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
    /// The certificates cannot be created.
    #[error(transparent)]
    Certs(#[from] CertsError),
    /// Nodes differ or are not verified, or settings of kube-proxy are invalid.
    #[error("{0}")]
    Faulty(String),
    /// kube-proxy's configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nodes have not done in time what was waited for.
    #[error("{0}")]
    TimedOut(String),
    /// Only Nodes without an agent are missing, or there is no Node at all.
    #[error("{0}")]
    Absent(String),
    /// Standard output cannot be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// The exit code. A command that succeeds ends with 0.
    ///
    /// - 1: no replica answers, or another error; `verify`: differences, or nodes that are not
    ///   verified
    /// - 2: the command line is wrong
    /// - 3: `wait`, `drain`: nodes have not done in time what was waited for
    /// - 4: `wait`, `verify`: only Nodes without an agent are missing, or there is no Node
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Connect(ConnectError::Usage(_)) | Self::Certs(CertsError::Usage(_)) => 2,
            Self::TimedOut(_) => 3,
            Self::Absent(_) => 4,
            _ => 1,
        }
    }
}

/// A command with its connection to a replica.
pub(crate) struct Session<'a> {
    pub replica: Replica,
    pub output: Output,
    pub style: Style,
    pub out: &'a mut dyn Write,
}

impl<'a> Session<'a> {
    /// Connects to the first replica of `--server` that answers.
    pub(crate) async fn open(args: &Args, style: Style, out: &'a mut dyn Write) -> Result<Self, Failure> {
        let replica = client::connect(&args.server, &args.tls).await.map_err(Failure::Connect)?;
        Ok(Self { replica, output: args.output, style, out })
    }

    /// Collects all items of a streamed answer.
    pub(crate) async fn collect<T>(&self, answer: Result<Response<Streaming<T>>, Status>) -> Result<Vec<T>, Failure> {
        let mut stream = answer.map_err(|status| self.refused(&status))?.into_inner();
        let mut items = Vec::new();
        while let Some(item) = stream.message().await.map_err(|status| self.refused(&status))? {
            items.push(item);
        }
        Ok(items)
    }

    /// Converts a gRPC status to a failure that names the server.
    pub(crate) fn refused(&self, status: &Status) -> Failure {
        let server = &self.replica.server;
        if let Some(error) = client::failure(server, status) {
            return Failure::Connect(error);
        }
        let message = if status.message().is_empty() { client::chain(status) } else { status.message().to_owned() };
        let message = render::plain(&message).into_owned();
        match status.code() {
            // These errors name the object and the remedy.
            Code::NotFound => Failure::NotFound(message),
            code => Failure::Server { server: server.clone(), code, message },
        }
    }

    pub(crate) fn write(&mut self, text: &str) -> Result<(), Failure> {
        Ok(self.out.write_all(text.as_bytes())?)
    }

    pub(crate) fn write_json(&mut self, answer: &impl Serialize) -> Result<(), Failure> {
        write_json(self.out, answer)
    }
}

/// Writes an answer as indented JSON, always with every field of `headgate.v1.Inspect`.
pub(crate) fn write_json(out: &mut dyn Write, answer: &impl Serialize) -> Result<(), Failure> {
    let value = serde_json::to_value(answer).map_err(io::Error::from)?;
    Ok(writeln!(out, "{}", render::plain_json(&format!("{value:#}")))?)
}

pub(crate) fn now_unix_ms() -> u64 {
    units::milliseconds(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default())
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
        macro_rules! check {
            ($($message:ident)*) => {
                $(assert_eq!(keys(&v1::$message::default()), fields_of(stringify!($message)));)*
            };
        }
        check! {
            ServiceInfo ServicePortInfo EndpointInfo AgentInfo GetStatusResponse ReplicaInfo
            Problem FleetInfo SourceAge SourcePosition WaitAnswer Laggard
            WatchEvent NodeStatus Rejection ServiceCounters Connections OpenConnection
            Explanation Drift NodeVerification ExplainedEndpoint Shadow ChangeTimes
        }
    }

    #[test]
    fn kinds_of_positions_are_written_by_name() {
        let mut position = v1::SourcePosition { position: 7, ..Default::default() };
        position.set_kind(v1::source_position::Kind::EndpointSlices);
        let value = serde_json::to_value(position).unwrap();
        assert_eq!(value, serde_json::json!({ "kind": "ENDPOINT_SLICES", "position": 7 }));
    }
}
