//! Where objects come from.

mod files;
mod kubernetes;

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    model::Event,
    objects::ObjectKind,
    transaction::{Problem, Sink},
};

/// What a manifest defines; for [`crate::fuzz`].
pub(crate) fn manifest_events(name: &str, bytes: &[u8]) -> Vec<Event> {
    files::events(name, bytes)
}

/// What the lines of a watch say, up to the first that is no event.
pub(crate) fn watch_events(kind: ObjectKind, bytes: &[u8]) -> Vec<Event> {
    kubernetes::watch_events(kind, bytes)
}

/// What is on a page of a list; nothing if it is none.
pub(crate) fn list_events(kind: ObjectKind, bytes: &[u8]) -> Vec<Event> {
    kubernetes::list_events(kind, bytes)
}

/// Which source to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceSpec {
    /// `files:DIR`: a folder of manifests.
    Files(PathBuf),
    /// `kubernetes`: an API server.
    Kubernetes,
}

/// How to read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSettings {
    /// For `kubernetes`: the configuration's file; without it that of the cluster around the pod.
    pub kubeconfig: Option<PathBuf>,
    /// For `kubernetes`: a watch in which nothing comes for so long is opened anew.
    pub watch_silence: Duration,
}

impl SourceSettings {
    /// Two bookmarks may be late: servers send one about every minute.
    pub const DEFAULT_WATCH_SILENCE: Duration = Duration::from_secs(150);
}

impl Default for SourceSettings {
    fn default() -> Self {
        Self { kubeconfig: None, watch_silence: Self::DEFAULT_WATCH_SILENCE }
    }
}

/// A source that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no source: write \"kubernetes\", or \"files:\" and a folder such as files:/etc/headgate")]
pub struct SourceSpecError(String);

impl FromStr for SourceSpec {
    type Err = SourceSpecError;

    fn from_str(text: &str) -> Result<Self, SourceSpecError> {
        match text.split_once(':') {
            Some(("files", folder)) if !folder.is_empty() => Ok(Self::Files(folder.into())),
            None if text == "kubernetes" => Ok(Self::Kubernetes),
            _ => Err(SourceSpecError(text.to_owned())),
        }
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files(folder) => write!(f, "files:{}", folder.display()),
            Self::Kubernetes => f.write_str("kubernetes"),
        }
    }
}

/// Why a source cannot be read at all. None goes away by trying again: each asks for a person.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Neither inside a cluster nor told of one.
    #[error("not inside a cluster ({0}): give --kubeconfig PATH, or --source files:DIR")]
    NotInCluster(String),
    /// The kubeconfig cannot be used.
    #[error("the kubeconfig {path} cannot be used: {why}")]
    Kubeconfig {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No client can be made of the configuration.
    #[error("no API client can be made of the configuration: {0}")]
    Client(String),
    /// A kubeconfig with a source that has no use for it.
    #[error("--kubeconfig {0} says nothing to {1}: leave it out, or choose --source kubernetes")]
    UselessKubeconfig(PathBuf, SourceSpec),
    /// The folder cannot be read.
    #[error("the folder {path} cannot be read: {why}: make it, or name another in --source files:DIR")]
    Folder {
        /// Where it should be.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A watch ended by itself, which is a defect.
    #[error("a watch ended by itself: {0}; please report this")]
    WatchEnded(String),
}

/// Reads a source until `shutdown`, and hands what changes to `sink`.
///
/// # Errors
/// See [`SourceError`]. A source that is away for a time, or partly bad, is no error: that is
/// counted and shown by `sink`.
pub async fn run(
    spec: SourceSpec,
    settings: SourceSettings,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    match (spec, settings.kubeconfig.clone()) {
        (SourceSpec::Kubernetes, _) => kubernetes::run(settings, sink, shutdown).await,
        (spec @ SourceSpec::Files(_), Some(path)) => Err(SourceError::UselessKubeconfig(path, spec)),
        (SourceSpec::Files(folder), None) => files::run(folder, sink, shutdown).await,
    }
}

/// Hands on the list of problems, and logs those that were not on it before.
fn show_problems(sink: &dyn Sink, shown: &mut Vec<Problem>, problems: Vec<Problem>) {
    for problem in problems.iter().filter(|problem| shown.binary_search(problem).is_err()) {
        let Problem { object, field, origin, message } = problem;
        tracing::warn!(object, field, origin, "{message}");
    }
    shown.clone_from(&problems);
    sink.problems(problems);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sources_are_read_and_printed_alike() {
        for text in ["kubernetes", "files:/tmp/x", "files:a:b"] {
            assert_eq!(text.parse::<SourceSpec>().unwrap().to_string(), text);
        }
        for text in ["", "files", "files:", "kubernetes:", "etcd:x", "/tmp/x"] {
            let error = text.parse::<SourceSpec>().unwrap_err();
            assert!(error.to_string().contains("files:"), "{error}");
        }
    }
}
