//! The command line.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::Parser;
use headgate_core::{ServiceKey, addresses, check_subdomain};
use headgate_tls::{FileError, Files, Side};

use crate::{
    model::{ExternalIps, ModelSettings, NodeSelector},
    serve::{EnrolmentSettings, Listen, PeerSettings, ReadinessSettings, Security, Settings, tls::ServerTls},
    source::{SourceSettings, SourceSpec},
};

const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 7443);

/// Parses an address and a port to listen on.
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "write an IP address and a port, such as 127.0.0.1:7443 or [::]:7443")
}

/// Headgate's control plane: watches Services, EndpointSlices, Nodes and ServiceCIDRs once, and
/// streams every change to the node agents.
#[derive(Debug, Clone, Parser)]
#[command(name = "headgate-control-plane", version)]
pub struct Options {
    /// Where Services and endpoints come from: "kubernetes" (the API server), or "files:DIR" (a
    /// folder of manifests, or one file, which may change at any time)
    #[arg(long, value_name = "SOURCE")]
    pub source: SourceSpec,

    /// Kubeconfig for --source kubernetes. Without this option, the in-cluster configuration is
    /// used
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Seconds after which the API server has to show that a kind without a change is current. A
    /// change that does not arrive is noticed within this time and 30 s
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub watch_silence_seconds: u32,

    /// Where agents connect (gRPC: Discovery) [default: [::]:7443]
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    pub listen: Option<SocketAddr>,

    /// Where headgatectl, grpcurl and other replicas connect (gRPC: Inspect, Peers, health,
    /// reflection) [default: the address of --listen with the next port, such as [::]:7444]
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    pub inspect_listen: Option<SocketAddr>,

    /// A folder for sockets that take the place of --listen and --inspect-listen. A program that
    /// contains a control plane sets this field.
    #[arg(skip)]
    pub sockets: Option<PathBuf>,

    /// Serve without TLS, and accept the name that each agent gives. Needs an explicit --listen on
    /// a loopback address, or on one of the ranges reserved for tests (192.0.2.0/24,
    /// 198.51.100.0/24, 203.0.113.0/24, 198.18.0.0/15, 2001:db8::/32)
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_key", "tls_client_ca"])]
    pub insecure_loopback: bool,

    /// PEM file with this replica's certificate and its chain. This file, the key and the client
    /// authorities are read again when they change
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// PEM file with the authorities that sign the certificates of readers and replicas. The
    /// certificate of a reader, who may use Inspect and reflection, has the URI
    /// headgate://reader/NAME or the organization headgate:readers
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,

    /// PEM file with the authorities that sign the certificates of nodes, and are trusted for
    /// nothing else. The certificate of a node's agent has the URI headgate://node/NAME, or the
    /// common name system:node:NAME and the organization system:nodes. Without this option, the
    /// authorities of --tls-client-ca also sign for nodes
    #[arg(long, value_name = "FILE", conflicts_with = "insecure_loopback")]
    pub tls_node_ca: Option<PathBuf>,

    /// File with the holders and certificates that are refused although an authority has signed
    /// them, one a line: headgate://node/NAME (or reader, or replica), serial=HEX, or
    /// sha256 Fingerprint=HEX, as openssl x509 prints them (docs/tls.md). Read again when it
    /// changes: the streams and connections of denied clients end
    #[arg(long, value_name = "FILE", conflicts_with = "insecure_loopback")]
    pub tls_denied: Option<PathBuf>,

    /// Accept the stream of a node only from an address of its Node (InternalIP or ExternalIP), so
    /// that a stolen certificate is of no use elsewhere. A Node that the source does not have is
    /// refused, too
    #[arg(long)]
    pub streams_from_node_address: bool,

    /// Allow Inspect and reflection with node certificates too. Then grpcurl works from a node, but
    /// each node can list everything
    #[arg(long)]
    pub nodes_may_inspect: bool,

    /// Where /metrics, /healthz and /readyz are served, without TLS
    #[arg(long, value_name = "ADDR:PORT", default_value = "[::]:7480", value_parser = address)]
    pub metrics_listen: SocketAddr,

