//! Command-line arguments.

mod moves;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};

use crate::certs::{CertsArgs, rotation::CaAction};
use crate::units;

pub use self::moves::{CleanupArgs, ClusterArgs, PauseOn, RunArgs};

/// The exit codes of most commands.
const EXIT_CODES: &str = "Exit codes: 0 if the command succeeds, 1 for an error, 2 for a wrong command line";
/// The exit codes of all commands.
const ALL_EXIT_CODES: &str = "Exit codes: 0 if the command succeeds; 1 for an error, for example if no replica answers, \
    or `verify` finds differences; 2 for a wrong command line; 3 if nodes have not done in time what `wait`, `drain` or \
    `cleanup` waits for, or if `migrate run` stops at a doubt; 4 if only Nodes without an agent are missing in `wait` or \
    `verify`; 5 if only a person can go on with `migrate run`";
/// The default of `--server`.
pub(crate) const DEFAULT_SERVER: &str = "unix:/run/headgate/inspect.sock,http://127.0.0.1:7444";
/// Why lists have no option for labels.
const LABELS: &str = "There is no option for labels, because the control plane keeps none. By labels, kubectl selects: \
    kubectl get services -l app=web";
/// The heading of the options that say which replica answers.
const CONNECTION: &str = "Connection";
/// The commands that contact no server.
const LOCAL: [&str; 4] = ["ca", "certs", "completion", "man"];

/// Shows what a Headgate control plane serves, and what every node has programmed
#[derive(Debug, Parser)]
#[command(name = "headgatectl", version, max_term_width = 100, after_help = ALL_EXIT_CODES)]
pub struct Args {
    /// Output format. A table that is wider than the terminal lacks its least important columns; a
    /// pipe gets all. In JSON and YAML, lists are arrays; `watch` and --watch print one line of
    /// JSON, or one document of YAML, for each change. `name` prints the words that other commands
    /// accept, for `services`, `endpoints` and `agents`
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// URL of a replica. Any replica answers for all replicas. Further URLs are used if the first
    /// does not answer: repeat the option, separate URLs by commas, or use a name that resolves to
    /// several addresses. http:// works only for loopback and test addresses; for other addresses
    /// use https:// with the --tls options. unix:FILE is the socket of `headgate`
    #[arg(
        long,
        global = true,
        env = "HEADGATE_SERVER",
        value_name = "URL",
        help_heading = CONNECTION,
        value_delimiter = ',',
        default_value = DEFAULT_SERVER
    )]
    pub server: Vec<String>,
    /// The TLS options.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The command line with all commands. Commands that contact no server hide the options of the
/// connection.
pub fn command() -> clap::Command {
    let command = Args::command();
    let of_connection = |arg: &&clap::Arg| arg.get_help_heading() == Some(CONNECTION);
    let hidden: Vec<clap::Arg> =
        command.get_arguments().filter(of_connection).map(|arg| arg.clone().hide(true)).collect();
    command.mut_subcommands(|command| match command.get_name() {
        // Their descriptions name the exit codes.
        "drain" | "verify" => command,
        "migrate" => command.mut_subcommand("check", |check| check.args(&hidden)),
        "wait" => command.mut_arg("service", |service| service.required(true)),
        "explain" => command.mut_arg("service", |service| service.required(true)).after_help(EXIT_CODES),
        "counters" | "connections" => {
            command.mut_arg("namespace", |one| one.requires("service")).after_help(EXIT_CODES)
        }
        "agents" | "endpoints" | "services" => command.after_help(format!("{LABELS}\n\n{EXIT_CODES}")),
        name if LOCAL.contains(&name) => command.args(&hidden).after_help(EXIT_CODES),
        _ => command.after_help(EXIT_CODES),
    })
}

/// Reads a command line. The first word is the name of the program.
pub fn parse<W: Into<std::ffi::OsString> + Clone>(line: impl IntoIterator<Item = W>) -> Result<Args, clap::Error> {
    Args::from_arg_matches(&command().try_get_matches_from(line)?)
}

/// TLS files for an https server.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = CONNECTION)]
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
    /// The same as YAML.
    Yaml,
    /// Only names, one in a line.
    Name,
}

