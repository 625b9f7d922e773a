//! Questions to the programs, and the comparison of each answer with the kernels.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read as _, Seek as _},
    process::{Child, Command, Stdio},
    sync::{Mutex, atomic::Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use fastrand::Rng;
use headgate_tests::{
    apiserver::Kind,
    testbed::{Namespace, process::program},
};
use serde_json::Value;

use super::{
    source::{BAIT, CLUSTER, GATE, LOCAL, NAMESPACE, NODES, Phase, Pod, service_name},
    world::{Shared, lock, url},
};

/// How long a question may take until its answer counts as missing.
const LIMIT: Duration = Duration::from_secs(25);
/// The time that the programs get for an answer.
const TIMEOUT: &str = "20s";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Question {
    Agents,
    Wait,
    WaitGone,
    /// A pod stops, and `headgatectl` or the pod itself asks.
    Drain,
    PodAsks,
    /// A pod that is not ready does not stop.
    DrainUnready,
    Gate,
    Verify,
}

impl Question {
    /// All questions; some of them are more frequent.
    pub(super) const ALL: [Self; 13] = [
        Self::Agents,
        Self::Agents,
        Self::Wait,
        Self::WaitGone,
        Self::Drain,
        Self::Drain,
        Self::Drain,
        Self::PodAsks,
        Self::PodAsks,
        Self::PodAsks,
        Self::DrainUnready,
        Self::Gate,
        Self::Verify,
    ];
}

/// The answers so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// How often each question had each outcome.
    pub(super) outcomes: BTreeMap<(Question, String), usize>,
    pub(super) definite: BTreeMap<Question, usize>,
    /// The claims that differ from the kernels.
    pub(super) false_claims: Vec<String>,
}

/// What a program printed, and its exit code.
struct Said {
    code: Option<i32>,
    out: String,
    errors: String,
}

/// A running program.
struct Asked {
    child: Child,
    out: File,
    errors: File,
    until: Instant,
}

impl Asked {
    fn start(namespace: &Namespace, mut command: Command) -> Result<Self> {
        let (out, errors) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(errors.try_clone()?).env("NO_COLOR", "1");
        Ok(Self { child: namespace.spawn(command)?, out, errors, until: Instant::now() + LIMIT })
    }

    /// Returns what the program said, if it has ended. Ends it after [`LIMIT`].
    fn poll(&mut self) -> Result<Option<Said>> {
        let mut status = self.child.try_wait()?;
        if status.is_none() && Instant::now() > self.until {
            self.child.kill()?;
            status = Some(self.child.wait()?);
        }
        let Some(status) = status else { return Ok(None) };
        let read = |file: &mut File| -> Result<String> {
            let mut bytes = Vec::new();
            file.rewind()?;
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let out = read(&mut self.out)?;
        // Stories have short lines.
        let out = serde_json::from_str::<Value>(&out)
            .map_or_else(|_| out.trim().replace('\n', " "), |value| value.to_string());
        Ok(Some(Said { code: status.code(), out, errors: read(&mut self.errors)?.trim().to_owned() }))
    }

    fn answer(mut self) -> Result<Said> {
        loop {
            if let Some(said) = self.poll()? {
                return Ok(said);
            }
            sleep(Duration::from_millis(5));
        }
    }
}

/// The state of each node that `headgatectl agents` shows.
pub(super) fn states(shared: &Shared) -> Result<BTreeMap<String, String>> {
    let servers: Vec<String> = shared.running().into_iter().map(url).collect();
    let said = headgatectl(shared, &servers.join(","), &["agents"])?.answer()?;
    let rows: Vec<Value> = serde_json::from_str(&said.out).unwrap_or_default();
    let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    Ok(rows.iter().map(|row| (text(row, "node"), text(row, "state"))).collect())
}

fn headgatectl(shared: &Shared, servers: &str, arguments: &[&str]) -> Result<Asked> {
    let mut command = Command::new(program("headgatectl")?);
    command.args([&format!("--server={servers}"), "--output=json"]).args(arguments);
    Asked::start(&shared.control, command)
}

/// Asks one question.
pub(super) struct Asker<'a> {
    pub(super) shared: &'a Shared,
    pub(super) tally: &'a Mutex<Tally>,
    pub(super) rng: Rng,
    /// The round, for messages.
    pub(super) round: String,
    /// Whether one replica answers for all.
    pub(super) one_answers: bool,
}

