//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

use crate::certs::CertsArgs;
use crate::units;

/// Shows what a Headgate control plane serves, and what every node has programmed of it.
#[derive(Debug, Parser)]
#[command(name = "headgatectl", version, max_term_width = 100)]
pub struct Args {
    /// Replica to ask; several by repeating it or with commas, or by a name that resolves to several addresses. `agents` and `wait` ask all of them,
    /// other commands the first. Plain http is for loopback and test addresses only; elsewhere: https with the --tls options
    #[arg(
        long,
        global = true,
        env = "HEADGATE_SERVER",
        value_name = "URL",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:7443"
    )]
    pub server: Vec<String>,
    /// Transport security.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Tables for people, or JSON for programs: one array (status, wait: one object; watch: one object a line); wide: tables with more columns
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// What to show.
    #[command(subcommand)]
    pub command: Command,
}

/// Files for an https server.
#[derive(Debug, Clone, clap::Args)]
pub struct TlsArgs {
    /// Certificate authority that signed the replica's certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Own certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the own certificate (PEM)
    #[arg(long, global = true, env = "HEADGATE_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Name in the replica's certificate, where it is not the URL's host (as through a port-forward)
    #[arg(long, global = true, value_name = "NAME")]
    pub tls_server_name: Option<String>,
}

/// How answers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns.
    Table,
    /// Aligned columns, all of them.
    Wide,
    /// JSON with the field names of `headgate.v1.Inspect`.
    Json,
}

/// What to show.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Services: addresses, ports, how many endpoints are ready
    Services(Selection),
    /// Endpoints of one service, or of all: address, ports, state, node
    Endpoints(Selection),
    /// Agents: what each node has programmed, how far it is behind, and why
    Agents(AgentsArgs),
    /// Wait until every connected node has programmed a service, or an endpoint, as it is now
    ///
    /// Exit codes: 0 when all have, 1 when a replica cannot be asked, 2 for a wrong command line, 3 when the time is up: standard error names who has
    /// not, and why. A node that rejects the service has not programmed it. Nodes that disconnect meanwhile are named and not waited for; nodes that
    /// connect meanwhile are.
    Wait(WaitArgs),
    /// Changes from now on, until Ctrl-C
    Watch(Selection),
    /// Make an authority and certificates for a trial, and say how to use them. Asks no server
    Certs(CertsArgs),
    /// The replica itself: source, version, counts, and what it had to refuse
    Status,
}

fn ip_address(text: &str) -> Result<IpAddr, &'static str> {
    text.parse().map_err(|_| "write an IP address, such as 10.244.1.10 or fd00::10")
}

/// Which agents, and in which order.
#[derive(Debug, clap::Args)]
pub struct AgentsArgs {
    /// Only this node
    pub node: Option<String>,
    /// Only this node
    #[arg(long = "node", value_name = "NODE", conflicts_with = "node")]
    pub node_flag: Option<String>,
    /// Only those that have not programmed all that is older than a second, wait for a replica, or are at one that is cut off
    #[arg(long)]
    pub behind: bool,
    /// Only those whose last attempt failed, or that reject resources
    #[arg(long)]
    pub failing: bool,
    /// Rows of the table at most, the worst first; 0 for all
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
}

impl AgentsArgs {
    /// The node that is meant; none for all.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref().or(self.node_flag.as_deref())
    }
}

/// What to wait for.
#[derive(Debug, clap::Args)]
pub struct WaitArgs {
    /// Service as NAMESPACE/NAME, or as NAME together with --namespace (default: "default")
    pub service: String,
    /// Namespace of the service
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// Wait until the control plane knows this endpoint, and every node has programmed it
    #[arg(long, value_name = "IP", value_parser = ip_address)]
    pub endpoint: Option<IpAddr>,
    /// Wait until the endpoint, or the service, is gone, from every node
    #[arg(long)]
    pub gone: bool,
    /// When to give up, such as 90s, 5m or 1h
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::parse_duration)]
    pub timeout: std::time::Duration,
    /// Succeed also when no agent is connected to any replica; without this, agents are waited for
    #[arg(long)]
    pub allow_empty: bool,
}

impl WaitArgs {
    /// The service that is meant.
    pub fn resolve(&self) -> Result<Selected, String> {
        let selection = Selection { service: Some(self.service.clone()), namespace: self.namespace.clone() };
        selection.resolve()
    }
}

/// Which services are meant.
#[derive(Debug, clap::Args)]
pub struct Selection {
    /// Service as NAMESPACE/NAME, or as NAME together with --namespace (default: "default")
    pub service: Option<String>,
    /// Only this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,
}

/// Namespace and name as the `Inspect` service takes them; empty means all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name, or empty.
    pub name: String,
}

impl Selection {
    /// Resolves both spellings; an error is one of usage, and says what to write.
    pub fn resolve(&self) -> Result<Selected, String> {
        let (namespace, name) = match (self.service.as_deref(), self.namespace.as_deref()) {
            (None, namespace) => (namespace.unwrap_or_default(), ""),
            (Some(service), flag) => match (service.split_once('/'), flag) {
                (Some((namespace, _)), Some(flag)) if namespace != flag => {
                    return Err(format!("{service} names another namespace than --namespace {flag}: give one of them"));
                }
                (Some((namespace, name)), _) => (namespace, name),
                (None, flag) => (flag.unwrap_or("default"), service),
            },
        };
        let empty_part = self.service.is_some() && (namespace.is_empty() || name.is_empty());
        if empty_part || name.contains('/') || self.namespace.as_deref() == Some("") {
            let given = self.service.as_deref().unwrap_or("an empty namespace");
            return Err(format!("{given} is no service: write NAMESPACE/NAME, or NAME with --namespace"));
        }
        Ok(Selected { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(service: Option<&str>, namespace: Option<&str>) -> Result<(String, String), String> {
        let selection = Selection { service: service.map(str::to_owned), namespace: namespace.map(str::to_owned) };
        selection.resolve().map(|selected| (selected.namespace, selected.name))
    }

    fn pair(namespace: &str, name: &str) -> Result<(String, String), String> {
        Ok((namespace.to_owned(), name.to_owned()))
    }

    #[test]
    fn both_spellings_of_a_service_resolve() {
        assert_eq!(resolve(None, None), pair("", ""));
        assert_eq!(resolve(None, Some("prod")), pair("prod", ""));
        assert_eq!(resolve(Some("web"), None), pair("default", "web"));
        assert_eq!(resolve(Some("web"), Some("prod")), pair("prod", "web"));
        assert_eq!(resolve(Some("prod/web"), None), pair("prod", "web"));
        assert_eq!(resolve(Some("prod/web"), Some("prod")), pair("prod", "web"));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
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
    fn the_command_line_is_sound() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
    }
}
