//! Command-line arguments.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Parser, Subcommand, ValueEnum};

use crate::certs::{CertsArgs, rotation::CaArgs};
use crate::units;

/// The exit codes of most commands.
const EXIT_CODES: &str = "Exit codes: 0 if the command succeeds, 1 for an error, 2 for a wrong command line";
/// The exit codes of all commands.
const ALL_EXIT_CODES: &str = "Exit codes: 0 if the command succeeds; 1 for an error, for example if no replica answers, \
    or `verify` finds differences; 2 for a wrong command line; 3 if nodes have not done in time what `wait` or `drain` \
    waits for; 4 if only Nodes without an agent are missing in `wait` or `verify`";

/// Shows what a Headgate control plane serves, and what every node has programmed
#[derive(Debug, Parser)]
#[command(name = "headgatectl", version, max_term_width = 100, after_help = ALL_EXIT_CODES)]
pub struct Args {
    /// URL of a replica. Any replica answers for all replicas. Further URLs are used if the first
    /// does not answer: repeat the option, separate URLs by commas, or use a name that resolves to
    /// several addresses. http:// works only for loopback and test addresses; for other addresses
    /// use https:// with the --tls options. unix:FILE is the socket of `headgate`
    #[arg(
        long,
        global = true,
        env = "HEADGATE_SERVER",
        value_name = "URL",
        value_delimiter = ',',
        default_value = "unix:/run/headgate/inspect.sock,http://127.0.0.1:7444"
    )]
    pub server: Vec<String>,
    /// The TLS options.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Output format: tables, wide tables with more columns, or JSON for programs. `status`,
    /// `node`, `connections`, `explain` and `wait` print one JSON object, `watch` prints one object
    /// per line, other commands print an array
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// TLS files for an https server.
#[derive(Debug, Clone, clap::Args)]
pub struct TlsArgs {
    /// Certificate authority that signed the replica's certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This program's certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of this program's certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Name in the replica's certificate if it differs from the URL's host, for example through a
    /// port-forward
    #[arg(long, global = true, value_name = "NAME")]
    pub tls_server_name: Option<String>,
}

