//! The reasons why a stream ends.

use std::time::Duration;

use tonic::Status;

use super::{connect::ConnectError, failover::Trouble, machine::Violation, replicas::Replica};

/// Maximum time from the connection to `Welcome`. A replica that is behind the agent sends
/// `Welcome` before it waits until it has caught up.
pub(super) const WELCOME_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("no Welcome within {} s", WELCOME_TIMEOUT.as_secs())]
    NoWelcome,
    #[error("the replica ended the stream: {} ({})", .0.message(), .0.code())]
    Status(Box<Status>),
    #[error("the replica closed the stream")]
    Closed,
    #[error("the replica breaks the protocol: {0}")]
    Violation(#[from] Violation),
    #[error("the replica sent nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    #[error("the replica asked the agent to connect to another replica: {0}")]
    Drained(String),
    #[error("moving to {to}, because {}", .trouble.reason())]
    Moved { to: Box<Replica>, trouble: Trouble },
    #[error("the certificate was renewed, and the old certificate expires soon")]
    Renewed,
}

impl StreamEnd {
    /// The value of the metric label `reason`, from a small fixed set.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(ConnectError::Files(_)) => "tls_files",
            Self::Connect(ConnectError::Refused(_)) => "tls",
            Self::Connect(_) => "connect",
            Self::NoWelcome => "no_welcome",
            Self::Status(_) => "status",
            Self::Closed => "closed",
            Self::Violation(Violation::VersionGap { .. }) => "version_gap",
            Self::Violation(Violation::Reference(_)) => "unknown_reference",
            Self::Violation(_) => "protocol",
            Self::Silent(_) => "silent",
            Self::Drained(_) => "drained",
            Self::Moved { trouble, .. } => trouble.label(),
            Self::Renewed => "renewed",
        }
    }
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}
