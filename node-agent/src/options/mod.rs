//! The command line.

pub mod kube_proxy;

use std::{
    ffi::OsString,
    net::SocketAddr,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{
    ArgAction, ArgMatches, CommandFactory as _, FromArgMatches as _,
    builder::{PossibleValuesParser, TypedValueParser as _},
};
use ipnet::IpNet;

use headgate_core::{endpoint_health::CheckTiming, iptables::Layout};
use headgate_settings::{self as settings, ConfigError, Flags, Settings, fields::FIELDS, remark::Remark};
use headgate_tls::{Files, Side};

use self::kube_proxy::KubeProxyFlags;
use crate::{
    control_planes::ControlPlane,
    dataplane::{iptables::Variant, userspace},
};
pub use headgate_settings::ProxyMode;

/// The options cannot be used. The message names the option and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The name of the node is invalid, or the host name cannot be read.
    #[error("--node-name: {0}; pass the Kubernetes name of this node")]
    NodeName(String),
    /// The URL of a control plane is invalid.
    #[error("--control-plane: {0}")]
    ControlPlane(String),
    /// No URL is given. clap itself reports a missing URL, except if the arguments contain a flag
    /// such as `--cleanup`, which needs no URL. clap also makes this exception for
    /// `--cleanup=false`.
    #[error("--control-plane: pass at least one URL, such as https://192.0.2.10:7443")]
    NoControlPlane,
    /// Mode userspace knows no range of pods.
    #[error("mode userspace needs the ranges of pods: pass --pod-ranges, such as 10.244.0.0/16, or --cluster-cidr")]
    NoPodRanges,
    /// A flag that names a TLS file is missing.
    #[error("--control-plane names an https URL, which needs --tls-cert, --tls-key and --tls-ca; missing: {0}")]
    TlsFilesMissing(String),
    /// kube-proxy's settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The settings and their source.
#[derive(Debug, Clone)]
pub struct Configured {
    /// The settings.
    pub settings: Settings,
    /// The path and the text of the configuration file, if `--config` is given.
    pub file: Option<(PathBuf, String)>,
    /// A warning that names all given settings without effect; `None` if there are none.
    pub warning: Option<String>,
}

/// Programs this node's kernel with the Services that a Headgate control plane streams to it.
///
/// Rules stay in place when the agent stops; `--cleanup` removes them.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "headgate-node-agent", version)]
pub struct Options {
    /// Kubernetes name of this node. Default: the host name in lower case
    #[arg(
        long,
        value_name = "NAME",
        visible_alias = "hostname-override",
        env = "HEADGATE_NODE_NAME",
        overrides_with = "node_name"
    )]
    pub node_name: Option<String>,

    /// URLs of control plane replicas: https://HOST:7443, or http://ADDRESS:PORT together with
    /// --insecure-loopback. Repeat the flag, or separate URLs by commas. The agent uses one replica
    /// at a time. Each address of a host name counts as one replica
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        required_unless_present_any = ["cleanup", "init_only", "write_config_to"],
        env = "HEADGATE_CONTROL_PLANE"
    )]
    pub control_plane: Vec<String>,

    /// Allow http URLs without TLS, on loopback and test addresses only
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false,
        hide_default_value = true, value_name = "BOOL", value_parser = truth)]
    pub insecure_loopback: bool,

    /// PEM file with this agent's certificate and its chain. The three TLS files are read again for
    /// each connection
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// PEM file with the authorities that sign control planes' certificates
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// Where the agent gets its certificate for its service-account token: HOST:PORT of the
    /// replicas' --enrolment-listen. Repeat the flag, or separate values by commas. The agent then
    /// writes --tls-cert and --tls-key itself, and renews the certificate (docs/security.md)
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', requires_all = ["tls_cert", "tls_key", "tls_ca"])]
    pub enrolment_address: Vec<String>,

    /// File with the service-account token for --enrolment-address, from a projected volume
    #[arg(long, value_name = "FILE", default_value = "/var/run/secrets/headgate.io/token")]
    pub enrolment_token: PathBuf,

    /// Which variant of iptables to use; auto chooses the variant that this node already uses
    #[arg(long, value_enum, default_value = "auto")]
    pub iptables_variant: Variant,

    /// Layout of the iptables rules; auto is compact above 256 services or 1,000 endpoints
    #[arg(long, value_name = "LAYOUT", default_value = "auto",
        value_parser = PossibleValuesParser::new(["auto", "classic", "compact"]).map(|layout| layout_of(&layout)))]
    pub iptables_layout: Layout,

    /// How long virtual servers that mode ipvs left stay for their open connections, after the
    /// agent starts in another mode
    #[arg(long, default_value = "15m", value_name = "DURATION", value_parser = duration)]
    pub takeover_limit: Duration,

    /// Whether the agent stands by: it follows the control plane and writes nothing to the node,
    /// while another service proxy works there. auto: takes over once the other proxy has gone
    #[arg(long, value_enum, default_value_t)]
    pub standby: Standby,

    /// What the agent does when another service proxy returns to the node after a take-over: yield
    /// removes the agent's own rules once those of the other proxy are complete; keep goes on
    #[arg(long, value_enum, default_value_t)]
    pub on_other_proxy: OnOtherProxy,

    /// Where the agent serves /healthz and /livez for probes, in standby too. No other service
    /// proxy listens there, so no wrong program answers a probe. Empty: nowhere
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:10262", value_parser = page_address)]
    pub standby_address: PageAddress,

    /// Own the tables of mode nftables, where the kernel supports owners that persist. Tests set
    /// this flag to false, so that the agent behaves as on a kernel without owners
    #[arg(long, hide = true, action = ArgAction::Set, default_value_t = true, value_name = "BOOL", value_parser = truth)]
    pub own_nftables_tables: bool,

    /// In mode nftables, the node answers pings to ClusterIPs. An answer says that the node has
    /// programmed the ClusterIP, and nothing about endpoints
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, hide_default_value = true, value_name = "BOOL", value_parser = truth)]
    pub nftables_reply_to_ping: bool,

    /// Mode nftables: count connections, packets and bytes of each Service, for `headgatectl
    /// counters` and for metrics of each Service
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_name = "BOOL", value_parser = truth)]
    pub nftables_service_counters: bool,

    /// Mode userspace: the rules that lead to the proxy; auto chooses iptables if the kernel lacks
    /// nftables, or an expression that the rules of nftables need
    #[arg(long, value_enum, default_value = "auto")]
    pub userspace_rules: userspace::Rules,

    /// How long an agent in mode userspace that stops carries its open connections on. The pod's
    /// terminationGracePeriodSeconds must be longer
    #[arg(long, default_value = "25s", value_name = "DURATION", value_parser = duration)]
    pub userspace_drain_limit: Duration,

    /// Mode userspace: how long the agent waits for an endpoint that does not answer before it
    /// tries the next endpoint
    #[arg(long, default_value = "2.5s", value_name = "DURATION", value_parser = userspace_timeout)]
    pub userspace_connect_timeout: Duration,

    /// Mode userspace: the agent resets a TCP connection that carries no bytes for this time
    #[arg(long, default_value = "2h0m0s", value_name = "DURATION", value_parser = userspace_timeout)]
    pub userspace_idle_timeout: Duration,

    /// Mode userspace: a UDP session ends after this time without a datagram
    #[arg(long, default_value = "1m0s", value_name = "DURATION", value_parser = userspace_timeout)]
    pub userspace_udp_timeout: Duration,

    /// Mode userspace: serve metrics of each Service, besides the sums over all Services
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_name = "BOOL", value_parser = truth)]
    pub userspace_service_counters: bool,

    /// Addresses that programs of the node connect to, besides the cluster CIDRs and the podCIDRs
    /// of the node: the ranges of pods, and other endpoints that the proxy of mode userspace and
    /// health checks may reach. They never connect to link-local addresses, metadata servers, and
    /// addresses of the node itself. Repeat the flag, or separate ranges by commas
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub pod_ranges: Vec<IpNet>,

    /// Mode userspace: write a line to the log for each TCP connection that ends, with the client,
    /// the Service, the endpoint, the duration, the bytes, and how the connection ended
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_name = "BOOL", value_parser = truth)]
    pub userspace_access_log: bool,

    /// A KubeProxyConfiguration file. It replaces kube-proxy's flags, except --hostname-override.
    /// The agent ends when the file is edited
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Write a KubeProxyConfiguration with the defaults, and exit
    #[arg(long, value_name = "FILE")]
    pub write_config_to: Option<PathBuf>,

    /// Set the kernel parameters that need privileges, and exit
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false,
        hide_default_value = true, value_name = "BOOL", value_parser = truth)]
    pub init_only: bool,

    /// Folder for the last good state. An agent that starts while no control plane answers programs
    /// this state. Empty: the state is not saved
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/headgate", overrides_with = "state_dir",
        value_parser = clap::builder::OsStringValueParser::new().map(PathBuf::from))]
    pub state_dir: PathBuf,

    /// Shortest time between two writes of the state while the agent runs
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration)]
    pub state_save_period: Duration,

    /// Time between two health checks of an endpoint, from 500ms to 1h. Applies to Services with
    /// the annotation headgate.io/health-check and without headgate.io/health-check-interval
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = check_interval)]
    pub health_check_interval: Duration,

    /// Longest time for one health check, or a quarter of its interval if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = check_timeout)]
    pub health_check_timeout: Duration,

    /// Namespaces whose Services may ask for health checks of their endpoints, with the annotation
    /// headgate.io/health-check; * for all namespaces. Repeat the flag, or separate names by
    /// commas. Without the flag, no endpoint is checked
    #[arg(long, value_name = "NAMESPACE", value_delimiter = ',')]
    pub health_check_namespaces: Vec<String>,

    /// Where pods that stop ask when no node sends new connections to them any more
    /// (docs/drain.md), such as 0.0.0.0:10261. Pods must reach this address, so it has its own
    /// port. Empty: pods cannot ask
    #[arg(long, value_name = "ADDR:PORT", default_value = "", value_parser = page_address)]
    pub drain_address: PageAddress,

    /// kube-proxy's flags.
    #[command(flatten)]
    pub kube_proxy: KubeProxyFlags,

    /// Remove all rules and other kernel objects that any backend of Headgate created on this node,
    /// and exit. What a running kube-proxy uses stays: its page /proxyMode, at
    /// --metrics-bind-address, tells its mode
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false,
        hide_default_value = true, value_name = "BOOL", value_parser = truth)]
    pub cleanup: bool,

    /// What to log, such as info or headgate_node_agent=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADGATE_LOG")]
    pub log: String,

    /// How to write the log: as text, or as one JSON object for each line
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, env = "HEADGATE_LOG_FORMAT")]
    pub log_format: LogFormat,

    /// All flags with their values. The source of a value is the command line, the environment, or
    /// the default.
    #[arg(skip)]
    pub flags: Flags,
}

