//! Reads pages of programs over HTTP.

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::netns::Namespace;

/// Gets a page in the network namespace of the calling thread, and returns the whole answer: the
/// status, the headers and the body.
///
/// # Errors
/// The program does not answer within a minute.
pub fn get(address: impl ToSocketAddrs, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: program\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Gets a page of the agent's metrics port on a node like [`get`].
///
/// # Errors
/// As [`get`].
pub fn of_agent(node: &Namespace, path: &str) -> Result<String> {
    node.run(|| get("127.0.0.1:10249", path).context("reading a page of the agent"))
}

/// The value of a sample on a page of metrics, or 0 if the sample is missing or no number.
pub fn sample<T: FromStr + Default>(page: &str, name: &str) -> T {
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}