    /// Name of this replica, for agents and operators [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub replica_name: Option<String>,

    /// Longest time between two messages to an agent, in seconds. An agent that receives nothing
    /// for three times as long connects again
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub heartbeat_seconds: u32,

    /// How long an agent waits for this replica when the agent has seen newer objects than the
    /// replica, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub behind_wait_seconds: u32,

    /// Time in which agents can move to another replica before this replica stops, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(0..=600_000))]
    pub drain_grace_ms: u32,

    /// The Service whose ready endpoints are the control plane's replicas. The source must contain
    /// this Service, which must not be headless. A replica with many more agents than its share of
    /// the nodes asks some of its agents to move to another replica. Without this option, no agents
    /// are asked to move
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = service_key)]
    pub balance_service: Option<ServiceKey>,

    /// The control plane's replicas, which together say what all nodes have programmed:
    /// service:NAMESPACE/NAME, a Service in the source that selects the replicas and is not
    /// headless, so that replicas may move; then all replicas have the same port for
    /// --inspect-listen. Or HOST:PORT of each replica, or of a name that leads to all, with the
    /// port of --inspect-listen. Repeat the option, or separate values by commas. The list may
    /// include this replica. Write "none" if there is only one replica. Without this option, pods
    /// that stop get no answer (docs/drain.md), and nobody knows which Nodes never had an agent.
    /// Replicas tell agents where the others are. Over TLS, replicas use --tls-cert and --tls-key
    /// as clients, and --tls-client-ca checks their certificates, which need the URI
    /// headgate://replica/NAME; their addresses do not matter
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', value_parser = peer)]
    pub peers: Vec<PeerOption>,

    /// The Nodes that should have an agent, as a label selector in the notation of kubectl. Other
    /// Nodes do not count in statements about all nodes, unless they have an agent. A Node without
    /// the label kubernetes.io/os counts as a Linux node
    #[arg(long, value_name = "SELECTOR", default_value_t)]
    pub agent_nodes: NodeSelector,

    /// The externalIPs that Services may have: all, none, or ranges of addresses, separated by
    /// commas. Others are left out of the Service, and are a problem of the Service. Everybody who
    /// may write a Service can take over connections to its externalIPs, so production values use
    /// none
    #[arg(long, value_name = "all|none|CIDRS", default_value_t)]
    pub external_ips: ExternalIps,

    /// A Node counts as one that never had an agent if no replica remembers its stream, all
    /// replicas have run for this time in seconds, and none has vanished for this time. Replicas
    /// remember the stream of a deleted Node for this time
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub uncovered_after_seconds: u32,

    /// How much one Service may ask of every node: the most endpoint ports of its EndpointSlices
    /// (each address with each port of the slice or the Service, whichever has more), a fifth of
    /// this number as the most frontends (each address with each port, for load balancers with each
    /// source range, and each NodePort), and four times this number as the most endpoints of all
    /// frontends of a family. Slices and external addresses beyond it are left out
    #[arg(long, value_name = "ENTRIES", default_value_t = ModelSettings::SERVICE_BUDGET, value_parser = clap::value_parser!(u32).range(1_000..=i64::from(ModelSettings::MAX_SERVICE_BUDGET)))]
    pub service_budget: u32,

    /// Set the condition of the readiness gate headgate.io/programmed of pods once all nodes send
    /// connections to them (docs/ready-everywhere.md). Needs --source kubernetes, and the
    /// rights to read pods and to patch pods/status. Give this option to all replicas
    #[arg(long, requires = "peers")]
    pub ready_everywhere: bool,

    /// The condition is set after this time in any case, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "ready_everywhere",
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub ready_everywhere_timeout_seconds: u32,

    /// Where agents exchange service-account tokens for certificates (docs/security.md), over TLS
    /// with --tls-cert. The API server of --kubeconfig, or of the cluster, reviews the tokens.
    /// While it is unreachable, certificates of nodes renew themselves. Without this option, agents
    /// need certificates from elsewhere
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, conflicts_with = "insecure_loopback",
        requires_all = ["tls_node_ca", "enrolment_ca_key"])]
    pub enrolment_listen: Option<SocketAddr>,

    /// PEM file with the private key of the authority that signs the certificates of agents: the
    /// first one in the file of --tls-node-ca. Read for each certificate
    #[arg(long, value_name = "FILE", requires = "enrolment_listen")]
    pub enrolment_ca_key: Option<PathBuf>,

    /// The audience that the tokens of agents must have
    #[arg(long, value_name = "AUDIENCE", default_value = "headgate")]
    pub enrolment_audience: String,

    /// Namespace and name of the ServiceAccount of agents
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = service_key, default_value = "headgate-system/headgate-node-agent")]
    pub enrolment_service_account: ServiceKey,

    /// Accept tokens from any address. Without this option, the address of the client must be an
    /// InternalIP or ExternalIP of the Node of its pod. Needed if addresses are translated between
    /// agents and the control plane
    #[arg(long, requires = "enrolment_listen")]
    pub enrolment_any_address: bool,

    /// Validity of the certificates of agents, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u32).range(20..=31_536_000))]
    pub enrolment_certificate_seconds: u32,

    /// What to log: a level (error, warn, info, debug, trace), or directives such as
    /// info,headgate_control_plane=debug
    #[arg(long, value_name = "FILTER", env = "HEADGATE_LOG", default_value = "info")]
    pub log: String,

    /// How to write the log: as text, or as one JSON object for each line
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, env = "HEADGATE_LOG_FORMAT")]
    pub log_format: LogFormat,
}