/// When the agent stands by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Standby {
    /// While another service proxy works on the node.
    #[default]
    Auto,
    /// Always, so the agent never writes.
    Always,
    /// Never: the agent programs the node at once, and removes the rules of kube-proxy.
    Never,
}

/// What the agent does when another service proxy returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum OnOtherProxy {
    /// It stands by again, and removes its own rules.
    #[default]
    Yield,
    /// It goes on, and reports the node as degraded.
    Keep,
}

/// The address of pages. With a plain `Option`, clap would not accept an empty value.
pub type PageAddress = Option<SocketAddr>;

fn page_address(text: &str) -> Result<PageAddress, &'static str> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| "write an address and a port, such as 0.0.0.0:10261 or [::]:10261")
}

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs that collect logs. Each line is an object with `timestamp`, `level`, `target`
    /// and `fields`.
    Json,
}

impl Options {
    /// Parses the program's arguments. The first argument is the program's name. As in kube-proxy,
    /// flags may be written with `_` in place of `-`.
    /// Errors: the arguments are invalid or ask for help. Call [`clap::Error::exit`] to print the
    /// message.
    pub fn read<T: Into<OsString>>(arguments: impl IntoIterator<Item = T>) -> Result<Self, clap::Error> {
        let mut command = Self::command();
        let arguments = arguments.into_iter().map(|argument| with_dashes(argument.into()));
        let mut matches = command.try_get_matches_from_mut(arguments)?;
        let flags = flags(&command, &matches);
        let options = Self::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?;
        Ok(Self { flags, ..options })
    }

