//! The sources of objects: the Kubernetes API, or a folder of manifests.

mod files;
mod kubernetes;

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::model::{Model, ModelSettings, Sink};

pub use self::kubernetes::follow;
// Fuzzing reads events from bytes.
#[doc(hidden)]
pub use self::{
    files::manifest_events,
    kubernetes::{list_events, watch_events},
};
// `crate::serve` uses these items.
pub(crate) use self::kubernetes::{BackOff, api_server, client as kubernetes_client};

/// Which source to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceSpec {
    /// `files:DIR`: a folder of manifests.
    Files(PathBuf),
    /// `kubernetes`: an API server.
    Kubernetes,
}

/// The settings of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSettings {
    /// The kubeconfig file; `None` for the in-cluster configuration. Only `kubernetes` uses it.
    pub kubeconfig: Option<PathBuf>,
    /// The time limit of a watch, after which a quiet kind is shown current (`kubernetes`).
    pub watch_silence: Duration,
    /// The settings of the model. A folder contains no pods.
    pub model: ModelSettings,
}

impl SourceSettings {
    /// The default of `watch_silence`. A quiet kind costs one small list and one watch in this
    /// time, and a change that does not arrive is noticed within this time and 30 s.
    pub const DEFAULT_WATCH_SILENCE: Duration = Duration::from_secs(60);
}

impl Default for SourceSettings {
    fn default() -> Self {
        Self { kubeconfig: None, watch_silence: Self::DEFAULT_WATCH_SILENCE, model: ModelSettings::default() }
    }
}

/// A value of `--source` that does not name a source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a source: write \"kubernetes\", or \"files:\" and a folder, such as files:/etc/headgate")]
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

/// Why a source cannot be read at all. A retry does not help: a person has to correct the cause.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The program does not run in a cluster, and no kubeconfig is given.
    #[error("not inside a cluster ({0}): give --kubeconfig PATH, or --source files:DIR")]
    NotInCluster(String),
    /// The kubeconfig cannot be used.
    #[error("the kubeconfig {path} cannot be used: {why}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        why: String,
    },
    /// No API client can be created from the configuration.
    #[error("no API client can be created from the configuration: {0}")]
    Client(String),
    /// `--kubeconfig` is given, and the source does not use a kubeconfig.
    #[error("--kubeconfig {0} has no effect with --source {1}: remove it, or use --source kubernetes")]
    UselessKubeconfig(PathBuf, SourceSpec),
    /// A task that follows the source has ended, which is a defect.
    #[error("a task that follows the source has ended: {0}; please report this")]
    WatchEnded(String),
}

/// Reads a source until `shutdown`, and passes its changes to `sink`, and also problems such as an
/// unreachable source, which are no errors.
pub async fn run(
    spec: SourceSpec,
    settings: SourceSettings,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    match (spec, settings.kubeconfig.clone()) {
        (SourceSpec::Kubernetes, kubeconfig) => {
            follow(kubernetes_client(kubeconfig.as_deref()).await?, settings, sink, shutdown).await
        }
        (spec @ SourceSpec::Files(_), Some(path)) => Err(SourceError::UselessKubeconfig(path, spec)),
        (SourceSpec::Files(folder), None) => files::run(folder, Model::new(settings.model), sink, shutdown).await,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_source_is_printed_as_it_is_written() {
        for text in ["kubernetes", "files:/tmp/x", "files:a:b"] {
            assert_eq!(text.parse::<SourceSpec>().unwrap().to_string(), text);
        }
        for text in ["", "files", "files:", "kubernetes:", "etcd:x", "/tmp/x"] {
            let error = text.parse::<SourceSpec>().unwrap_err();
            assert!(error.to_string().contains("files:"), "{error}");
        }
    }
}