/// The format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns.
    Table,
    /// Aligned columns, including rarely needed ones.
    Wide,
    /// JSON with the field names of `headgate.v1.Inspect`.
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List Services with addresses, ports and the number of ready endpoints
    #[command(after_help = EXIT_CODES)]
    Services(Selection),
    /// List endpoints of one Service or of all Services, with address, ports, state and node
    #[command(after_help = EXIT_CODES)]
    Endpoints(Selection),
    /// List all nodes, also those without an agent: state, programmed version, lag, and the reason
    #[command(after_help = EXIT_CODES)]
    Agents(AgentsArgs),
    /// Show the state of one node, as its agent knows it: versions, the last sync, problems, memory
    #[command(after_help = EXIT_CODES)]
    Node(NodeArgs),
    /// Show connections, packets and bytes of Services on one node, the most bytes first
    ///
    /// The node's agent must run in mode nftables with --nftables-service-counters. With a Service,
    /// the command shows each of its addresses and NodePorts. Without a Service, the table leaves
    /// out Services without traffic.
    #[command(after_help = EXIT_CODES)]
    Counters(CountersArgs),
    /// Show the open connections and UDP sessions that the agent of one node carries, the most
    /// bytes first
    ///
    /// The node's agent must run in mode userspace. The column ADDRESS shows the address of the
    /// Service that the client used. SENT and RECEIVED are the bytes from the client to the
    /// endpoint, and from the endpoint to the client. AGE is the time since the client connected,
    /// and IDLE the time since the last byte. DATAGRAMS counts the datagrams in both directions.
    #[command(after_help = EXIT_CODES)]
    Connections(ConnectionsArgs),
    /// Explain what a node does with a new connection to a Service, and which endpoints it can
    /// choose
    ///
    /// The node's agent answers from its own state: it names each step, and the reason for each
    /// endpoint that it leaves out. The command opens no connection, and does not read the kernel.
    #[command(after_help = EXIT_CODES)]
    Explain(ExplainArgs),
    /// Verify that the kernels of one node or of all nodes forward as the control plane requires
    ///
    /// The agent of each node reads its kernel now, and compares the endpoints behind every address
    /// and NodePort with its own view. The control plane then compares the agent's resources and
    /// the table of the kernel with its own state. The agent repairs what differs.
    ///
    /// Exit codes: 0 if all nodes are verified; 1 if something differs, if a node cannot be
    /// verified, if a named node has no agent, or if no replica answers; 2 for a wrong command
    /// line; 4 if only Nodes without an agent are missing, or if there is no Node. With
    /// --allow-absent the command ends with 0 instead of 4.
    Verify(VerifyArgs),
    /// Show what the other service proxies of nodes in standby do, and what Headgate would change
    ///
    /// The agent of each node reads the rules of the other proxy now, and compares the endpoints
    /// behind every address and NodePort with its own view. What the other proxy does otherwise by
    /// design is shown apart. The last lines show how long the other proxy takes from a change to
    /// its rules, and how long Headgate took until it could have written them.
    ///
    /// Exit codes: 0 if all rules agree; 1 if something differs, if a node cannot be compared, if
    /// no node is in standby, or if no replica answers; 2 for a wrong command line.
    Shadow(VerifyArgs),
    /// Wait until all nodes have programmed the current state of a Service or of an endpoint
    ///
    /// Nodes without an agent count, too: the command waits for a node that lost its agent, and
    /// does not wait for a Node that never had one.
    ///
    /// Exit codes: 0 if all nodes have programmed the state; 1 if no replica answers; 2 for a wrong
    /// command line; 3 if the state is not known in time, or nodes that have an agent have not
    /// programmed it; 4 if only Nodes without an agent are missing, or if there is no Node. With
    /// --allow-absent the command ends with 0 instead of 4. Standard error names the missing nodes,
    /// with the reasons. A node that rejects the Service has not programmed it.
    Wait(WaitArgs),
    /// Wait until no node sends new connections to a pod that stops
    ///
    /// Exit codes: 0 if the answer is drained, or last for the last endpoint of a Service; 1 if no
    /// replica answers, or the replica refuses; 2 for a wrong command line; 3 if nodes have not
    /// confirmed in time. Standard output names these nodes.
    Drain(DrainArgs),
    /// Print changes from now on, until Ctrl-C
    #[command(after_help = EXIT_CODES)]
    Watch(Selection),
    /// Create a certificate authority and certificates for a trial, and print how to use them.
    /// Contacts no server
    #[command(after_help = EXIT_CODES)]
    Certs(CertsArgs),
    /// Show the fleet on a page in a browser on this machine
    ///
    /// The page listens only on 127.0.0.1, uses your connection options, and answers only with the
    /// token in the printed address. Through SSH, forward the port: ssh -L PORT:127.0.0.1:PORT. It
    /// asks the control plane only while it is open. Ctrl-C ends it.
    #[command(after_help = EXIT_CODES)]
    Dashboard(DashboardArgs),
    /// Create a certificate authority, or replace it while the programs run. Contacts no server
    #[command(after_help = EXIT_CODES)]
    Ca(CaArgs),
    /// Prepare the move from kube-proxy. Contacts no server
    #[command(subcommand)]
    Migrate(MigrateArgs),
    /// Show the state of the replica: source, version, counts, rejected objects, and the other
    /// replicas
    #[command(after_help = EXIT_CODES)]
    Status,
}

impl Command {
    /// The selected Service, empty if none is. An error describes the correct usage.
    pub fn selected(&self) -> Result<Selected, String> {
        let (service, namespace) = match self {
            Self::Services(of) | Self::Endpoints(of) | Self::Watch(of) => (of.service.as_deref(), &of.namespace),
            Self::Counters(of) | Self::Connections(ConnectionsArgs { of, .. }) => {
                (of.service.as_deref(), &of.namespace)
            }
            Self::Wait(of) => (Some(of.service.as_str()), &of.namespace),
            Self::Explain(of) => {
                if let (Some(from), Some(_)) = (of.pod(), of.source) {
                    return Err(format!(
                        "--source needs a node, and --from {from} is a pod: give the node of the pod as --from"
                    ));
                }
                (Some(of.service.as_str()), &of.namespace)
            }
            _ => (None, &None),
        };
        Selected::resolve(service, namespace.as_deref())
    }
}

fn ip_address(text: &str) -> Result<IpAddr, &'static str> {
    text.parse().map_err(|_| "write an IP address, such as 10.244.1.10 or fd00::10")
}

/// Steps of a move.
#[derive(Debug, clap::Subcommand)]
pub enum MigrateArgs {
    /// Show for each setting of a kube-proxy what the node agent makes of it
    ///
    /// FILE is a KubeProxyConfiguration, a ConfigMap that holds one, or a Pod or DaemonSet that
    /// runs kube-proxy. A setting that is not given, or has its default, has a line only if
    /// Headgate's default differs. `--output wide` also explains the settings that carry over.
    /// Examples:
    ///
    ///   kubectl -n kube-system get configmap kube-proxy -o yaml | headgatectl migrate check -
    ///   headgatectl migrate check /var/lib/kube-proxy/config.conf
    ///   headgatectl migrate check -- --proxy-mode=ipvs --cluster-cidr=10.244.0.0/16
    ///
    /// Exit codes: 0 if the agent accepts the settings, 1 if it rejects a value, a flag or another
    /// argument, or if there is no configuration, 2 for a wrong command line.
    #[command(verbatim_doc_comment)]
    Check(CheckArgs),
}

