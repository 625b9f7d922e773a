//! Sends mutated HTTP requests to the pages of a running agent, as pods may. `streams/fuzz` lists
//! the other targets.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use headgate_tests::{
    fuzz::{Run, corpus, mutate},
    testbed::{
        Namespace,
        process::{Process, program},
    },
};

const CASES: u64 = 300;
/// If the agent sends no bytes for this time, it waits for the client.
const QUIET: Duration = Duration::from_millis(10);
/// The same for requests that must be answered. The page of metrics waits before it is rendered.
const PATIENCE: Duration = Duration::from_millis(500);
const GUARD: Duration = Duration::from_secs(60);
/// How much memory the agent may take while it answers one request after the other, in kilobytes.
const MOST_KILOBYTES: u64 = 16 << 10;

fn port_of(name: &str) -> u16 {
    match name.split(['-', '.']).next() {
        Some("drain") => 10261,
        Some("health") => 10256,
        Some("metrics") => 10249,
        _ => panic!("no page for {name}"),
    }
}

/// Sends a request, waits until the agent is silent for the time `quiet`, and closes the writing
/// half. Returns the answer.
fn talk(port: u16, request: &[u8], quiet: Duration) -> io::Result<Vec<u8>> {
    let mut socket = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    socket.set_read_timeout(Some(quiet))?;
    let mut answer = Vec::new();
    // The agent may answer and close the connection before it has read everything.
    if socket.write_all(request).is_ok() {
        let _ = socket.read_to_end(&mut answer);
    }
    let _ = socket.shutdown(Shutdown::Write);
    socket.set_read_timeout(Some(GUARD))?;
    match socket.read_to_end(&mut answer) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(answer),
    }
}

/// Whether a page has answered, also with an error of its own. The HTTP library answers requests
/// that are malformed without a body.
fn is_answered(answer: &[u8]) -> bool {
    let body = answer.windows(4).position(|part| part == b"\r\n\r\n").map(|end| &answer[end + 4..]);
    answer.starts_with(b"HTTP/1.1 ") && body.is_some_and(|body| !body.is_empty())
}

fn resident_kilobytes(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn mutated_requests_to_the_pages_of_an_agent_are_read_safely() {
    let namespace = Namespace::for_test("fuzz-pages").unwrap();
    namespace.ip_batch("link set lo up\n").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(program("headgate-node-agent").unwrap());
    // No control plane listens. The pages do not need one.
    command.args([
        "--node-name=node-a",
        "--control-plane=http://127.0.0.1:7443",
        "--insecure-loopback",
        "--state-dir=",
    ]);
    command.args(["--proxy-mode=nftables", "--drain-address=127.0.0.1:10261", "--log=error"]);
    let mut agent = Process::start("agent", &namespace, command, &folder.path().join("log")).unwrap();
    let corpus = corpus("pages");
    let others: Vec<Vec<u8>> = corpus.iter().map(|(_, bytes)| bytes.clone()).collect();
    let words = [
        "\r\n",
        "\r\n\r\n",
        "&timeout=",
        "&uid=",
        "pod=",
        "%2F",
        "%00",
        "1h",
        "18446744073709551615ns",
        "Content-Length: 9\r\n",
        "HTTP/1.0",
    ];
    namespace
        .run(|| {
            let deadline = Instant::now() + GUARD;
            for (name, request) in &corpus {
                while !talk(port_of(name), request, PATIENCE).is_ok_and(|answer| is_answered(&answer)) {
                    agent.check_running()?;
                    assert!(Instant::now() < deadline, "{name} of the corpus is not answered");
                    std::thread::sleep(Duration::from_millis(30));
                }
            }
            let before = resident_kilobytes(agent.id());
            let mut cases = Run::new("pages", CASES);
            while cases.goes_on() {
                let (name, request) = &corpus[cases.rng.usize(0..corpus.len())];
                let mut request = request.clone();
                mutate(&mut cases.rng, &mut request, &others, &words);
                let began = Instant::now();
                let answer = talk(port_of(name), &request, QUIET);
                let grown = resident_kilobytes(agent.id()).saturating_sub(before);
                let result = match answer {
                    Ok(_) if grown > MOST_KILOBYTES => Err(format!("the agent has grown by {grown} kB")),
                    Ok(answer) => Ok(is_answered(&answer)),
                    Err(error) => {
                        Err(format!("the agent keeps the connection open after the client closed it: {error}"))
                    }
                };
                cases.count(&request, began, result);
                agent.check_running()?;
            }
            cases.finish();
            Ok(())
        })
        .unwrap();
    // A panic ends only its task, and is in the log.
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(!log.contains("panicked"), "{log}");
}
