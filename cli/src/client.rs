//! Connections to replicas, and advice for connections that fail.

use std::{
    error::Error,
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use headgate_proto::{
    AGENTS_ONLY, errors,
    v1::{GetStatusRequest, inspect_client::InspectClient},
};
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use crate::{args::TlsArgs, units};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a handshake, which a busy replica delays, and of an answer's first part.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval of keepalives, which detect a silent replica.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The begin of the URL of a Unix socket. Its rights decide who may open it.
const SOCKET_SCHEME: &str = "unix:";

const CHECK_SERVER: &str = "Check --server (or HEADGATE_SERVER): scheme, host and port.";

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The command line is wrong. A retry does not help.
    #[error("{0}")]
    Usage(String),
    /// A file of the TLS options cannot be used. A retry does not help.
    #[error("{0}")]
    File(String),
    /// The server does not answer, or the answer is unexpected. A retry may help.
    #[error("cannot reach {server}: {reason}\n{advice}")]
    Unreachable {
        /// The URL.
        server: String,
        /// The error of the system or of the server.
        reason: String,
        /// The remedy.
        advice: String,
    },
    /// No replica answers. A retry may help.
    #[error("no replica of --server answers:{}", .0.iter().map(|failure| format!("\n{failure}")).collect::<String>())]
    NoReplica(Vec<ConnectError>),
}

/// A connection to a replica. Any replica answers for all replicas.
#[derive(Debug, Clone)]
pub struct Replica {
    /// Sends the requests.
    pub client: InspectClient<Channel>,
    /// The URL of the replica.
    pub server: String,
}