/// A value of `--peers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerOption {
    /// There is only one replica.
    None,
    /// The endpoints of a Service are the replicas.
    Service(ServiceKey),
    /// Host and port of replicas.
    At(String, u16),
}

fn peer(text: &str) -> Result<PeerOption, String> {
    if text == "none" {
        return Ok(PeerOption::None);
    }
    if let Some(service) = text.strip_prefix("service:") {
        return service_key(service).map(PeerOption::Service);
    }
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let parsed = parsed.map(|(host, port)| (host.trim_start_matches('[').trim_end_matches(']'), port));
    let (host, port) =
        parsed.filter(|(host, _)| !host.is_empty()).ok_or("write service:NAMESPACE/NAME, HOST:PORT, or none")?;
    Ok(PeerOption::At(host.to_owned(), port))
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

/// Options that cannot be used together. The message names the option and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// At least one of the TLS files is missing, and `--insecure-loopback` is not given.
    #[error(
        "{missing} is missing: pass --tls-cert, --tls-key and --tls-client-ca together; to try it on this machine only, pass \
         --insecure-loopback --listen 127.0.0.1:7443 instead"
    )]
    NoTls {
        /// The first missing option of `--tls-cert`, `--tls-key` and `--tls-client-ca`.
        missing: &'static str,
    },
    /// `--insecure-loopback` is given without `--listen`.
    #[error("--insecure-loopback needs an explicit --listen, such as --listen 127.0.0.1:7443")]
    ListenNotExplicit,
    /// `--insecure-loopback` is given with an address that other machines may reach.
    #[error(
        "--insecure-loopback: {option} {address} is neither a loopback address nor in a range reserved for tests ({ranges}); choose such an address, \
         or use TLS (--tls-cert, --tls-key, --tls-client-ca)", ranges = addresses::TEST_RANGES.join(", ")
    )]
    ListenNotLocal {
        /// The option that holds the address.
        option: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// `--ready-everywhere` is given, and the source has no pods.
    #[error("--ready-everywhere has no effect with --source {0}: remove it, or use --source kubernetes")]
    NoPods(SourceSpec),
    /// The TLS files cannot be used.
    #[error(transparent)]
    Tls(#[from] FileError),
}

impl Options {
    /// The addresses to listen on.
    #[must_use]
    pub fn listen(&self) -> Listen {
        let Listen { agents, inspect, .. } = Listen::at(self.listen.unwrap_or(DEFAULT_LISTEN));
        let (metrics, sockets) = (Some(self.metrics_listen), self.sockets.clone());
        Listen { agents, inspect: self.inspect_listen.unwrap_or(inspect), metrics, sockets }
    }

    /// Reads the TLS files, and returns how connections are secured.
    ///
    /// # Errors
    /// [`OptionsError`]. A retry does not help.
    pub fn security(&self) -> Result<Security, OptionsError> {
        if self.insecure_loopback {
            self.listen.ok_or(OptionsError::ListenNotExplicit)?;
            let Listen { agents, inspect, .. } = self.listen();
            for (option, address) in [("--listen", agents), ("--inspect-listen", inspect)] {
                if !addresses::may_lack_tls(address.ip().to_canonical()) {
                    return Err(OptionsError::ListenNotLocal { option, address });
                }
            }
            return Ok(Security::Plaintext);
        }
        let required = |file: &Option<PathBuf>, missing| file.clone().ok_or(OptionsError::NoTls { missing });
        let cert = required(&self.tls_cert, "--tls-cert")?;
        let key = required(&self.tls_key, "--tls-key")?;
        let ca = required(&self.tls_client_ca, "--tls-client-ca")?;
        let (node_ca, denied) = (self.tls_node_ca.clone().unwrap_or_else(|| ca.clone()), self.tls_denied.clone());
        let tls = ServerTls::load(Files { side: Side::Server, cert, key, ca, node_ca, denied })?;
        Ok(Security::Tls(tls))
    }

    /// Checks that the source has what other options need.
    ///
    /// # Errors
    /// [`OptionsError::NoPods`]. A retry does not help.
    pub fn check_source(&self) -> Result<(), OptionsError> {
        match self.source {
            SourceSpec::Files(_) if self.ready_everywhere => Err(OptionsError::NoPods(self.source.clone())),
            _ => Ok(()),
        }
    }

    /// The settings of the source.
    #[must_use]
    pub fn source_settings(&self) -> SourceSettings {
        let watch_silence = Duration::from_secs(self.watch_silence_seconds.into());
        let model = ModelSettings {
            reads_pods: self.ready_everywhere,
            agent_nodes: self.agent_nodes.clone(),
            service_budget: self.service_budget,
            external_ips: self.external_ips.clone(),
        };
        SourceSettings { kubeconfig: self.kubeconfig.clone(), watch_silence, model }
    }

    /// The other replicas; `None` if `--peers` is not given.
    fn peers(&self) -> Option<PeerSettings> {
        let (mut names, mut service) = (Vec::new(), None);
        for peer in self.peers.iter().cloned() {
            match peer {
                PeerOption::None => {}
                PeerOption::Service(key) => service = Some(key),
                PeerOption::At(host, port) => names.push((host, port)),
            }
        }
        (!self.peers.is_empty()).then(|| PeerSettings { names, service, ..PeerSettings::default() })
    }

    /// How agents enrol; `None` if `--enrolment-listen` is not given.
    fn enrolment(&self) -> Option<EnrolmentSettings> {
        Some(EnrolmentSettings {
            listen: self.enrolment_listen?,
            ca_key: self.enrolment_ca_key.clone()?,
            audience: self.enrolment_audience.clone(),
            service_account: self.enrolment_service_account.clone(),
            any_address: self.enrolment_any_address,
            certificate_lifetime: Duration::from_secs(self.enrolment_certificate_seconds.into()),
            kubeconfig: self.kubeconfig.clone(),
        })
    }

    /// How conditions of readiness gates are set; `None` if `--ready-everywhere` is not given.
    fn readiness(&self) -> Option<ReadinessSettings> {
        self.ready_everywhere.then(|| ReadinessSettings {
            bound: Duration::from_secs(self.ready_everywhere_timeout_seconds.into()),
            kubeconfig: self.kubeconfig.clone(),
            client: None,
        })
    }

    /// The settings of the server.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            replica_name: self.replica_name.clone().unwrap_or_else(host_name),
            source_name: self.source.to_string(),
            heartbeat_interval: Duration::from_secs(self.heartbeat_seconds.into()),
            behind_wait: Duration::from_secs(self.behind_wait_seconds.into()),
            drain_grace: Duration::from_millis(self.drain_grace_ms.into()),
            nodes_may_inspect: self.nodes_may_inspect,
            streams_from_node_address: self.streams_from_node_address,
            balance_service: self.balance_service.clone(),
            peers: self.peers(),
            uncovered_after: Duration::from_secs(self.uncovered_after_seconds.into()),
            enrolment: self.enrolment(),
            readiness: self.readiness(),
            ..Settings::default()
        }
    }
}

