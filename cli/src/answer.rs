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
    /// The certificates cannot be created.
    #[error(transparent)]
    Certs(#[from] CertsError),
    /// The replica returned an error, nodes differ or are not verified, or settings are invalid.
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
    /// The API server cannot be reached, or refuses.
    #[error("{0}")]
    Cluster(String),
    /// `migrate run`: only a person can stop kube-proxy in this cluster.
    #[error("{0}")]
    ByHand(String),
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
    /// - 3: `wait`, `drain`, `cleanup`: nodes have not done in time what was waited for; `migrate
    ///   run`: stopped at a doubt
    /// - 4: `wait`, `verify`: only Nodes without an agent are missing, or there is no Node
    /// - 5: `migrate run`: only a person can stop kube-proxy in this cluster
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Connect(ConnectError::Usage(_)) | Self::Certs(CertsError::Usage(_)) => 2,
            Self::TimedOut(_) => 3,
            Self::Absent(_) => 4,
            Self::ByHand(_) => 5,
            _ => 1,
        }
    }
}

/// A command with its connection to a replica.
pub(crate) struct Session<'a> {
    pub replica: Replica,
    pub output: Output,
    pub style: Style,
    /// True if the command prints several answers: each is a line of JSON, or a document of YAML.
    pub is_one_of_many: bool,
    pub out: &'a mut dyn Write,
}

impl<'a> Session<'a> {
    /// Connects to the first replica of `--server` that answers.
    pub(crate) async fn open(args: &Args, style: Style, out: &'a mut dyn Write) -> Result<Self, Failure> {
        let replica = client::connect(&args.server, &args.tls).await.map_err(Failure::Connect)?;
        Ok(Self { style, is_one_of_many: args.command.is_watch(), ..Self::new(replica, args.output, out) })
    }

    /// Takes a connection that is there, for one answer of any width.
    pub(crate) fn new(replica: Replica, output: Output, out: &'a mut dyn Write) -> Self {
        Self { replica, output, style: Style::default(), is_one_of_many: false, out }
    }

    /// Collects all items of a streamed answer.
    pub(crate) async fn collect<T>(&self, answer: Result<Response<Streaming<T>>, Status>) -> Result<Vec<T>, Failure> {
        let mut stream = self.stream(answer)?;
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
        let code = status.code();
        let message = if status.message().is_empty() { code.description() } else { status.message() };
        let message = render::plain(message).into_owned();
        match code {
            // These errors name the object and the remedy.
            Code::NotFound => Failure::NotFound(message),
            Code::FailedPrecondition => Failure::Faulty(message),
            Code::Unimplemented => {
                Failure::Faulty("the control plane is older than this headgatectl: upgrade it".to_owned())
            }
            _ => Failure::Faulty(format!("{server}: {message}")),
        }
    }

    /// Writes text, which is broken into lines that fit into the terminal.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), Failure> {
        self.out.write_all(render::fit(text, self.style).as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Writes an answer as JSON or YAML.
    pub(crate) fn write_data(&mut self, answer: &impl Serialize) -> Result<(), Failure> {
        self.out.write_all(data(self.output, answer, self.is_one_of_many)?.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Writes an answer as JSON or YAML, or as this text.
    pub(crate) fn show(&mut self, answer: &impl Serialize, text: impl FnOnce(Style) -> String) -> Result<(), Failure> {
        match self.output.is_data() {
            true => self.write_data(answer),
            false => self.write(&text(self.style)),
        }
    }

    /// The messages of a stream.
    pub(crate) fn stream<T>(&self, answer: Result<Response<Streaming<T>>, Status>) -> Result<Streaming<T>, Failure> {
        Ok(answer.map_err(|status| self.refused(&status))?.into_inner())
    }

    /// The next message of a stream that has no end.
    pub(crate) async fn next<T>(&self, stream: &mut Streaming<T>) -> Result<T, Failure> {
        let ended = || Status::unavailable("the replica ended the watch: run the command again to continue");
        let message = stream.message().await.and_then(|message| message.ok_or_else(ended));
        message.map_err(|status| self.refused(&status))
    }
}

/// Formats an answer as JSON or YAML, always with every field of `headgate.v1.Inspect`. One of many
/// answers is a line of JSON, or a document of YAML.
pub(crate) fn data(output: Output, answer: &impl Serialize, is_one_of_many: bool) -> Result<String, Failure> {
    let value = serde_json::to_value(answer).map_err(io::Error::from)?;
    let text = match output {
        Output::Yaml => {
            let begin = if is_one_of_many { "---\n" } else { "" };
            begin.to_owned() + &serde_saphyr::to_string(&value).map_err(io::Error::other)?
        }
        _ if is_one_of_many => format!("{value}\n"),
        _ => format!("{value:#}\n"),
    };
    Ok(render::plain_json(&text))
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