impl Output {
    /// Returns whether the output is for programs, with all fields.
    pub fn is_data(self) -> bool {
        matches!(self, Self::Json | Self::Yaml)
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List Services with addresses, ports and the number of ready endpoints
    Services(ListArgs),
    /// List endpoints of one Service or of all Services, with address, ports, state and node
    Endpoints(ListArgs),
    /// List all nodes, also those without an agent: state, programmed version, lag, and the reason
    Agents(AgentsArgs),
    /// Show the state of one node, as its agent knows it: versions, the last sync, problems, memory
    Node(NodeArgs),
    /// Show connections, packets and bytes of Services on one node, the most bytes first
    ///
    /// The node's agent must run in mode nftables with --nftables-service-counters. With a Service,
    /// the command shows each of its addresses and NodePorts. Without a Service, the table leaves
    /// out Services without traffic.
    Counters(CountersArgs),
    /// Show the open connections and UDP sessions that the agent of one node carries, the most
    /// bytes first
    ///
    /// The node's agent must run in mode userspace. The column ADDRESS shows the address of the
    /// Service that the client used. SENT and RECEIVED are the bytes from the client to the
    /// endpoint, and from the endpoint to the client. AGE is the time since the client connected,
    /// and IDLE the time since the last byte. DATAGRAMS counts the datagrams in both directions.
    Connections(ConnectionsArgs),
    /// Explain what a node does with a new connection to a Service, and which endpoints it can
    /// choose
    ///
    /// The node's agent answers from its own state: it names each step, and the reason for each
    /// endpoint that it leaves out. The command opens no connection, and does not read the kernel.
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
    Watch(Selection),
    /// Create a certificate authority and certificates for a trial, and print how to use them.
    /// Contacts no server
    Certs(CertsArgs),
    /// Show the fleet on a page in a browser on this machine
    ///
    /// The page listens only on 127.0.0.1, uses your connection options, and answers only with the
    /// token in the printed address. Through SSH, forward the port: ssh -L PORT:127.0.0.1:PORT. It
    /// asks the control plane only while it is open. Ctrl-C ends it.
    Dashboard {
        /// The port on 127.0.0.1; 0 takes a free one
        #[arg(long, value_name = "PORT", default_value_t = 0)]
        port: u16,
    },
    /// Create a certificate authority, or replace it while the programs run. Contacts no server
    #[command(subcommand)]
    Ca(CaAction),
    /// Move the nodes of a cluster from kube-proxy to Headgate, and back
    #[command(subcommand)]
    Migrate(MigrateArgs),
    /// Remove everything that Headgate has left on the nodes, and that another proxy now does
    ///
    /// Creates a DaemonSet of the agent's image, with your kubeconfig. Its pods wait on each node
    /// until another service proxy has written its rules, and then remove those of Headgate. On a
    /// node without another proxy they remove nothing, because nothing else would forward.
    ///
    /// Exit codes: 0 if every node is clean, or without --wait if the DaemonSet was created; 1 for
    /// an error; 2 for a wrong command line; 3 if nodes are not clean in time. Standard error names
    /// them, with the reasons.
    Cleanup(CleanupArgs),
    /// Show the state of the replica: source, version, counts, rejected objects, and the other
    /// replicas
    Status {
        /// Print the state again when it changes, at most once a second, until Ctrl-C. A terminal
        /// shows only the last one
        #[arg(short, long)]
        watch: bool,
    },
    /// Show the versions of this program, of each replica, and of the agents, and whether they
    /// differ
    Version,
    /// Print a script for a shell, which completes commands, options, and names of nodes and
    /// Services
    ///
    /// For bash: source <(headgatectl completion bash). For zsh: source <(headgatectl completion
    /// zsh). For fish: headgatectl completion fish | source. The names come from the control plane
    /// of HEADGATE_SERVER, with the files of HEADGATE_TLS_CA, HEADGATE_TLS_CERT and
    /// HEADGATE_TLS_KEY; in zsh and fish also from that of --server.
    Completion {
        /// The shell
        #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]))]
        shell: String,
    },
    /// Write a manual page for each command into a folder
    Man {
        /// The folder, which must exist
        folder: PathBuf,
    },
}

impl Command {
    /// Returns whether the command runs until Ctrl-C, and prints what changes.
    pub fn is_watch(&self) -> bool {
        match self {
            Self::Services(ListArgs { rows, .. }) | Self::Endpoints(ListArgs { rows, .. }) => rows.watch,
            Self::Agents(wanted) => wanted.rows.watch,
            Self::Status { watch } => *watch,
            _ => matches!(self, Self::Watch(_)),
        }
    }

