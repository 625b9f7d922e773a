//! A real control plane with a simulated fleet, for the tests of the page (`make page-test`).
//!
//! Prints one line of JSON: the network namespace, the address of the replica, and the files of a
//! client. Then changes endpoints, and obeys the lines of standard input: `suspend N` ends the
//! agent with this number, and `resume N` starts it again. The end of the input ends the program.

use std::{io::BufRead as _, sync::mpsc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use clap::Parser;
use headgate_proto::v1::{AgentMessage, AgentStatus, ApplyFailed, Drift, Verified, agent_message::Body};
use headgate_tests::fleet::{
    Break, Client, Settings,
    stage::{Setup, Stage},
};
use serde_json::json;

/// Serves a simulated fleet to the page
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of agents
    #[arg(long, default_value_t = 3)]
    agents: usize,
    /// Number of Services
    #[arg(long, default_value_t = 12)]
    services: u32,
    /// Number of endpoints of each Service
    #[arg(long, default_value_t = 3)]
    endpoints: u32,
    /// Endpoint changes per second
    #[arg(long, default_value_t = 2)]
    rate: u32,
    /// End 3 agents, delay 2, let 1 fail, and let 1 report a difference
    #[arg(long)]
    unwell: bool,
}

/// Nodes that lose their agents, those whose agents acknowledge nothing, the one that fails, and
/// the one that differs.
const ABSENT: [usize; 3] = [11, 12, 1477];
const BEHIND: [usize; 2] = [200, 3031];
const FAILING: usize = 2333;
const DIFFERS: usize = 1048;

fn is_one_of(numbers: &[usize]) -> impl Fn(&Client) -> bool + Send + use<> {
    let names: Vec<String> = numbers.iter().map(|number| Stage::node_name(*number)).collect();
    move |client| names.iter().any(|name| *name == client.member().node)
}

fn status(drift: usize) -> AgentMessage {
    let difference = "the kernel lacks endpoint 11.0.0.1:8080 behind 10.96.0.0:80/TCP".to_owned();
    let drift = vec![Drift { service: "bench/service-00000".into(), difference }; drift];
    let verified = Verified { ago_ms: 0, drift_count: drift.len() as u64, drift };
    let status = AgentStatus { backend: "nftables".into(), verified: Some(verified), ..AgentStatus::default() };
    AgentMessage { body: Some(Body::Status(status)) }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut stage = Stage::set(Setup {
        services: arguments.services,
        endpoints: arguments.endpoints,
        agents: arguments.agents,
        full_agents: 0,
        settings: Settings::default(),
        is_pinned: false,
    })?;
    for number in 0..arguments.agents {
        let pool = ["general", "general", "memory"][number / 3 % 3];
        let labels = json!({
            "topology.kubernetes.io/zone": format!("zone-{}", ["a", "b", "c"][number % 3]),
            "node.kubernetes.io/pool": pool,
        });
        let metadata = json!({ "name": Stage::node_name(number), "labels": labels });
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata });
        stage.source.api().apply(node).map_err(|failure| anyhow!("writing a Node: {failure:?}"))?;
    }
    stage.start_replica()?;
    stage.join(0, arguments.agents, 0)?;
    stage.fleet.ask(|worker| worker.tell(&status(0), |_| true))?;
    if arguments.unwell {
        let failed = ApplyFailed { version: 1, error: "nft: Operation not supported".into(), attempts: 3 };
        let failed = AgentMessage { body: Some(Body::ApplyFailed(failed)) };
        stage.fleet.ask(move |worker| {
            worker.mute(is_one_of(&BEHIND));
            worker.mute(is_one_of(&[FAILING]));
            worker.tell(&failed, is_one_of(&[FAILING]));
            worker.tell(&status(1), is_one_of(&[DIFFERS]));
            worker.suspend(Break::Close, is_one_of(&ABSENT));
        })?;
    }
    let [ca, cert, key] = stage.reader_files()?;
    let server = format!("https://{}", stage.replicas[0].inspect_address());
    println!(
        "{}",
        json!({ "namespace": stage.machines.server().name(), "server": server, "ca": ca, "cert": cert, "key": key })
    );
    let (lines, input) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if lines.send(line).is_err() {
                return;
            }
        }
    });
    let pause = Duration::from_secs(1) / arguments.rate.max(1);
    loop {
        match input.recv_timeout(pause) {
            Ok(line) => obey(&stage, &line)?,
            Err(mpsc::RecvTimeoutError::Timeout) => drop(stage.source.change()?),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn obey(stage: &Stage, line: &str) -> Result<()> {
    let (verb, number) = line.split_once(' ').context("write a verb and a number")?;
    let number: usize = number.trim().parse().context("the number of the agent is invalid")?;
    let replica = stage.replicas[0].address();
    let is_resumed = verb == "resume";
    stage.fleet.ask(move |worker| match is_resumed {
        true => worker.resume(&[replica], is_one_of(&[number])),
        false => worker.suspend(Break::Close, is_one_of(&[number])),
    })
}
