//! The configuration: reads kube-proxy's configuration file and flags into [`Settings`]. One table,
//! [`fields`], describes the fields of the file and the flags.

mod arguments;
pub mod effective;
pub mod fields;
pub mod migration;
pub mod raw;
pub mod remark;
pub mod value;
mod yaml;

#[cfg(test)]
mod tests;

pub use effective::{Conntrack, DetectLocal, IpvsSettings, NodePortSelector, ProxyMode, Settings};
pub use raw::{Findings, Origin, Raw};

use std::{collections::BTreeMap, io, path::Path};

use self::remark::Remark;

/// The configuration cannot be used. The operator must change it before another attempt.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read or written.
    #[error("{option} {path}: {error}")]
    File {
        /// The option that names the file.
        option: &'static str,
        /// The file.
        path: String,
        /// The error of the system call.
        error: io::Error,
    },
    /// The file is not YAML.
    #[error("{path} is not YAML: {error}")]
    Syntax {
        /// The file.
        path: String,
        /// The place and the reason.
        error: String,
    },
    /// The file has more than one YAML document.
    #[error("{0} holds several YAML documents; keep only the document of kind {KIND}", KIND = raw::KIND)]
    Several(String),
    /// Another object, without a configuration of kube-proxy, or with arguments only for a shell.
    #[error("{path} has no configuration of kube-proxy that can be read: {what}")]
    NoConfiguration {
        /// The file.
        path: String,
        /// What the file holds, and the remedy.
        what: String,
    },
    /// Values are invalid. The error lists all of them.
    #[error("{} cannot be used:{}", .from, list(.problems))]
    Invalid {
        /// The file, or "the command line".
        from: String,
        /// The problems. Each names the setting and the remedy.
        problems: Vec<Remark>,
    },
}

fn list(problems: &[Remark]) -> String {
    problems.iter().map(|problem| format!("\n  {}", problem.problem())).collect()
}

/// Flags and their values, for `/flagz`.
pub type Flags = BTreeMap<String, String>;

/// The content of a configuration file.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// The settings.
    pub raw: Raw,
    /// Fields that have no effect, each with the reason.
    pub notes: Vec<Remark>,
    /// The text of the file.
    pub text: String,
}

/// Reads a `KubeProxyConfiguration` (`kubeproxy.config.k8s.io/v1alpha1`). As in kube-proxy, unknown
/// and repeated fields are not an error. Errors: the file cannot be read, or is not a
/// `KubeProxyConfiguration`, or has invalid values. The error lists all invalid values.
pub fn read_file(path: &Path) -> Result<ConfigFile, ConfigError> {
    let shown = path.display().to_string();
    let read = || {
        // Opening a pipe would block until another process opens the pipe for writing.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        std::fs::read_to_string(path)
    };
    let text = read().map_err(|error| ConfigError::File { option: "--config", path: shown.clone(), error })?;
    parse(&shown, text)
}

/// Parses the text of a configuration file. Errors name the file as `path`.
/// Errors: the same errors as [`read_file`], except errors of reading the file.
pub fn parse(path: &str, text: String) -> Result<ConfigFile, ConfigError> {
    let (document, repeated) = yaml::parse(path, &text)?;
    let (raw, Findings { mut problems, notes }) = Raw::from_document(&document, repeated);
    // Report invalid combinations of settings together with invalid single values.
    problems.extend(Settings::check(&raw).err().unwrap_or_default());
    if problems.is_empty() {
        return Ok(ConfigFile { raw, notes, text });
    }
    Err(ConfigError::Invalid { from: path.to_owned(), problems })
}

/// Writes the defaults as a configuration file that [`read_file`] reads back.
/// Errors: the file cannot be written.
pub fn write_defaults(path: &Path) -> Result<(), ConfigError> {
    let at = |error| ConfigError::File { option: "--write-config-to", path: path.display().to_string(), error };
    let yaml = serde_saphyr::to_string(&Raw::default().to_json()).map_err(|error| at(io::Error::other(error)))?;
    std::fs::write(path, yaml).map_err(at)
}
