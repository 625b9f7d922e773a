//! `headgate-drain` (docs/drain.md): a pod's `preStop` exec hook for images without an HTTP client.
//! It asks the node agent when no node sends new connections to the pod any more, and prints the
//! answer. It needs only the standard library, so a static binary is small.

use std::{
    env, fmt, fs,
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    process::ExitCode,
    time::Duration,
};

const USAGE: &str = "usage: headgate-drain ADDRESS:PORT [QUERY]
       headgate-drain --install FILE

Asks http://ADDRESS:PORT/v1/drain?QUERY and prints the answer. ADDRESS:PORT is the --drain-address
of the node agent on this pod's node. If it is missing, HEADGATE_DRAIN_ADDRESS counts. QUERY is for
example timeout=25s&settle=200ms. The namespace of the pod is added to QUERY: HEADGATE_POD_NAMESPACE,
or else that of the ServiceAccount. If HEADGATE_POD_UID is set, it is added as uid, because
Kubernetes does not expand $(POD_UID) in hooks. --install copies this program to FILE, for init
containers.

Exit codes: 0 if the answer is drained or last, 1 if it is incomplete or an error, 2 for a wrong
command line, 3 if the agent does not answer.";

/// The longest time to wait for a connection. The answer may take as long as the timeout in QUERY.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

const MAX_ANSWER_BYTES: u64 = 64 << 10;

const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1).collect::<Vec<_>>();
    match arguments.first().map(String::as_str) {
        Some("-h" | "--help") => return end(0, io::stdout(), USAGE),
        Some("-V" | "--version") => {
            return end(0, io::stdout(), concat!("headgate-drain ", env!("CARGO_PKG_VERSION")));
        }
        _ => {}
    }
    if let [flag, file] = arguments.as_slice()
        && flag == "--install"
    {
        return match env::current_exe().and_then(|program| fs::copy(program, file)) {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) => {
                end(1, io::stderr(), format_args!("headgate-drain: cannot copy this program to {file}: {error}"))
            }
        };
    }
    if arguments.first().is_none_or(|first| first.contains('=')) {
        arguments.splice(0..0, env::var("HEADGATE_DRAIN_ADDRESS").ok());
    }
    let (address, query) = match arguments.as_slice() {
        [address] => (address, ""),
        [address, query] => (address, query.as_str()),
        _ => return end(2, io::stderr(), USAGE),
    };
    let query = with("uid", query, env::var("HEADGATE_POD_UID").ok());
    let namespace = env::var("HEADGATE_POD_NAMESPACE").ok().or_else(|| fs::read_to_string(NAMESPACE_FILE).ok());
    // `pod` contains the namespace.
    let query = if has(&query, "pod") { query } else { with("namespace", &query, namespace) };
    if query.contains(|letter: char| letter.is_whitespace() || letter.is_control()) {
        return end(2, io::stderr(), "headgate-drain: QUERY and the variables HEADGATE_POD_… must not contain spaces");
    }
    match ask(address, &query) {
        Ok(answer) => {
            let _ = write!(io::stdout(), "{answer}");
            let is_over = answer.starts_with("drained\n") || answer.starts_with("last\n");
            if is_over { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let remedy = "check HEADGATE_DRAIN_ADDRESS, the agent's --drain-address, and network policies";
            end(3, io::stderr(), format_args!("headgate-drain: {address}: {error}; {remedy}"))
        }
    }
}

/// Writes a line, and returns the exit code. The code is right also if nobody reads the line.
fn end(code: u8, mut stream: impl io::Write, line: impl fmt::Display) -> ExitCode {
    let _ = writeln!(stream, "{line}");
    ExitCode::from(code)
}

fn with(name: &str, query: &str, value: Option<String>) -> String {
    match value.filter(|value| !value.is_empty() && !has(query, name)) {
        Some(value) => format!("{query}{}{name}={value}", if query.is_empty() { "" } else { "&" }),
        None => query.to_owned(),
    }
}

fn has(query: &str, name: &str) -> bool {
    query.split('&').any(|parameter| parameter.split_once('=').is_some_and(|(found, _)| found == name))
}

fn ask(address: &str, query: &str) -> io::Result<String> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return exchange(stream, query),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn exchange(mut stream: TcpStream, query: &str) -> io::Result<String> {
    // HTTP/1.0: the agent closes the connection after the answer, and sends no chunks.
    // One write, so that a server that answers at once has read the whole request.
    stream.write_all(format!("GET /v1/drain?{query} HTTP/1.0\r\nHost: headgate\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    body.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the answer is not HTTP"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_parameter_is_added_unless_the_query_has_it() {
        let with_uid = |query, uid| super::with("uid", query, uid);
        let with = |query, uid: &str| with_uid(query, Some(uid.to_owned()));
        assert_eq!(with("timeout=5s", "a-1"), "timeout=5s&uid=a-1");
        assert_eq!(with("", "a-1"), "uid=a-1");
        assert_eq!(with("uid=b&timeout=5s", "a-1"), "uid=b&timeout=5s");
        assert_eq!((with("timeout=5s", ""), with_uid("", None)), ("timeout=5s".to_owned(), String::new()));
    }
}