impl Asker<'_> {
    /// Asks a question, and compares the answer with the kernels.
    pub(super) fn ask(mut self, question: Question, crowd_pod: Option<usize>) {
        let asked = match question {
            Question::Agents | Question::Verify => self.all_nodes(question),
            Question::Wait => self.wait(),
            Question::WaitGone => self.wait_gone(),
            Question::Drain | Question::PodAsks => self.drain(question, crowd_pod),
            Question::DrainUnready => self.drain_unready(),
            Question::Gate => self.gate(),
        };
        let (outcome, is_definite) = asked.unwrap_or_else(|error| (format!("error: {error:#}"), false));
        let mut tally = lock(self.tally);
        *tally.outcomes.entry((question, outcome)).or_default() += 1;
        *tally.definite.entry(question).or_default() += usize::from(is_definite);
    }

    fn is_false(&self, claim: &str) {
        self.shared.tell(format!("FALSE: {claim}"));
        let (claim, claims) = (format!("{}: {claim}", self.round), &mut lock(self.tally).false_claims);
        if !claims.contains(&claim) {
            claims.push(claim);
        }
    }

    /// Starts `headgatectl`. Old programs must ask all replicas (except for `drain` and `status`).
    fn headgatectl(&mut self, arguments: &[&str]) -> Result<Asked> {
        let mut places = self.shared.running();
        if (self.one_answers || ["drain", "status"].contains(&arguments[0])) && places.len() > 1 {
            places = vec![places[self.rng.usize(0..places.len())]];
        }
        let servers: Vec<String> = places.into_iter().map(url).collect();
        headgatectl(self.shared, &servers.join(","), arguments)
    }

    /// The resourceVersion of the last EndpointSlice that each replica knows, by name.
    fn known(&self) -> Result<BTreeMap<String, u64>> {
        let mut known = BTreeMap::new();
        for place in self.shared.running() {
            let said = headgatectl(self.shared, &url(place), &["status"])?.answer()?;
            let Ok(status) = serde_json::from_str::<Value>(&said.out) else { continue };
            let of_slices = |position: &&Value| {
                position["kind"].as_str().is_some_and(|kind| kind.eq_ignore_ascii_case("endpoint_slices"))
                    || position["kind"] == 2
            };
            let position = status["positions"].as_array().and_then(|all| all.iter().find(of_slices));
            if let (Some(name), Some(position)) = (status["replica"].as_str(), position) {
                known.insert(name.to_owned(), position["position"].as_u64().unwrap_or_default());
            }
        }
        Ok(known)
    }

    /// Asks `agents` or `verify` until all nodes are up to date or verified.
    fn all_nodes(&mut self, question: Question) -> Result<(String, bool)> {
        // `agents` is asked several times in a row, because a state may be wrong only for a moment.
        let (command, field, wanted, times) = match question {
            Question::Agents => ("agents", "state", "up_to_date", 12),
            _ => ("verify", "result", "verified", 1),
        };
        // An agent that is up to date may not know yet what another program did.
        let counts = |node: usize, asked: Instant, service: usize| match question {
            _ if service != BAIT => true,
            Question::Verify => !self.shared.has_lost_bait(node, asked),
            _ => self.shared.is_broken[node].load(Ordering::Relaxed),
        };
        let until = Instant::now() + LIMIT;
        loop {
            let known = self.known()?;
            self.shared.tell(format!("{command}: known {known:?}"));
            // The replica of a row is unknown if the program is old.
            let is_complete = known.len() == self.shared.running().len();
            let least = known.values().min().filter(|_| is_complete).copied().unwrap_or_default();
            if question == Question::Agents {
                // Changes that a replica has known for less than a second do not count.
                sleep(Duration::from_millis(1200));
            } else if self.rng.bool() {
                let node = self.rng.usize(0..NODES.len());
                self.shared.forget_bait(node);
            }
            for time in 1..=times {
                let asked = Instant::now();
                let said = self.headgatectl(&[command])?.answer()?;
                let rows: Vec<Value> = serde_json::from_str(&said.out).unwrap_or_default();
                let good: Vec<&Value> = rows.iter().filter(|row| row[field] == wanted).collect();
                for row in &good {
                    let Some(node) = NODES.iter().position(|node| row["node"] == *node) else { continue };
                    let replica = row["replica"].as_str().unwrap_or_default();
                    let version = known.get(replica).copied().unwrap_or(least);
                    let kernel = self.shared.read(node)?;
                    if let Some(difference) =
                        self.shared.source().compare(node, &kernel, version, |service| counts(node, asked, service))
                    {
                        let known = format!("{replica} knew {version}");
                        self.is_false(&format!("{command}: {wanted} ({known}), but {difference}"));
                    }
                }
                if time == times && good.len() == NODES.len() && rows.len() == good.len() {
                    return Ok((wanted.to_owned(), true));
                }
                if Instant::now() > until {
                    self.shared.tell(format!("{command}: {} {}", said.out, said.errors));
                    return Ok((format!("not {wanted}"), false));
                }
            }
            sleep(Duration::from_millis(self.rng.u64(0..500)));
        }
    }

    fn wait(&mut self) -> Result<(String, bool)> {
        let (node, service) = (self.rng.usize(0..NODES.len()), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.add(api, node, &[service], Phase::Unready);
            source.hold(pod);
            source.set(api, pod, Phase::Ready);
            pod
        });
        let asked = Instant::now();
        let shown = self.pod(pod);
        let address = shown.address.to_string();
        let service = format!("{NAMESPACE}/{}", service_name(service));
        let said = self.headgatectl(&["wait", &service, "--endpoint", &address, "--timeout", TIMEOUT])?.answer()?;
        let is_done = self.is_done("wait", &said, &shown);
        if is_done {
            self.judge_present("wait: done", &shown, asked)?;
        }
        self.shared.source().release(pod);
        Ok((if is_done { "done".into() } else { format!("code {:?}", said.code) }, is_done))
    }

    fn wait_gone(&mut self) -> Result<(String, bool)> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.take(api, choice, &[service]);
            source.set(api, pod, Phase::Gone);
            pod
        });
        let (asked, shown) = (Instant::now(), self.pod(pod));
        let address = shown.address.to_string();
        let service = format!("{NAMESPACE}/{}", service_name(service));
        let arguments = ["wait", &service, "--endpoint", &address, "--gone", "--timeout", TIMEOUT];
        let said = self.headgatectl(&arguments)?.answer()?;
        let is_done = self.is_done("wait --gone", &said, &shown);
        if is_done {
            self.judge_removed("wait --gone: done", &shown, asked, false)?;
        }
        Ok((if is_done { "done".into() } else { format!("code {:?}", said.code) }, is_done))
    }

    fn is_done(&self, what: &str, said: &Said, pod: &Pod) -> bool {
        self.shared.tell(format!("{what} {}: {:?} {} {}", pod.address, said.code, said.out, said.errors));
        let answer: Value = serde_json::from_str(&said.out).unwrap_or_default();
        said.code == Some(0) && answer["done"] == true
    }

    fn pod(&self, pod: usize) -> Pod {
        self.shared.source().pods[pod].clone()
    }

    /// Starts a question whether a pod may stop.
    fn start_drain(&mut self, question: Question, pod: &Pod, timeout: &str) -> Result<Asked> {
        let name = format!("{NAMESPACE}/{}", pod.name);
        if question != Question::PodAsks {
            return self.headgatectl(&["drain", &name, "--timeout", timeout, "--silent", timeout]);
        }
        let mut command = Command::new(program("headgate-drain")?);
        let query = format!("pod={name}&timeout={timeout}&silent={timeout}&settle=0");
        command.args(["127.0.0.1:10261", &query]);
        Asked::start(self.shared.node(pod.node), command)
    }

    fn drain(&mut self, question: Question, crowd_pod: Option<usize>) -> Result<(String, bool)> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        // Some pods also belong to the Service with a Local policy.
        let services = if self.rng.u8(0..3) == 0 { vec![service, LOCAL] } else { vec![service] };
        let pod = crowd_pod.unwrap_or_else(|| self.shared.change(|source, api| source.take(api, choice, &services)));
        let before = self.pod(pod);
        let mut asks = Vec::new();
        let mut asked_at = Instant::now();
        if self.rng.bool() {
            asks.push(self.start_drain(question, &before, TIMEOUT)?);
            sleep(Duration::from_millis(self.rng.u64(0..500)));
        }
        self.shared.tell(format!("{} of {} stops", before.address, NODES[before.node]));
        self.shared.change(|source, api| source.set(api, pod, Phase::Stopping));
        sleep(Duration::from_millis(self.rng.u64(0..800)));
        let (until, gone_at) = (Instant::now() + LIMIT, Instant::now() + Duration::from_millis(self.rng.u64(0..4000)));
        let (mut outcome, mut is_definite, mut is_gone) = ("no answer".to_owned(), false, false);
        while Instant::now() < until {
            if asks.is_empty() {
                asked_at = Instant::now();
                asks.push(self.start_drain(question, &before, TIMEOUT)?);
            }
            if !is_gone && Instant::now() > gone_at {
                is_gone = true;
                self.shared.change(|source, api| source.set(api, pod, Phase::Gone));
            }
            let Some(said) = asks[0].poll()? else {
                sleep(Duration::from_millis(10));
                continue;
            };
            asks.clear();
            (outcome, is_definite) = self.judge_drain(question, &said, &before, is_gone, asked_at)?;
            if is_definite || said.out.starts_with("incomplete") || outcome == "incomplete" {
                break;
            }
            // The agent or the replica did not answer, or refused.
            sleep(Duration::from_millis(300));
        }
        self.shared.change(|source, api| source.set(api, pod, Phase::Gone));
        Ok((outcome, is_definite))
    }

    /// Returns the outcome, and whether it is definite.
    fn judge_drain(
        &self,
        question: Question,
        said: &Said,
        pod: &Pod,
        is_gone: bool,
        asked: Instant,
    ) -> Result<(String, bool)> {
        self.shared.tell(format!("{question:?} {}: {:?} {} {}", pod.address, said.code, said.out, said.errors));
        let answer: Value = serde_json::from_str(&said.out).unwrap_or_default();
        let result = answer["result"].as_str().unwrap_or_else(|| said.out.split(' ').next().unwrap_or_default());
        match result {
            "drained" | "last" => {
                self.judge_removed(
                    &format!("{question:?}: {result} ({})", said.out.trim()),
                    pod,
                    asked,
                    result == "last",
                )?;
                Ok((result.to_owned(), true))
            }
            "incomplete" => Ok((result.to_owned(), false)),
            _ => {
                let text = format!("{}{}", said.out, said.errors);
                if text.contains("no endpoint belongs") {
                    if !is_gone && pod.is_known {
                        self.is_false(&format!("{question:?} of {}: {}", pod.address, text.trim()));
                    }
                    return Ok(("refused".into(), false));
                }
                Ok(("no answer".into(), false))
            }
        }
    }

    fn drain_unready(&mut self) -> Result<(String, bool)> {
        let (choice, service) = (self.rng.usize(..), self.rng.usize(0..CLUSTER));
        let pod = self.shared.change(|source, api| {
            let pod = source.take(api, choice, &[service]);
            source.set(api, pod, Phase::Unready);
            pod
        });
        let shown = self.pod(pod);
        let said = self.start_drain(Question::DrainUnready, &shown, "3s")?.answer()?;
        let answer: Value = serde_json::from_str(&said.out).unwrap_or_default();
        let result = answer["result"].as_str().unwrap_or("no answer").to_owned();
        if ["drained", "last"].contains(&result.as_str()) {
            self.is_false(&format!("drain: {result}, but {} is only not ready: {}", shown.address, said.out));
        }
        self.shared.change(|source, api| {
            source.set(api, pod, Phase::Ready);
            source.release(pod);
        });
        Ok((result, true))
    }

    fn gate(&mut self) -> Result<(String, bool)> {
        let (node, service) = (self.rng.usize(0..NODES.len()), self.rng.usize(0..CLUSTER));
        let asked = Instant::now();
        let pod = self.shared.change(|source, api| {
            let pod = source.add(api, node, &[service], Phase::Gated);
            source.hold(pod);
            pod
        });
        let shown = self.pod(pod);
        let until = Instant::now() + LIMIT;
        let reason = loop {
            let object = self.shared.api.get(Kind::Pod, NAMESPACE, &shown.name).context("the pod is gone")?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.iter().find(|condition| condition["type"] == GATE && condition["status"] == "True");
            if let Some(condition) = found {
                break condition["reason"].as_str().unwrap_or_default().to_owned();
            }
            if Instant::now() > until {
                break "no condition".to_owned();
            }
            sleep(Duration::from_millis(20));
        };
        self.shared.tell(format!("gate of {}: {reason}", shown.address));
        if reason == "Programmed" {
            self.judge_present("gate: Programmed", &shown, asked)?;
        }
        self.shared.change(|source, api| {
            source.set(api, pod, Phase::Ready);
            source.release(pod);
        });
        let is_definite = reason == "Programmed";
        Ok((reason, is_definite))
    }

    /// Says so if a node that counts does not forward to the pod.
    fn judge_present(&self, claim: &str, pod: &Pod, asked: Instant) -> Result<()> {
        self.judge(claim, pod, asked, |is_found, _| !is_found)
    }

    /// Says so if a node that counts forwards to the pod. If the pod is the `last` endpoint, only
    /// nodes count that have others.
    fn judge_removed(&self, claim: &str, pod: &Pod, asked: Instant, last: bool) -> Result<()> {
        self.judge(claim, pod, asked, |is_found, wanted| is_found && !(last && wanted.is_none()))
    }

    fn judge(
        &self,
        claim: &str,
        pod: &Pod,
        asked: Instant,
        is_wrong: impl Fn(bool, Option<bool>) -> bool,
    ) -> Result<()> {
        for node in 0..NODES.len() {
            let kernel = self.shared.read(node)?;
            let source = self.shared.source();
            if source.counts(node, asked) {
                let differences = source.differences(claim, pod, node, &kernel, &is_wrong);
                differences.iter().for_each(|difference| self.is_false(difference));
            }
        }
        Ok(())
    }
}