/// The settings to check.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// The file, or - for standard input
    #[arg(value_name = "FILE", required_unless_present = "arguments", conflicts_with = "arguments")]
    pub file: Option<PathBuf>,
    /// Arguments of kube-proxy, after --
    #[arg(last = true, value_name = "ARGUMENT")]
    pub arguments: Vec<String>,
}

/// The nodes to list, and the number of rows.
#[derive(Debug, clap::Args)]
pub struct AgentsArgs {
    /// Only this node
    pub node: Option<String>,
    /// Only this node
    #[arg(long = "node", value_name = "NODE", conflicts_with = "node")]
    pub node_flag: Option<String>,
    /// Only nodes that are not up to date: agents that lag by more than a second or have not
    /// acknowledged anything yet, agents of replicas whose source is unlisted or cut off, and Nodes
    /// without an agent
    #[arg(long)]
    pub behind: bool,
    /// Only Nodes without an agent
    #[arg(long)]
    pub absent: bool,
    /// Only nodes in standby, on which another service proxy works
    #[arg(long)]
    pub standby: bool,
    /// Only agents that failed in their last attempt to program the kernel, that reject resources,
    /// or whose last verification found differences
    #[arg(long)]
    pub failing: bool,
    /// Maximum number of rows in the table, the worst nodes first; 0 for all
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
}

impl AgentsArgs {
    /// The selected node. None for all nodes.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref().or(self.node_flag.as_deref())
    }
}

/// Where the page is served.
#[derive(Debug, clap::Args)]
pub struct DashboardArgs {
    /// The port on 127.0.0.1; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub port: u16,
}

/// The pod that stops.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// NAMESPACE/POD, or POD in the namespace default
    pub pod: String,
    /// The UID of the pod. It tells the pod from older pods of the same name
    #[arg(long, value_name = "UID", default_value = "", hide_default_value = true)]
    pub uid: String,
    /// The longest wait
    #[arg(long, value_name = "DURATION", default_value = "25s", value_parser = units::parse_duration)]
    pub timeout: std::time::Duration,
    /// How long to wait for nodes that confirm nothing
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = units::parse_duration)]
    pub silent: std::time::Duration,
}

/// The nodes to verify.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Only this node. Default: all nodes
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: Option<String>,
    /// Maximum number of rows in the table, the worst nodes first; 0 for all
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
    /// Succeed although Nodes have no agent. The command still names them
    #[arg(long)]
    pub allow_absent: bool,
}

/// What to show about one node.
#[derive(Debug, clap::Args)]
pub struct NodeArgs {
    /// The name of the node
    pub node: String,
    /// Show the agent's metrics instead, in Prometheus' text format: only metrics whose names begin
    /// with PREFIX, or all metrics
    #[arg(long, value_name = "PREFIX", num_args = 0..=1, default_missing_value = "")]
    pub metrics: Option<String>,
}

/// The node, and the Service whose counters or connections to show.
#[derive(Debug, clap::Args)]
pub struct CountersArgs {
    /// The name of the node
    pub node: String,
    /// Service as NAMESPACE/NAME, or as NAME with --namespace (default: "default")
    pub service: Option<String>,
    /// Namespace of the service
    #[arg(short, long, requires = "service")]
    pub namespace: Option<String>,
}

/// The node and the Service whose connections to show.
#[derive(Debug, clap::Args)]
pub struct ConnectionsArgs {
    /// The node and the Service.
    #[command(flatten)]
    pub of: CountersArgs,
    /// Maximum number of connections, at most 2000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub limit: u32,
}

/// The connection to explain.
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    /// Service as NAMESPACE/NAME, or as NAME with --namespace (default: "default")
    pub service: String,
    /// Namespace of the service
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// Where the connection comes from: a node, a pod as NAMESPACE/POD, or the address of a pod.
    /// Only pods with an endpoint are known: for another pod, give its node here and its address as
    /// --source. Default: the first node by name that has an agent
    #[arg(long, value_name = "NODE|POD|ADDRESS")]
    pub from: Option<String>,
    /// The address of a client whose packets reach the node, such as a client outside of the
    /// cluster. Default: the node itself
    #[arg(long, value_name = "ADDRESS", value_parser = ip_address)]
    pub source: Option<IpAddr>,
    /// The destination, such as 10.96.0.10:80, 10.96.0.10:53/UDP or [fd00::10]:80, with the address
    /// of a node for a NodePort. Default: every address and NodePort of the Service
    #[arg(long, value_name = "ADDRESS:PORT[/PROTOCOL]", value_parser = destination)]
    pub to: Option<Destination>,
}