/// Connects to the first replica that answers a request. The URLs of `servers` are tried in order.
/// If the host name of a URL resolves to several addresses, each address is tried. Fails if no
/// replica answers, and names each failure.
pub async fn connect(servers: &[String], tls: &TlsArgs) -> Result<Replica, ConnectError> {
    let mut failures = Vec::new();
    for server in servers {
        let addresses = match addresses_of(server, tls).await {
            Ok(addresses) => addresses,
            Err(error @ ConnectError::Unreachable { .. }) => {
                failures.push(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        for (server, tls) in addresses {
            match connect_to(server, &tls).await {
                Ok(replica) => return Ok(replica),
                Err(error) => failures.push(error),
            }
        }
    }
    Err(if failures.len() == 1 { failures.swap_remove(0) } else { ConnectError::NoReplica(failures) })
}

/// Connects to one replica, and asks for its status: the kernel accepts connections for a program
/// that hangs, and a replica may reject a certificate after the handshake.
async fn connect_to(server: String, tls: &TlsArgs) -> Result<Replica, ConnectError> {
    let endpoint = endpoint(&server, tls)?;
    // The endpoint's own connect timeout covers only TCP.
    let connected = tokio::time::timeout(ANSWER_TIMEOUT, endpoint.connect()).await;
    let connected = connected.map_err(|_| silent(&server, ANSWER_TIMEOUT))?;
    let channel = connected.map_err(|error| refused(&server, &error))?;
    let mut client = InspectClient::new(channel);
    let answer = client.get_status(GetStatusRequest { only_this_replica: true, last_changes: 0 }).await;
    let broke = answer.as_ref().is_err_and(|status| broken(&server, status).is_some());
    match answer.err().and_then(|status| failure(&server, &status)) {
        // The handshake of TLS 1.3 ends before the replica looks at the certificate.
        Some(_) if broke && server.starts_with("https://") && tls.tls_cert.is_none() => Err(unreachable(
            &server,
            "the replica ended the connection, and no client certificate was given",
            "Give --tls-cert and --tls-key: the certificate of a reader, as `headgatectl certs --reader NAME` makes it.",
        )),
        Some(error) => Err(error),
        // An error of the replica itself is also an answer. The command's own request reports it.
        None => Ok(Replica { client, server }),
    }
}

fn unreachable(server: &str, reason: impl Into<String>, advice: &str) -> ConnectError {
    ConnectError::Unreachable { server: server.to_owned(), reason: reason.into(), advice: advice.to_owned() }
}

/// The error for a replica that accepts connections and does not answer.
pub(crate) fn silent(server: &str, timeout: Duration) -> ConnectError {
    let time = units::duration(units::milliseconds(timeout));
    unreachable(
        server,
        format!("the server accepts connections but has not answered within {time}"),
        "The replica hangs or is overloaded: look at its log and its load, or name another replica with --server.",
    )
}

/// The URLs of the replicas that one server URL names, each with the TLS options to use. If the
/// host name resolves to several addresses, the URLs contain addresses, and `tls_server_name` is
/// the name that the certificates must contain.
async fn addresses_of(server: &str, tls: &TlsArgs) -> Result<Vec<(String, TlsArgs)>, ConnectError> {
    let itself = || vec![(server.to_owned(), tls.clone())];
    if server.starts_with(SOCKET_SCHEME) {
        return Ok(itself());
    }
    // Check the URL and the TLS options before the name is resolved.
    let uri = endpoint(server, tls)?.uri().clone();
    let (scheme, host) = (uri.scheme_str().unwrap_or("https"), uri.host().unwrap_or_default());
    let port = uri.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    let bare = bare(host);
    if bare.parse::<IpAddr>().is_ok() {
        return Ok(itself());
    }
    let found = tokio::net::lookup_host((bare, port)).await;
    let found =
        found.map_err(|error| unreachable(server, format!("{bare} does not resolve: {error}"), CHECK_SERVER))?;
    let addresses: Vec<SocketAddr> = found.collect();
    // `localhost` resolves to an IPv4 and an IPv6 address of the same replica.
    if addresses.len() < 2 || bare == "localhost" {
        return Ok(itself());
    }
    let name = tls.tls_server_name.clone().unwrap_or_else(|| bare.to_owned());
    let tls = TlsArgs { tls_server_name: Some(name), ..tls.clone() };
    Ok(addresses.iter().map(|address| (format!("{scheme}://{address}"), tls.clone())).collect())
}

fn endpoint(server: &str, tls: &TlsArgs) -> Result<Endpoint, ConnectError> {
    let usage = ConnectError::Usage;
    let endpoint = Endpoint::from_shared(server.to_owned())
        .map_err(|error| usage(format!("--server {server} is not a valid URL ({error}): write https://HOST:7444")))?
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(ANSWER_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_while_idle(true);
    if server.starts_with(SOCKET_SCHEME) {
        return Ok(endpoint);
    }
    let uri = endpoint.uri();
    let host = uri.host().unwrap_or_default();
    match uri.scheme_str() {
        Some("http") if may_be_plain(host) => {
            if tls.tls_ca.is_some() || tls.tls_cert.is_some() || tls.tls_key.is_some() {
                return Err(usage(format!(
                    "--server {server} does not use TLS, but TLS files are given: write https://"
                )));
            }
            Ok(endpoint)
        }
        Some("http") => Err(usage(format!(
            "--server {server} does not use TLS, but only loopback and test addresses work without TLS: \
             write https:// and give --tls-ca, --tls-cert and --tls-key"
        ))),
        Some("https") => endpoint
            .tls_config(tls_config(tls)?)
            .map_err(|error| usage(format!("the TLS files cannot be used: {}: {}", files(tls), chain(&error)))),
        None if uri.port_u16().is_some() => {
            Err(usage(format!("--server {server} has no scheme: write https://{server}")))
        }
        _ => Err(usage(format!("--server {server} has an unknown scheme: write https://HOST:7444"))),
    }
}

/// The host of a URL without the brackets around an IPv6 address.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

fn may_be_plain(host: &str) -> bool {
    host == "localhost" || bare(host).parse().is_ok_and(headgate_proto::addresses::may_lack_tls)
}

fn tls_config(tls: &TlsArgs) -> Result<ClientTlsConfig, ConnectError> {
    let Some(authority) = &tls.tls_ca else {
        return Err(ConnectError::Usage(
            "https needs --tls-ca: the authority that signed the replica's certificate".to_owned(),
        ));
    };
    let mut settings = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read("tls-ca", authority)?));
    match (&tls.tls_cert, &tls.tls_key) {
        (Some(certificate), Some(key)) => {
            settings = settings.identity(Identity::from_pem(read("tls-cert", certificate)?, read("tls-key", key)?));
        }
        (None, None) => {}
        _ => return Err(ConnectError::Usage("--tls-cert and --tls-key belong together: give both options".to_owned())),
    }
    if let Some(name) = &tls.tls_server_name {
        settings = settings.domain_name(name);
    }
    Ok(settings)
}

/// Describes what the TLS files must contain, for errors that do not name the faulty file.
fn files(tls: &TlsArgs) -> String {
    let path = |file: &Option<PathBuf>| {
        file.as_ref().map_or_else(|| "(not given)".to_owned(), |file| file.display().to_string())
    };
    let (ca, cert, key) = (path(&tls.tls_ca), path(&tls.tls_cert), path(&tls.tls_key));
    format!(
        "--tls-ca {ca} must contain authorities, --tls-cert {cert} a certificate, and --tls-key {key} its private key"
    )
}

fn read(option: &'static str, path: &Path) -> Result<Vec<u8>, ConnectError> {
    let failed = |reason: String| ConnectError::File(format!("--{option} {}: {reason}", path.display()));
    let content = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    if !content.windows(11).any(|window| window == b"-----BEGIN ") {
        return Err(failed(
            "the file is not in PEM format: expected a line like -----BEGIN CERTIFICATE-----".to_owned(),
        ));
    }
    Ok(content)
}

/// The error for a server that accepts no connection.
fn refused(server: &str, error: &tonic::transport::Error) -> ConnectError {
    let cause = causes(error).find_map(|source| source.downcast_ref::<io::Error>());
    let advice = match cause.map(io::Error::kind) {
        _ if cause.is_some_and(headgate_tls::is_not_tls) => {
            "The server does not speak TLS: check the port. For a control plane without TLS, on a loopback or test address, use an http:// URL."
        }
        Some(io::ErrorKind::ConnectionRefused) => {
            "No control plane listens at this address. Set the address of a control plane with --server URL, or HEADGATE_SERVER in the environment."
        }
        Some(io::ErrorKind::TimedOut) => "The machine does not answer. Check the address, and firewalls on the path.",
        Some(io::ErrorKind::InvalidData) => {
            "The TLS handshake failed. Check that --tls-ca signed the replica's certificate, and that the certificate names this host \
             (--tls-server-name)."
        }
        _ => CHECK_SERVER,
    };
    unreachable(server, chain(error), advice)
}

/// Returns the error for a request that no replica answered: the server hangs, is not a control
/// plane, or the connection broke. Returns `None` if the replica answered with an error.
pub(crate) fn failure(server: &str, status: &tonic::Status) -> Option<ConnectError> {
    // The answer did not begin within the timeout.
    if causes(status).any(<dyn Error>::is::<tonic::TimeoutExpired>) {
        return Some(silent(server, ANSWER_TIMEOUT));
    }
    misaddressed(server, status).or_else(|| broken(server, status))
}

/// Returns the error for a server that is not a control plane, or whose URL has the wrong scheme.
fn misaddressed(server: &str, status: &tonic::Status) -> Option<ConnectError> {
    let is = |reason: &str, advice: &str| Some(unreachable(server, reason, advice));
    if status.message().starts_with("grpc-status header missing") {
        return is(
            "the server speaks HTTP, but is not a control plane",
            "Check the port of --server (or HEADGATE_SERVER): a control plane answers at its --inspect-listen address, and serves metrics at another address.",
        );
    }
    if status.message().contains(AGENTS_ONLY) {
        let advice = "Check the port of --server (or HEADGATE_SERVER): it must be the port of --inspect-listen.";
        return is(status.message(), advice);
    }
    // tonic reports a TLS alert as one of these codes. A replica rarely sends these codes itself.
    let is_broken = matches!(status.code(), Code::Internal | Code::Unknown | Code::Unavailable | Code::Cancelled);
    let uri: tonic::transport::Uri = server.parse().ok().filter(|_| is_broken)?;
    let is_plain = uri.scheme_str() == Some("http");
    if is_plain && headgate_tls::speaks_tls((bare(uri.host()?), uri.port_u16().unwrap_or(80))) {
        return is(
            "the server speaks TLS, but the URL begins with http://",
            "Write https:// in --server (or HEADGATE_SERVER), and give --tls-ca, --tls-cert and --tls-key.",
        );
    }
    None
}

/// The error for a broken connection. In TLS 1.3, only this shows a rejected certificate.
fn broken(server: &str, status: &tonic::Status) -> Option<ConnectError> {
    let broken = causes(status).find(|cause| cause.is::<tonic::transport::Error>())?;
    // The alert with the reason is lost if the connection closes before it is read.
    let advice = if server.starts_with("https://") {
        "The replica has stopped, or rejects the TLS handshake; the log of the replica names the reason. The certificate of --tls-cert and --tls-key must be \
         valid now, have the extended key usage clientAuth, and be signed by an authority of the replica's --tls-client-ca."
    } else {
        "The connection broke: the replica may have stopped. Try again."
    };
    Some(unreachable(server, chain(broken), advice))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |cause| (*cause).source())
}

/// Joins the messages of an error and its causes, without tonic's "transport error".
pub fn chain(error: &(dyn Error + 'static)) -> String {
    errors::chain(error).trim_start_matches("transport error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_without_tls_are_allowed_only_to_loopback_and_test_addresses() {
        for host in ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "192.0.2.1", "198.51.100.7", "203.0.113.9"] {
            assert!(may_be_plain(host), "{host}");
        }
        assert!(may_be_plain("198.18.0.1") && may_be_plain("198.19.255.255") && may_be_plain("[2001:db8::1]"));
        for host in
            ["10.0.0.1", "198.20.0.1", "192.0.3.1", "[2001:db9::1]", "headgate.example", "localhost.example", ""]
        {
            assert!(!may_be_plain(host), "{host}");
        }
    }
}