    /// The selected Service, empty if none is. An error describes the correct usage.
    pub fn selected(&self) -> Result<Selected, String> {
        match self {
            Self::Services(ListArgs { of, .. }) | Self::Endpoints(ListArgs { of, .. }) => of.resolve(),
            Self::Watch(of) | Self::Wait(WaitArgs { of, .. }) => of.resolve(),
            Self::Counters(CountersArgs { of, .. }) => of.resolve(),
            Self::Connections(ConnectionsArgs { of: CountersArgs { of, .. }, .. }) => of.resolve(),
            Self::Explain(wanted) => match (wanted.pod(), wanted.source) {
                (Some(from), Some(_)) => Err(format!(
                    "--source needs a node, and --from {from} is a pod: give the node of the pod as --from"
                )),
                _ => wanted.of.resolve(),
            },
            _ => Ok(Selected::default()),
        }
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
    ///
    /// Examples:
    ///
    /// kubectl -n kube-system get configmap kube-proxy -o yaml | headgatectl migrate check -
    ///
    /// headgatectl migrate check /var/lib/kube-proxy/config.conf
    ///
    /// headgatectl migrate check -- --proxy-mode=ipvs --cluster-cidr=10.244.0.0/16
    ///
    /// Exit codes: 0 if the agent accepts the settings, 1 if it rejects a value, a flag or another
    /// argument, or if there is no configuration, 2 for a wrong command line.
    Check(CheckArgs),
    /// Move nodes from kube-proxy to Headgate in batches, or back
    ///
    /// Labels the nodes of a batch, so that kube-proxy leaves them, and waits until the agents have
    /// taken over. Then each node of the batch must be up to date and verified, and the ClusterIPs
    /// of the API and of the cluster DNS must answer the node as often as before. The command stops
    /// at the first doubt. The labels are all that it remembers: run it again to go on. It uses
    /// your kubeconfig and your rights, as kubectl does.
    ///
    /// Exit codes: 0 if all selected nodes are moved; 1 for an error, for example if the API server
    /// or all replicas refuse; 2 for a wrong command line; 3 if it stopped at a doubt, which
    /// standard error describes, with the remedy; 5 if kube-proxy is no DaemonSet that a command
    /// may change: standard output says what to do by hand.
    Run(RunArgs),
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
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: Option<String>,
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
    /// End with 1 if there is a row, for example with --failing
    #[arg(long, conflicts_with = "watch")]
    pub exit_code: bool,
    /// Maximum number of rows in the table, the worst nodes first; 0 for all. Default: 50, and all
    /// with --no-headers
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// How the list is shown.
    #[command(flatten)]
    pub rows: RowArgs,
}

/// How a list is shown.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct RowArgs {
    /// Print the list again when it changes, at most once a second, until Ctrl-C. A terminal shows
    /// only the last one
    #[arg(short, long)]
    pub watch: bool,
    /// Print only rows: no header, and no lines below the table
    #[arg(long)]
    pub no_headers: bool,
}

/// The Services of a list, and how the list is shown.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// The Services.
    #[command(flatten)]
    pub of: Selection,
    /// All namespaces, as without any argument
    #[arg(short = 'A', long, conflicts_with_all = ["service", "namespace"])]
    pub all_namespaces: bool,
    /// How the list is shown.
    #[command(flatten)]
    pub rows: RowArgs,
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
    /// The Service.
    #[command(flatten)]
    pub of: Selection,
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
    /// The Service.
    #[command(flatten)]
    pub of: Selection,
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
    /// The Service.
    #[command(flatten)]
    pub of: Selection,
    /// Wait until the control plane knows this endpoint and every node has programmed it
    #[arg(long, value_name = "IP", value_parser = ip_address)]
    pub endpoint: Option<IpAddr>,
    /// Wait until the endpoint or the Service is removed from every node
    #[arg(long)]
    pub gone: bool,
    /// The longest wait, such as 90s, 5m or 1h
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = units::parse_duration)]
    pub timeout: std::time::Duration,
    /// Succeed although Nodes have no agent. The command names them, and does not wait for them
    #[arg(long)]
    pub allow_absent: bool,
}

/// The Services to select.
#[derive(Debug, Default, clap::Args)]
pub struct Selection {
    /// Service as NAMESPACE/NAME, or as NAME with --namespace (default: "default")
    pub service: Option<String>,
    /// Only this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,
}

/// Namespace and name in the form that the `Inspect` service expects. An empty field selects all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selected {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name, or empty.
    pub name: String,
}

impl Selection {
    /// Resolves NAMESPACE/NAME, or NAME with a namespace. An error describes the correct usage.
    fn resolve(&self) -> Result<Selected, String> {
        let (service, flag) = (self.service.as_deref(), self.namespace.as_deref());
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
        Ok(Selected { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(service: Option<&str>, namespace: Option<&str>) -> Result<(String, String), String> {
        let of = Selection { service: service.map(str::to_owned), namespace: namespace.map(str::to_owned) };
        of.resolve().map(|selected| (selected.namespace, selected.name))
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
    fn help_has_the_own_options_first_and_the_connection_apart() {
        for command in command().get_subcommands().map(|command| command.get_name().to_owned()) {
            let help = parse(["headgatectl", &command, "--help"]).unwrap_err().to_string();
            let (own, connection) = match help.split_once("\nConnection:\n") {
                Some((own, connection)) => (own, connection),
                None => (help.as_str(), ""),
            };
            assert!(!own.contains("--server ") && !own.contains("--tls-"), "{help}");
            assert_eq!(connection.contains("--server "), !LOCAL.contains(&command.as_str()), "{help}");
            if own.contains("\nOptions:\n") && !LOCAL.contains(&command.as_str()) {
                assert!(own.contains("--output"), "{help}");
            }
        }
        // Scripts may have one line with the options of the connection for all commands.
        parse(["headgatectl", "--server", "http://127.0.0.1:1", "ca", "init", "--out", "x"]).unwrap();
    }

    #[test]
    fn the_options_are_well_formed() {
        command().debug_assert();
    }
}