impl ExplainArgs {
    /// `--from`, if it is a pod.
    pub fn pod(&self) -> Option<&str> {
        self.from.as_deref().filter(|from| from.contains('/') || from.parse::<IpAddr>().is_ok())
    }
}

/// The destination of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Address and port.
    pub at: SocketAddr,
    /// "TCP", "UDP" or "SCTP". Empty for every protocol.
    pub protocol: String,
}

fn destination(text: &str) -> Result<Destination, &'static str> {
    let usage =
        "write ADDRESS:PORT or ADDRESS:PORT/PROTOCOL, such as 10.96.0.10:80, 10.96.0.10:53/UDP or [fd00::10]:80";
    let (at, protocol) = text.split_once('/').unwrap_or((text, ""));
    let protocol = protocol.to_uppercase();
    if text.contains('/') && !["TCP", "UDP", "SCTP"].contains(&protocol.as_str()) {
        return Err(usage);
    }
    Ok(Destination { at: at.parse().map_err(|_| usage)?, protocol })
}

/// The condition to wait for.
#[derive(Debug, clap::Args)]
pub struct WaitArgs {
    /// Service as NAMESPACE/NAME, or as NAME with --namespace (default: "default")
    pub service: String,
    /// Namespace of the service
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// Wait until the control plane knows this endpoint and every node has programmed it
    #[arg(long, value_name = "IP", value_parser = ip_address)]
    pub endpoint: Option<IpAddr>,
    /// Wait until the endpoint or the Service is removed from every node
    #[arg(long)]
    pub gone: bool,
    /// Timeout, such as 90s, 5m or 1h
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::parse_duration)]
    pub timeout: std::time::Duration,
    /// Succeed although Nodes have no agent. The command names them, and does not wait for them
    #[arg(long)]
    pub allow_absent: bool,
}

/// The Services to select.
#[derive(Debug, clap::Args)]
pub struct Selection {
    /// Service as NAMESPACE/NAME, or as NAME with --namespace (default: "default")
    pub service: Option<String>,
    /// Only this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,
}

/// Namespace and name in the form that the `Inspect` service expects. An empty field selects all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name, or empty.
    pub name: String,
}

impl Selected {
    /// Resolves NAMESPACE/NAME, or NAME with a namespace. An error describes the correct usage.
    fn resolve(service: Option<&str>, flag: Option<&str>) -> Result<Self, String> {
        let (namespace, name) = match service.map(|service| service.split_once('/').ok_or(service)) {
            None => (flag.unwrap_or_default(), ""),
            Some(Err(name)) => (flag.unwrap_or("default"), name),
            Some(Ok(both)) => both,
        };
        if let (Some(service), Some(flag)) = (service, flag.filter(|flag| *flag != namespace)) {
            return Err(format!(
                "{service} names another namespace than --namespace {flag}: give the namespace only once"
            ));
        }
        let empty_part = service.is_some() && (namespace.is_empty() || name.is_empty());
        if empty_part || name.contains('/') || flag == Some("") {
            let given = service.unwrap_or("an empty namespace");
            return Err(format!("{given} is not a service: write NAMESPACE/NAME, or NAME with --namespace"));
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(service: Option<&str>, namespace: Option<&str>) -> Result<(String, String), String> {
        Selected::resolve(service, namespace).map(|selected| (selected.namespace, selected.name))
    }

    #[test]
    fn contradictory_and_empty_selections_are_refused() {
        for (service, namespace) in [
            ("prod/web", Some("test")),
            ("/web", None),
            ("prod/", None),
            ("", None),
            ("a/b/c", None),
            ("web", Some("")),
        ] {
            assert!(resolve(Some(service), namespace).is_err(), "{service:?} in {namespace:?}");
        }
        assert!(resolve(None, Some("")).is_err());
    }

    #[test]
    fn destinations_have_an_address_a_port_and_perhaps_a_protocol() {
        let parsed = |text: &str| destination(text).map(|to| (to.at.to_string(), to.protocol));
        assert_eq!(parsed("10.96.0.10:80"), Ok(("10.96.0.10:80".to_owned(), String::new())));
        assert_eq!(parsed("[fd00::10]:53/udp"), Ok(("[fd00::10]:53".to_owned(), "UDP".to_owned())));
        for wrong in ["10.96.0.10", "10.96.0.10:80/", "10.96.0.10:80/ICMP", "fd00::10:80", "web:80", "10.96.0.10:65536"]
        {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_options_are_well_formed() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
    }
}