    /// Returns kube-proxy's settings, from the configuration file if `--config` is given, otherwise
    /// from the flags.
    /// Errors: the file cannot be read, or settings are invalid. The message lists all invalid
    /// settings.
    pub fn configured(&self) -> Result<Configured, OptionsError> {
        let flags = &self.kube_proxy;
        let Some(path) = &self.config else {
            let settings = Settings::check(&flags.raw)
                .map_err(|problems| ConfigError::Invalid { from: "the command line".to_owned(), problems })?;
            let warning = warning("the command line", &settings.notes);
            return Ok(Configured { settings, file: None, warning });
        };
        let file = settings::read_file(path)?;
        let shown = path.display().to_string();
        let mut settings =
            Settings::check(&file.raw).map_err(|problems| ConfigError::Invalid { from: shown.clone(), problems })?;
        let mut notes = file.notes;
        notes.append(&mut settings.notes);
        settings.notes.clone_from(&notes);
        let ignored = flags
            .given
            .iter()
            .map(|flag| Remark::new(flag, "--config is given, and the file replaces kube-proxy's flags"));
        notes.extend(ignored);
        Ok(Configured { settings, warning: warning(&shown, &notes), file: Some((path.clone(), file.text)) })
    }

    /// The node's name in lower case: from the flag, otherwise from `hostnameOverride`, otherwise
    /// the host name.
    /// Errors: the host name cannot be read, or the name is not a DNS name.
    pub fn node_name(&self, settings: &Settings) -> Result<Arc<str>, OptionsError> {
        let name = match self.node_name.as_ref().or(settings.hostname_override.as_ref()) {
            Some(name) => name.clone(),
            None => std::fs::read_to_string("/proc/sys/kernel/hostname")
                .map_err(|error| OptionsError::NodeName(format!("the host name cannot be read ({error})")))?,
        };
        let name = name.trim().to_ascii_lowercase();
        let is_dns = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if name.is_empty() || name.len() > 253 || !name.chars().all(is_dns) {
            return Err(OptionsError::NodeName(format!("{name:?} is not a DNS name of 1 to 253 characters")));
        }
        Ok(name.into())
    }

