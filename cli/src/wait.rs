//! `headgatectl wait`: follows all replicas concurrently, because each replica knows only its own
//! agents.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use headgate_proto::v1::inspect_client::InspectClient;
use headgate_proto::v1::{GetStatusRequest, SourcePosition, WaitProgress, WaitRequest};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;

use crate::answer::{Failure, of_status, write_json};
use crate::args::{Args, Output, Selected, WaitArgs};
use crate::client;
use crate::render::{plain, thousands};
use crate::units;

/// The time after the timeout within which the last message of a replica must arrive.
const GRACE: Duration = Duration::from_secs(5);
/// The maximum number of lagging nodes that the text output names.
const MAX_NAMED: usize = 20;

pub(crate) async fn run(args: &Args, wait: &WaitArgs, service: Selected, out: &mut dyn Write) -> Result<(), Failure> {
    let started = Instant::now();
    let deadline = started + wait.timeout + GRACE;
    let mut clients = Vec::new();
    // The newest source positions that any replica has seen. The answer of a replica counts only
    // after the replica has reached these positions.
    let mut positions: BTreeMap<i32, u64> = BTreeMap::new();
    for (server, tls) in client::replicas(&args.server, &args.tls).await.map_err(Failure::Connect)? {
        let mut client = client::connect(&server, &tls).await.map_err(Failure::Connect)?;
        let status = client.get_status(GetStatusRequest {}).await.map_err(|status| of_status(&server, &status))?;
        for SourcePosition { kind, position } in status.into_inner().positions {
            let newest = positions.entry(kind).or_default();
            *newest = position.max(*newest);
        }
        clients.push((server, client));
    }
    let position = |(kind, position)| SourcePosition { kind, position };
    let request = WaitRequest {
        namespace: service.namespace.clone(),
        name: service.name.clone(),
        endpoint: wait.endpoint.map(|address| address.to_string()).unwrap_or_default(),
        gone: wait.gone,
        timeout_ms: u64::try_from(wait.timeout.saturating_sub(started.elapsed()).as_millis())
            .unwrap_or(u64::MAX)
            .max(1),
        positions: positions.into_iter().map(position).collect(),
    };
    let count = clients.len();
    let servers: Vec<String> = clients.iter().map(|(server, _)| server.clone()).collect();
    let (sender, mut messages) = mpsc::channel(16);
    for (index, (server, client)) in clients.into_iter().enumerate() {
        tokio::spawn(follow(index, server, client, request.clone(), sender.clone()));
    }
    drop(sender);
    let mut latest: Vec<Option<WaitProgress>> = vec![None; count];
    loop {
        let message = timeout_at(deadline, messages.recv()).await;
        let Ok(Some((index, progress))) = message else {
            let is_silent = |progress: &Option<WaitProgress>| progress.as_ref().is_none_or(|last| !last.timed_out);
            let silent = servers.iter().zip(&latest).filter(|(_, last)| is_silent(last)).map(|(server, _)| &**server);
            let (silent, time) = (silent.collect::<Vec<_>>().join(", "), units::duration(ms(wait.timeout)));
            let text =
                format!("{silent} sent no final answer before the timeout ({time}): look at its log and its load");
            return Err(Failure::TimedOut(text));
        };
        latest[index] = Some(progress?);
        let known: Vec<&WaitProgress> = latest.iter().flatten().collect();
        let is_done = known.len() == count && known.iter().all(|progress| progress.waiting_for.is_empty());
        let agents: u64 = known.iter().map(|progress| progress.agents).sum();
        let all_timed_out = known.len() == count && known.iter().all(|progress| progress.timed_out);
        let is_done = is_done && (agents > 0 || wait.allow_empty);
        if !is_done && !all_timed_out {
            continue;
        }
        let report = Report { wait, service: &service, replicas: &known, took_ms: ms(started.elapsed()), is_done };
        return report.write(args.output, out);
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

type Message = (usize, Result<WaitProgress, Failure>);

async fn follow(
    index: usize,
    server: String,
    mut client: InspectClient<Channel>,
    request: WaitRequest,
    sender: mpsc::Sender<Message>,
) {
    let mut stream = match client.wait(request).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return drop(sender.send((index, Err(of_status(&server, &status)))).await),
    };
    loop {
        let message = match stream.message().await {
            Ok(Some(progress)) => Ok(progress),
            Ok(None) => return,
            Err(status) => Err(of_status(&server, &status)),
        };
        let is_over = message.is_err();
        if sender.send((index, message)).await.is_err() || is_over {
            return;
        }
    }
}

struct Report<'a> {
    wait: &'a WaitArgs,
    service: &'a Selected,
    replicas: &'a [&'a WaitProgress],
    took_ms: u64,
    is_done: bool,
}

