//! `headgatectl` in terminals of 80, 120 and 160 columns, with long names and addresses: no line is
//! wider than the terminal, and each object is one row. Writes what the commands print to
//! `target/captures`, for people to look at.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use headgate_tests::testbed::process::{KilledOnDrop, program};
use serde_json::Value;

use super::rig::{Program, Rig, eventually, node};

const WIDTHS: [usize; 3] = [80, 120, 160];
/// A namespace and names with 43 characters.
const NAMESPACE: &str = "platform-observability";
const COUNT: usize = 5;

fn name(number: usize) -> String {
    format!("distributed-tracing-collector-receiver-otl{number}")
}

fn node_name(number: usize) -> String {
    format!("ip-10-128-200-11{number}.eu-central-1.compute.internal.production.example.com")
}

fn long_service(number: usize) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: {NAMESPACE}, name: {}}}\nspec:\n  type: LoadBalancer\n  \
         clusterIP: 10.96.200.{number}\n  clusterIPs: [10.96.200.{number}, \"fd00:1234:5678:9abc:def0:1234:5678:{number}\"]\n  \
         ipFamilies: [IPv4, IPv6]\n  ipFamilyPolicy: RequireDualStack\n  externalTrafficPolicy: Local\n  \
         healthCheckNodePort: 3290{number}\n  sessionAffinity: ClientIP\n  loadBalancerSourceRanges: [203.0.113.0/24, \"2001:db8:cafe::/48\"]\n  \
         externalIPs: [198.51.100.{number}]\n  ports:\n  \
         - {{name: otlp-grpc, protocol: TCP, port: 4317, targetPort: 4317, nodePort: 3131{number}}}\n  \
         - {{name: otlp-http, protocol: TCP, port: 4318, targetPort: 4318, nodePort: 3141{number}}}\n",
        name(number)
    )
}

fn long_slice(number: usize) -> String {
    let service = name(number);
    let mut text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  namespace: {NAMESPACE}\n  name: {service}-v6\n  \
         labels: {{kubernetes.io/service-name: {service}}}\naddressType: IPv6\nports:\n- {{name: otlp-grpc, protocol: TCP, port: 4317}}\n\
         - {{name: otlp-http, protocol: TCP, port: 4318}}\nendpoints:\n"
    );
    for endpoint in 0..4 {
        let (node, is_ready) =
            if endpoint == 0 { ("node-a".to_owned(), true) } else { (node_name(endpoint), endpoint != 2) };
        text += &format!(
            "- {{addresses: [\"fd00:aaaa:bbbb:cccc:dddd:eeee:{number}:{endpoint}\"], nodeName: {node}, zone: eu-central-1a, \
             conditions: {{ready: {is_ready}, serving: {is_ready}}}, hints: {{forZones: [{{name: eu-central-1a}}, {{name: eu-central-1b}}]}}}}\n"
        );
    }
    text
}

/// One node with an agent, and others without one. One Service is refused, and one lacks an
/// address that belongs to another one.
fn rig() -> (Rig, Program) {
    let rig = Rig::new();
    rig.put("node", &node("podCIDRs: [\"fd00:aaaa:bbbb::/48\"]"));
    for number in 1..COUNT {
        let text = format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {}}}\n", node_name(number));
        rig.put(&format!("node-{number}"), &text);
    }
    for number in 1..=COUNT {
        rig.put(&format!("service-{number}"), &long_service(number));
        rig.put(&format!("slice-{number}"), &long_slice(number));
    }
    let thief = long_service(9).replace("198.51.100.9", "198.51.100.1");
    rig.put("thief", &thief);
    let source = rig.manifests();
    let control_plane = rig.control_plane(&[&[source.as_str()], &super::rig::REPLICA_OPTIONS[..]].concat(), &[]);
    rig.until_said(&["status"], &["synced      yes"]);
    // A replica that starts does not begin to serve while an object is invalid.
    let ports = "ports: [{name: http, protocol: TCP, port: 80}]";
    rig.put(
        "broken",
        &format!("apiVersion: v1\nkind: Service\nmetadata: {{namespace: {NAMESPACE}, name: broken}}\nspec: {{clusterIP: 10.96.200.888, {ports}}}\n"),
    );
    rig.until_said(&["status"], &["10.96.200.888"]);
    (rig, control_plane)
}