    /// The default interval and timeout of endpoint checks.
    pub fn check_timing(&self) -> CheckTiming {
        let milliseconds = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let Self { health_check_interval, health_check_timeout, .. } = self;
        CheckTiming {
            interval_ms: milliseconds(*health_check_interval),
            timeout_ms: milliseconds(*health_check_timeout),
        }
    }

    /// The folder for the last good state; `None` if the state is not saved.
    pub fn state_folder(&self) -> Option<&Path> {
        Some(self.state_dir.as_path()).filter(|folder| !folder.as_os_str().is_empty())
    }

    /// The control planes, and the TLS files if any control plane has an https URL.
    /// Errors: there is no URL, a URL is invalid or not allowed without TLS, or a TLS file is not
    /// named.
    pub fn control_planes(&self) -> Result<(Vec<ControlPlane>, Option<Files>), OptionsError> {
        let parse = |url: &String| ControlPlane::parse(url, self.insecure_loopback);
        let targets: Result<Vec<ControlPlane>, String> = self.control_plane.iter().map(parse).collect();
        let targets = targets.map_err(OptionsError::ControlPlane)?;
        if targets.is_empty() {
            return Err(OptionsError::NoControlPlane);
        }
        if !targets.iter().any(ControlPlane::uses_tls) {
            return Ok((targets, None));
        }
        if let (Some(cert), Some(key), Some(ca)) = (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            let (cert, key, ca, node_ca) = (cert.clone(), key.clone(), ca.clone(), ca.clone());
            let files = Files { side: Side::Client, cert, key, ca, node_ca, denied: None };
            return Ok((targets, Some(files)));
        }
        let files = [("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key), ("--tls-ca", &self.tls_ca)];
        let missing: Vec<&str> = files.iter().filter(|(_, file)| file.is_none()).map(|(name, _)| *name).collect();
        Err(OptionsError::TlsFilesMissing(missing.join(", ")))
    }
}

/// Replaces `_` by `-` in the name of a flag. Leaves other arguments and values unchanged.
pub fn with_dashes(argument: OsString) -> OsString {
    if !argument.as_bytes().starts_with(b"--") {
        return argument;
    }
    let mut bytes = argument.into_vec();
    let name = bytes.iter().position(|byte| *byte == b'=').unwrap_or(bytes.len());
    bytes[..name].iter_mut().filter(|byte| **byte == b'_').for_each(|byte| *byte = b'-');
    OsString::from_vec(bytes)
}

/// All flags with their values, for `/flagz`.
fn flags(command: &clap::Command, matches: &ArgMatches) -> Flags {
    let value = |argument: &clap::Arg, flag: &str| match matches.get_raw(argument.get_id().as_str()) {
        Some(given) => given.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(","),
        None => {
            FIELDS.iter().find(|field| field.flag == flag).map_or_else(String::new, |field| field.default.to_owned())
        }
    };
    let named = command.get_arguments().filter_map(|argument| Some((argument, argument.get_long()?)));
    let named = named.filter(|(_, flag)| !["help", "version"].contains(flag));
    named.map(|(argument, flag)| (flag.to_owned(), value(argument, flag))).collect()
}

/// Parses the interval of health checks. The annotation of a Service has the same bounds. The
/// bounds protect nodes from too many checks.
fn check_interval(text: &str) -> Result<Duration, String> {
    duration_up_to_1h(text, Duration::from_millis(500))
}

fn check_timeout(text: &str) -> Result<Duration, String> {
    duration_up_to_1h(text, Duration::from_millis(1))
}

fn duration_up_to_1h(text: &str, min: Duration) -> Result<Duration, String> {
    duration_between(text, min, Duration::from_secs(3600))
}

fn duration_between(text: &str, min: Duration, max: Duration) -> Result<Duration, String> {
    let is_allowed = |found: &Duration| (min..=max).contains(found);
    let [min, max] = [min, max].map(settings::value::show_duration);
    let wrong = || format!("{text} is not between {min} and {max}");
    duration(text).and_then(|found| Some(found).filter(is_allowed).ok_or_else(wrong))
}

/// Parses a timeout of mode userspace. Longer ones keep descriptors of gone clients.
fn userspace_timeout(text: &str) -> Result<Duration, String> {
    duration_between(text, Duration::from_millis(100), Duration::from_secs(24 * 3600))
}

/// Parses a boolean like Go.
fn truth(text: &str) -> Result<bool, String> {
    settings::value::parse_bool(text).ok_or_else(|| format!("{text:?} is not a boolean; write true or false"))
}

/// Parses a duration like Go.
fn duration(text: &str) -> Result<Duration, String> {
    settings::value::parse_duration(text)
        .ok_or_else(|| format!("{text:?} is not a duration such as 500ms, 30s, 1m0s or 1h"))
}

fn layout_of(name: &str) -> Layout {
    match name {
        "classic" => Layout::Classic,
        "compact" => Layout::Compact,
        _ => Layout::Auto,
    }
}

/// A warning that names all settings without effect.
fn warning(from: &str, notes: &[Remark]) -> Option<String> {
    let notes: Vec<String> = notes.iter().map(Remark::note).collect();
    (!notes.is_empty()).then(|| format!("{from}: these settings have no effect in Headgate: {}", notes.join("; ")))
}

#[cfg(test)]
mod tests;
