//! Configuration: kube-proxy's file and kube-proxy's flags, read by one table ([`fields`]) into
//! [`Settings`].

pub mod effective;
pub mod fields;
pub mod raw;
pub mod value;
pub mod watch;
mod yaml;

#[cfg(test)]
mod tests;

pub use effective::{Conntrack, DetectLocal, IpvsSettings, NodePortSelector, ProxyMode, Settings};
pub use raw::{Findings, Origin, Raw};

use std::{collections::BTreeMap, io, path::Path};

/// A configuration that cannot be used. Trying again helps only after somebody changed it.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read or written.
    #[error("{option} {path}: {error}")]
    File {
        /// The option that names the file.
        option: &'static str,
        /// The file.
        path: String,
        /// What the system says.
        error: io::Error,
    },
    /// It is not YAML.
    #[error("{path} is not YAML: {error}")]
    Syntax {
        /// The file.
        path: String,
        /// Where and why.
        error: String,
    },
    /// It is more than one document.
    #[error("{0} holds several YAML documents; keep the one of kind {KIND} alone", KIND = raw::KIND)]
    Several(String),
    /// Values that cannot be: all of them.
    #[error("{} cannot be used:{}", .from, list(.problems))]
    Invalid {
        /// The file, or "the command line".
        from: String,
        /// Each names the setting and the remedy.
        problems: Vec<String>,
    },
}

fn list(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

/// Flags and their values, for `/flagz`.
pub type Flags = BTreeMap<String, String>;

/// A configuration file, read.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// The settings.
    pub raw: Raw,
    /// Fields that mean nothing, each with the reason.
    pub notes: Vec<String>,
    /// The text, by which a change is noticed.
    pub text: String,
}

/// Reads a `KubeProxyConfiguration` (`kubeproxy.config.k8s.io/v1alpha1`), as kube-proxy reads it:
/// unknown and repeated fields are no error. Values that cannot be are, and all of them are named
/// at once.
///
/// # Errors
/// The file cannot be read, or is not such a configuration.
pub fn read_file(path: &Path) -> Result<ConfigFile, ConfigError> {
    let shown = path.display().to_string();
    let read = || {
        // Opening a pipe would wait for somebody who writes to it.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is no ordinary file"));
        }
        std::fs::read_to_string(path)
    };
    let text = read().map_err(|error| ConfigError::File { option: "--config", path: shown.clone(), error })?;
    parse(&shown, text)
}

/// The same, from text. `path` is for messages.
///
/// # Errors
/// As [`read_file`].
pub fn parse(path: &str, text: String) -> Result<ConfigFile, ConfigError> {
    let tree = yaml::Tree::parse(&text).map_err(|mistake| match mistake {
        yaml::Mistake::Syntax(error) => ConfigError::Syntax { path: path.to_owned(), error },
        yaml::Mistake::Several => ConfigError::Several(path.to_owned()),
    })?;
    let (raw, Findings { mut problems, notes }) = Raw::from_tree(&tree);
    // What is wrong by itself hides nothing of what is wrong together.
    problems.extend(Settings::check(&raw).err().unwrap_or_default());
    if problems.is_empty() {
        return Ok(ConfigFile { raw, notes, text });
    }
    Err(ConfigError::Invalid { from: path.to_owned(), problems })
}

/// Writes the defaults as a configuration file that [`read_file`] reads back.
///
/// # Errors
/// The file cannot be written.
pub fn write_defaults(path: &Path) -> Result<(), ConfigError> {
    let at = |error| ConfigError::File { option: "--write-config-to", path: path.display().to_string(), error };
    let yaml = serde_saphyr::to_string(&Raw::default().to_json()).map_err(|error| at(io::Error::other(error)))?;
    std::fs::write(path, yaml).map_err(at)
}