impl Report<'_> {
    fn write(&self, output: Output, out: &mut dyn Write) -> Result<(), Failure> {
        if output == Output::Json {
            write_json(out, &json!({ "done": self.is_done, "took_ms": self.took_ms, "replicas": self.replicas }))?;
        }
        if !self.is_done {
            return Err(Failure::TimedOut(self.missing()));
        }
        if output != Output::Json {
            let agents = self.sum(|progress| progress.agents);
            let (nodes, verb) = if agents == 1 { ("node", "has") } else { ("nodes", "have") };
            let took = units::duration(self.took_ms);
            writeln!(out, "{}: {} {nodes} {verb} programmed it, {took}", self.what(), thousands(agents))?;
            for node in self.replicas.iter().flat_map(|progress| &progress.disconnected) {
                writeln!(out, "  {}: disconnected during the wait, so the command does not wait for it", plain(node))?;
            }
        }
        Ok(())
    }

    fn sum(&self, count: impl Fn(&WaitProgress) -> u64) -> u64 {
        self.replicas.iter().map(|progress| count(progress)).sum()
    }

    fn what(&self) -> String {
        let Selected { namespace, name } = self.service;
        let gone = if self.wait.gone { " gone" } else { "" };
        match self.wait.endpoint {
            Some(endpoint) => format!("endpoint {endpoint} of {namespace}/{name}{gone}"),
            None => format!("service {namespace}/{name}{gone}"),
        }
    }

    /// Describes why the wait is not over. Problems of replicas come first.
    fn missing(&self) -> String {
        let mut text =
            format!("{}: not programmed on all nodes after {}", self.what(), units::duration(ms(self.wait.timeout)));
        for progress in self.replicas {
            let replica = plain(&progress.replica);
            let problem = match (progress.waiting_for.as_str(), self.wait.gone) {
                ("source", _) if progress.source_state == "unlisted" => "its source has not been listed",
                ("source", _) if progress.source_state == "cut_off" => "the replica is cut off from its source",
                ("source", _) if progress.source_state == "following" => {
                    "its source is behind the source of another replica"
                }
                ("source", _) => "its source has not been listed, or is behind the source of another replica",
                ("service", false) => "the replica does not know the service",
                ("endpoint", false) => "the replica does not know the endpoint",
                ("service", true) => "the replica still has the service",
                ("endpoint", true) => "the replica still has the endpoint",
                _ => continue,
            };
            let _ = write!(text, "\n  replica {replica}: {problem}");
        }
        let (agents, programmed) = (self.sum(|progress| progress.agents), self.sum(|progress| progress.programmed));
        if agents == 0 {
            text.push_str("\n  no agents are connected (with --allow-empty the command succeeds without agents)");
        } else if self.replicas.iter().all(|progress| progress.version > 0) {
            let _ = write!(text, "\n  {} of {} nodes have programmed it", thousands(programmed), thousands(agents));
        }
        let laggards =
            self.replicas.iter().flat_map(|progress| progress.laggards.iter().map(move |laggard| (progress, laggard)));
        for (progress, laggard) in laggards.take(MAX_NAMED) {
            let (at, version) = (laggard.programmed_version, progress.version);
            let reason = match laggard.reason.as_str() {
                "" if laggard.sent_version >= version => "the version was sent, and there is no ACK yet",
                "" => "the version was not sent yet: the agent waits for this replica, or does not read its stream",
                reason => reason,
            };
            let lag = units::duration(laggard.lag_ms);
            let _ = write!(
                text,
                "\n  {}: at version {at} of {version}, {lag} behind: {}",
                plain(&laggard.node),
                plain(reason)
            );
        }
        let named = self.sum(|progress| progress.laggards.len() as u64).min(MAX_NAMED as u64);
        let counted = self.replicas.iter().filter(|progress| progress.version > 0);
        let unnamed = counted.map(|progress| progress.agents - progress.programmed.min(progress.agents)).sum::<u64>();
        let unnamed = unnamed.saturating_sub(named);
        if named > 0 && unnamed > 0 {
            let _ = write!(text, "\n  and {} more; `headgatectl agents --behind` lists them", thousands(unnamed));
        }
        for node in self.replicas.iter().flat_map(|progress| &progress.disconnected).take(MAX_NAMED) {
            let _ = write!(text, "\n  {}: disconnected during the wait", plain(node));
        }
        text
    }
}