/// Runs headgatectl in a terminal of this width, until it ends. Returns what the terminal shows.
fn in_terminal(rig: &Rig, width: usize, command: &str) -> String {
    let headgatectl = program("headgatectl").unwrap();
    let line = format!("stty cols {width} rows 50 && exec {} {command}", headgatectl.display());
    let shown = rig.run(|| {
        let mut child = Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .envs([("NO_COLOR", "1"), ("HEADGATE_SERVER", "http://127.0.0.1:7444"), ("TERM", "xterm")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // At the end of its input, `script` would type Ctrl-D.
        let _input = child.stdin.take();
        let output = child.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    });
    // Help has escape sequences of its own.
    shown.replace('\r', "").split("\u{1b}[").enumerate().fold(String::new(), |text, (index, part)| {
        text + if index == 0 { part } else { part.split_once('m').map_or(part, |(_, rest)| rest) }
    })
}

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("target/captures");
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Lines with commands to paste, or with one word that is wider than the terminal, have any width.
fn may_be_wide(line: &str, width: usize) -> bool {
    let is_command = ["  headgate", "  kubectl "].iter().any(|start| line.starts_with(start));
    is_command || line.split_whitespace().any(|word| word.chars().count() + 4 > width)
}

#[test]
fn no_command_is_wider_than_the_terminal() {
    let (rig, _control_plane) = rig();
    let _agent = rig.agent(&["--proxy-mode=nftables", "--nftables-service-counters"]);
    rig.until_said(&["agents", "node-a"], &["up to date"]);
    let count = |command: &[&str]| {
        let json = rig.headgatectl(&[command, &["-o", "json"]].concat()).unwrap();
        serde_json::from_str::<Value>(&json).unwrap().as_array().unwrap().len()
    };
    assert_eq!((count(&["services"]), count(&["agents"])), (COUNT + 1, COUNT));
    let certs = rig.path("certs");
    let one = format!("{NAMESPACE}/{}", name(1));
    let lists: [(&str, &str, &[&str]); 4] = [
        ("services", NAMESPACE, &["services"]),
        ("endpoints", NAMESPACE, &["endpoints"]),
        ("agents", "", &["agents"]),
        ("endpoints-of-one", "fd00:", &["endpoints", &one]),
    ];
    let others = [
        ("status", "status".to_owned()),
        ("node", "node node-a".to_owned()),
        ("explain", format!("explain {one}")),
        ("verify", "verify".to_owned()),
        ("counters", format!("counters node-a {one}")),
        ("connections", "connections node-a".to_owned()),
        ("wait", format!("wait {one} --timeout 300ms")),
        ("wait-broken", format!("wait {NAMESPACE}/broken --timeout 300ms")),
        ("drain", "drain shop/none".to_owned()),
        ("version", "version".to_owned()),
        ("ca", format!("ca init --out {}", rig.path("ca").display())),
        ("certs", format!("certs --force --out {} --server-ip 192.0.2.1 --reader me --node node-a", certs.display())),
        (
            "migrate",
            "migrate check -o wide -- --proxy-mode=ipvs --cluster-cidr=10.0.0.0/8,fd00:1234:5678::/48 -v 2".to_owned(),
        ),
        ("no-such-service", format!("services {}", name(1))),
        ("no-server", "--server http://127.0.0.1:1 status".to_owned()),
        ("help", "--help".to_owned()),
    ];
    let helps = ["services", "agents", "wait", "explain", "certs", "migrate check", "version", "completion"];
    let helps = helps.map(|command| (format!("help-{}", command.replace(' ', "-")), format!("{command} --help")));
    let others = others.map(|(name, command)| (name.to_owned(), command)).into_iter().chain(helps);
    let others: Vec<(String, String)> = others.collect();
    for width in WIDTHS {
        let _ = fs::remove_dir_all(rig.path("ca"));
        let capture = |name: &str, command: &str| {
            let shown = in_terminal(&rig, width, command);
            fs::write(folder().join(format!("{name}-{width}.txt")), format!("$ headgatectl {command}\n{shown}"))
                .unwrap();
            for line in shown.lines() {
                assert!(line.chars().count() <= width || may_be_wide(line, width), "{command} at {width}:\n{shown}");
            }
            shown
        };
        for (name, command) in &others {
            assert!(!capture(name, command).is_empty(), "{command}");
        }
        for (name, start, command) in lists {
            let command_line = command.join(" ");
            for (suffix, option) in [("", ""), ("-wide", " -o wide")] {
                let shown = capture(&format!("{name}{suffix}"), &format!("{command_line}{option}"));
                // The first lines are the header and the rows.
                let rows: Vec<&str> = shown.lines().skip(1).take(count(command)).collect();
                // A cell that is shortened keeps its begin.
                let begin = |row: &&str| row.starts_with(&start[..start.len().min(4)]) && row.contains("  ");
                assert!(rows.len() == count(command) && rows.iter().all(begin), "{command_line} at {width}:\n{shown}");
                let bare = in_terminal(&rig, width, &format!("{command_line}{option} --no-headers"));
                assert_eq!(
                    bare.lines().map(|line| &line[..4]).collect::<Vec<_>>(),
                    rows.iter().map(|row| &row[..4]).collect::<Vec<_>>()
                );
            }
        }
    }
}

/// What a followed list prints, line by line.
struct Followed {
    lines: std::sync::mpsc::Receiver<String>,
    _child: KilledOnDrop,
}

impl Followed {
    fn start(rig: &Rig, arguments: &[&str]) -> Self {
        let mut command = Command::new(program("headgatectl").unwrap());
        command.args(arguments).env("HEADGATE_SERVER", "http://127.0.0.1:7444");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = rig.run(|| command.spawn().unwrap());
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { lines, _child: KilledOnDrop(child) }
    }

    /// Reads lines until one is as wanted. Returns all of them.
    fn until(&self, what: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let mut seen = Vec::new();
        eventually(what, || {
            seen.extend(self.lines.try_recv());
            if seen.last().is_some_and(|line| is_wanted(line)) { Ok(()) } else { Err(seen.join("\n")) }
        });
        seen
    }

    /// Reads lines until one begins with these words.
    fn until_words(&self, words: &[&str]) -> Vec<String> {
        self.until(&format!("{words:?}"), |line| line.split_whitespace().take(words.len()).eq(words.iter().copied()))
    }
}

/// The addresses of a list of endpoints in JSON.
fn addresses(line: &str) -> Vec<String> {
    let list: Value = serde_json::from_str(line).unwrap();
    list.as_array().unwrap().iter().map(|endpoint| endpoint["address"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn followed_lists_are_printed_again_when_they_change() {
    let rig = Rig::web(10);
    rig.until_said(&["services"], &["web"]);
    let services = Followed::start(&rig, &["services", "-w"]);
    let endpoints = Followed::start(&rig, &["endpoints", "ns/web", "--watch", "--no-headers"]);
    let json = Followed::start(&rig, &["endpoints", "ns/web", "-w", "-o", "json"]);
    let agents = Followed::start(&rig, &["agents", "-w"]);
    let status = Followed::start(&rig, &["status", "-w"]);
    assert_eq!(services.until_words(&["ns", "web"]).len(), 2);
    endpoints.until_words(&["10.244.1.10"]);
    json.until("one endpoint", |line| addresses(line) == ["10.244.1.10"]);
    agents.until_words(&["node-a", "no", "agent"]);
    status.until_words(&["agents", "0"]);

    rig.put("web-1", &super::rig::slice("web", &[("node-a", 10), ("node-a", 11)], ""));
    services.until("two endpoints", |line| line.contains("2/2"));
    assert_eq!(endpoints.until_words(&["10.244.1.11"]).len(), 2);
    json.until("two endpoints", |line| addresses(line) == ["10.244.1.10", "10.244.1.11"]);
    rig.put("web-1", &super::rig::slice("web", &[("node-a", 11)], ""));
    json.until("the removal", |line| addresses(line) == ["10.244.1.11"]);

    let agent = rig.agent(&[]);
    agents.until_words(&["node-a", "up", "to", "date"]);
    status.until_words(&["agents", "1"]);
    drop(agent);
    agents.until_words(&["node-a", "no", "agent"]);
    rig.remove("web");
    services.until("no Service", |line| line == "No Services.");
}

#[test]
fn shells_complete_names_of_nodes_and_services() {
    let rig = Rig::web(10);
    rig.until_said(&["services"], &["web"]);
    let headgatectl = program("headgatectl").unwrap();
    let candidates = |server: &str, words: &str| {
        let count = words.split(' ').count();
        let text = format!(
            "source <(headgatectl completion bash)\nCOMP_WORDS=(headgatectl {words}'')\nCOMP_CWORD={count}\n\
             COMP_TYPE=9\n_clap_complete_headgatectl headgatectl '' ''\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
        );
        let output = rig.run(|| {
            Command::new("bash")
                .args(["-c", &text])
                .env("PATH", format!("{}:{}", headgatectl.parent().unwrap().display(), std::env::var("PATH").unwrap()))
                .env("HEADGATE_SERVER", server)
                .output()
                .unwrap()
        });
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>()
    };
    let server = "http://127.0.0.1:7444";
    // On a busy machine, the replica may not answer in the two seconds for which the shell waits.
    let until = |words: &str, are_so: fn(&[String]) -> bool| {
        eventually(&format!("candidates for {words:?}"), || match candidates(server, words) {
            found if are_so(&found) => Ok(()),
            found => Err(format!("{found:?}")),
        });
    };
    until("wait ", |found| found.first().is_some_and(|first| first == "ns/web"));
    until("explain ns/web --from ", |found| found == ["node-a"]);
    until("--server http://127.0.0.1:7444 node ", |found| found.first().is_some_and(|first| first == "node-a"));
    assert!(candidates(server, "").contains(&"completion".to_owned()));
    // No replica answers, and the shell shows no name and no error.
    assert!(candidates("http://127.0.0.1:1", "wait ").iter().all(|candidate| candidate.starts_with('-')));
}

#[test]
fn manual_pages_and_scripts_of_shells_are_written() {
    let rig = Rig::new();
    let folder = rig.path("man");
    fs::create_dir(&folder).unwrap();
    rig.headgatectl(&["man", folder.to_str().unwrap()]).unwrap();
    let page = fs::read_to_string(folder.join("headgatectl-explain.1")).unwrap();
    assert!(page.contains("SYNOPSIS") && page.contains("\\-\\-from"), "{page}");
    for shell in ["bash", "zsh", "fish"] {
        assert!(rig.headgatectl(&["completion", shell]).unwrap().contains("HEADGATECTL_COMPLETE"), "{shell}");
    }
    assert!(rig.headgatectl(&["completion", "csh"]).is_err());
}
