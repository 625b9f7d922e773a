//! Sets kernel parameters: at the start the sizes and timeouts of connection tracking that
//! kube-proxy sets, later those of a dataplane. At the start, one that is read-only, as in a
//! container, keeps its value with a warning; any other failure is an error.

use std::{
    fs, io,
    num::NonZero,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use tracing::{info, warn};

use headgate_settings::Conntrack;

/// The maximum number of connections that is computed from the number of cores. The operator's
/// minimum may be larger.
const MAX_BY_CORES: u64 = 1 << 20;

const PARAMETERS: &str = "proc/sys/net/netfilter";
const HASH_SIZE: &str = "sys/module/nf_conntrack/parameters/hashsize";
const NO_CONNTRACK: &str =
    "load the module nf_conntrack, give the agent the capability NET_ADMIN, or set the conntrack settings to 0";

/// A parameter that could not be set. Like kube-proxy, the agent does not start in this case.
#[derive(Debug, thiserror::Error)]
#[error("cannot set {} to {value}: {error}; {remedy}", .path.display())]
pub struct SysctlError {
    /// The file of the parameter.
    pub path: PathBuf,
    /// The value to set.
    pub value: String,
    /// The error of the write.
    pub error: io::Error,
    /// What the operator can do.
    pub remedy: &'static str,
}

/// Sets the parameters of the configuration below `root`, which is `/` except in tests. A parameter
/// whose setting is 0 keeps its value. Returns a warning for each read-only parameter.
/// Errors: a parameter could not be set and is not read-only.
pub fn set_conntrack(root: &Path, config: &Conntrack) -> Result<Vec<String>, SysctlError> {
    let (parameters, mut warnings) = (root.join(PARAMETERS), Vec::new());
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    if let Some(max) = conntrack_max(config, cores as u64) {
        let warning = raise(&parameters.join("nf_conntrack_max"), max, NO_CONNTRACK)?;
        if warning.is_none() {
            // With a quarter as many hash buckets, hash chains stay short.
            let remedy =
                "set it with the option hashsize of the module nf_conntrack, or pass --conntrack-max-per-core=0";
            warnings.extend(raise(&root.join(HASH_SIZE), max / 4, remedy)?);
        }
        warnings.extend(warning);
    }
    let seconds = |timeout| whole_seconds(timeout).map(|seconds| seconds.to_string());
    let wanted = [
        ("nf_conntrack_tcp_be_liberal", config.tcp_be_liberal.then(|| "1".to_owned())),
        ("nf_conntrack_tcp_timeout_established", seconds(config.tcp_established_timeout)),
        ("nf_conntrack_tcp_timeout_close_wait", seconds(config.tcp_close_wait_timeout)),
        ("nf_conntrack_udp_timeout", seconds(config.udp_timeout)),
        ("nf_conntrack_udp_timeout_stream", seconds(config.udp_stream_timeout)),
    ];
    for (name, value) in wanted {
        if let Some(value) = value {
            warnings.extend(write(&parameters.join(name), &value, NO_CONNTRACK)?);
        }
    }
    for warning in &warnings {
        warn!("{warning}");
    }
    Ok(warnings)
}

/// True if conntrack accepts TCP packets outside the window instead of marking them as INVALID.
pub(crate) fn is_tcp_liberal() -> bool {
    is_on("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
}

/// Raises a parameter, and returns a warning if it is read-only. A larger value stays, as in
/// kube-proxy 1.37, and 0, which is no limit.
fn raise(path: &Path, wanted: u64, remedy: &'static str) -> Result<Option<String>, SysctlError> {
    let found = fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let Some(found) = found.filter(|found| *found == 0 || *found >= wanted) else {
        return write(path, &wanted.to_string(), remedy);
    };
    if found != wanted {
        info!(parameter = %path.display(), value = found, wanted, "kernel parameter stays: it is only raised");
    }
    Ok(None)
}

/// Writes a parameter, and returns a warning if it is read-only.
fn write(path: &Path, value: &str, remedy: &'static str) -> Result<Option<String>, SysctlError> {
    let found = fs::read_to_string(path).unwrap_or_default();
    let (shown, found) = (path.display(), found.trim());
    if found == value {
        return Ok(None);
    }
    match fs::write(path, value) {
        Ok(()) => {
            info!(parameter = %shown, from = found, to = value, "kernel parameter set");
            Ok(None)
        }
        Err(error) if is_read_only(path, &error) => {
            Ok(Some(format!("{shown} stays at {found}: it is read-only here ({error}), and cannot be set to {value}")))
        }
        Err(error) => Err(SysctlError { path: path.to_owned(), value: value.to_owned(), error, remedy }),
    }
}

const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";

/// Makes the kernel route packets to 127.0.0.0/8, which NodePorts on localhost need. Rules of the
/// agent drop packets that other hosts send to these addresses.
/// Errors: the parameter cannot be written. The error is a sentence for the operator. Everything
/// except NodePorts on localhost works without the parameter.
pub(crate) fn route_localnet() -> Result<(), String> {
    let path = ROUTE_LOCALNET;
    set(Path::new(path), "1")
        .map_err(|error| format!("NodePorts do not answer on 127.0.0.1: cannot write 1 to {path}: {error}"))
}

/// True while the kernel routes packets to 127.0.0.0/8.
pub(crate) fn is_localnet_routed() -> bool {
    is_on(ROUTE_LOCALNET)
}

fn is_on(path: &str) -> bool {
    fs::read_to_string(path).is_ok_and(|value| value.trim() != "0")
}

/// Sets a parameter, unless it already has this value.
pub(crate) fn set(path: &Path, value: &str) -> io::Result<()> {
    let found = fs::read_to_string(path)?;
    if found.trim() != value {
        fs::write(path, value)?;
        info!(parameter = %path.display(), from = found.trim(), to = value, "kernel parameter set");
    }
    Ok(())
}

/// True when the file system is read-only, or when the parameter belongs to the whole machine and
/// the agent runs in a separate network namespace.
fn is_read_only(path: &Path, error: &io::Error) -> bool {
    let is_for_machine = error.raw_os_error() == Some(libc::EOPNOTSUPP);
    // In a separate network namespace, the file of such a parameter has no write permission.
    let has_no_write_bit = || fs::metadata(path).is_ok_and(|metadata| metadata.permissions().readonly());
    error.kind() == io::ErrorKind::ReadOnlyFilesystem
        || is_for_machine
        || (error.kind() == io::ErrorKind::PermissionDenied && has_no_write_bit())
}

/// The number of connections to track. `None` keeps the present value.
///
/// The maximum [`MAX_BY_CORES`] limits the number that is computed from the number of CPUs, but not
/// the operator's minimum. kube-proxy 1.36 limits both numbers.
fn conntrack_max(config: &Conntrack, cores: u64) -> Option<u64> {
    let by_cores = config.max_per_core.saturating_mul(cores).min(MAX_BY_CORES);
    (config.max_per_core > 0).then(|| by_cores.max(config.min))
}

/// The timeout in whole seconds, at least 1, because with 0 the kernel forgets each connection at
/// once; `None` for zero, which keeps the present value.
fn whole_seconds(timeout: Duration) -> Option<u64> {
    (!timeout.is_zero()).then_some(timeout.as_secs().max(1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use headgate_settings::{Raw, Settings};

    fn defaults() -> Conntrack {
        Settings::check(&Raw::default()).unwrap().conntrack
    }

    // rows: 88
    #[test]
    fn row_88_the_table_grows_with_cpus_between_minimum_and_limit() {
        assert_eq!(conntrack_max(&defaults(), 2), Some(131_072));
        assert_eq!(conntrack_max(&defaults(), 8), Some(262_144));
        assert_eq!(conntrack_max(&defaults(), 64), Some(1_048_576));
        assert_eq!(conntrack_max(&Conntrack { min: 4_000_000, ..defaults() }, 64), Some(4_000_000));
        assert_eq!(conntrack_max(&Conntrack { max_per_core: 0, ..defaults() }, 64), None);
    }

    fn machine(parameters: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folders = [root.path().join(PARAMETERS), root.path().join(HASH_SIZE).parent().unwrap().to_owned()];
        folders.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        for (name, value) in parameters {
            fs::write(folders[0].join(name), format!("{value}\n")).unwrap();
        }
        fs::write(root.path().join(HASH_SIZE), "1024\n").unwrap();
        root
    }

    const ALL: [(&str, &str); 6] = [
        ("nf_conntrack_max", "1000"),
        ("nf_conntrack_tcp_timeout_established", "432000"),
        ("nf_conntrack_tcp_timeout_close_wait", "60"),
        ("nf_conntrack_tcp_be_liberal", "0"),
        ("nf_conntrack_udp_timeout", "30"),
        ("nf_conntrack_udp_timeout_stream", "120"),
    ];

    // rows: 88
    #[test]
    fn row_88_the_table_is_never_made_smaller() {
        for larger in ["2000000", "0"] {
            let root = machine(&[&[("nf_conntrack_max", larger)], &ALL[1..]].concat());
            let config = Conntrack { max_per_core: 1, min: 8192, ..defaults() };
            assert_eq!(set_conntrack(root.path(), &config).unwrap(), Vec::<String>::new());
            let max = fs::read_to_string(root.path().join(PARAMETERS).join("nf_conntrack_max")).unwrap();
            assert_eq!(max.trim(), larger);
            // The number of hash buckets still follows the wanted size.
            assert_eq!(fs::read_to_string(root.path().join(HASH_SIZE)).unwrap(), "2048");
        }
    }

    #[test]
    fn a_parameter_that_is_missing_is_an_error_with_a_remedy() {
        let root = machine(&ALL[..1]);
        fs::remove_dir_all(root.path().join("proc")).unwrap();
        let error = set_conntrack(root.path(), &defaults()).unwrap_err().to_string();
        assert!(error.contains("nf_conntrack_max to ") && error.contains("load the module nf_conntrack"), "{error}");
    }
}