fn service_key(text: &str) -> Result<ServiceKey, String> {
    let (namespace, name) = text.split_once('/').ok_or("write NAMESPACE/NAME")?;
    check_subdomain(namespace).map_err(|problem| format!("the namespace {problem}"))?;
    check_subdomain(name).map_err(|problem| format!("the name {problem}"))?;
    Ok(ServiceKey::new(namespace, name))
}

/// The host name of the kernel. In a pod, the host name is the name of the pod.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "headgate-control-plane".into() } else { name.into() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory as _;

    use super::*;

    fn options(arguments: &[&str]) -> Options {
        let start = ["headgate-control-plane", "--source", "files:/tmp"];
        Options::try_parse_from(start.iter().chain(arguments)).unwrap()
    }

    fn refusal(arguments: &[&str]) -> String {
        options(arguments).security().map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn the_options_are_well_formed_and_have_defaults() {
        Options::command().debug_assert();
        let options = options(&[]);
        let Listen { agents, inspect, metrics, .. } = options.listen();
        let addresses = [agents, inspect, metrics.unwrap()].map(|address| address.to_string());
        assert_eq!(addresses, ["[::]:7443", "[::]:7444", "[::]:7480"]);
        assert!(!options.settings().replica_name.is_empty());
    }

    #[test]
    fn plaintext_needs_an_explicit_local_address() {
        for listen in
            ["127.0.0.1:7443", "[::1]:7443", "127.8.9.1:0", "198.18.5.1:7443", "192.0.2.1:1", "[2001:db8::1]:1"]
        {
            let security = options(&["--insecure-loopback", "--listen", listen]).security();
            assert!(matches!(security, Ok(Security::Plaintext)), "{listen}");
        }
        for listen in ["0.0.0.0:7443", "[::]:7443", "10.0.0.1:7443", "[::ffff:10.0.0.1]:7443", "198.20.0.1:1"] {
            let text = refusal(&["--insecure-loopback", "--listen", listen]);
            assert!(text.contains(": --listen") && text.contains("use TLS"), "{text}");
            let text = refusal(&["--insecure-loopback", "--listen", "127.0.0.1:1", "--inspect-listen", listen]);
            assert!(text.contains(&format!(": --inspect-listen {listen} is")), "{text}");
        }
        assert!(refusal(&["--insecure-loopback"]).contains("explicit --listen"));
        // Plaintext and TLS exclude each other.
        let arguments = ["headgate-control-plane", "--source", "kubernetes", "--insecure-loopback", "--tls-key", "/a"];
        assert!(Options::try_parse_from(arguments).is_err());
    }

    #[test]
    fn ready_everywhere_needs_an_api_server_and_the_other_replicas() {
        let start = ["headgate-control-plane", "--ready-everywhere"];
        let alone = Options::try_parse_from(start.iter().chain(&["--source", "kubernetes"])).unwrap_err();
        assert!(alone.to_string().contains("--peers"), "{alone}");
        let files = options(&["--ready-everywhere", "--peers", "none"]);
        let error = files.check_source().unwrap_err().to_string();
        assert!(error.contains("remove it, or use --source kubernetes"), "{error}");
        let on = Options::try_parse_from(start.iter().chain(&["--source", "kubernetes", "--peers", "none"])).unwrap();
        assert!(on.check_source().is_ok() && on.source_settings().model.reads_pods);
        assert_eq!(on.settings().readiness.unwrap().bound, Duration::from_secs(30));
        assert!(options(&[]).settings().readiness.is_none());
    }
}
