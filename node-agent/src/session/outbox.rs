//! Decides what the agent sends on one stream: reports (status, rejections, failures and ACKs),
//! then requests of pods, then answers to queries. Waiting reports are bounded. Only
//! [`Outbox::ready`] waits.

use std::{
    collections::VecDeque,
    fmt,
    ops::RangeInclusive,
    sync::Arc,
    time::{self, Duration},
};

use futures::future::{BoxFuture, OptionFuture};
use headgate_oracle::Difference;
use headgate_proto::v1::{self, agent_message::Body, node_answer, node_query};
use prost::Message as _;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::machine::{MAX_TEXT_BYTES, Machine, Rejections, shorten};
use crate::state::progress::{Programmed, Progress, Verification};

/// Maximum number of sentences in a status.
const MAX_SENTENCES: usize = 64;
/// Maximum length of the error of a failure. Longer texts are cut.
const MAX_ERROR_BYTES: usize = 16 << 10;

/// The range of the time between two ACKs in milliseconds, drawn anew after each ACK
/// (`discovery.proto`, rule 7): after a quiet time, all agents acknowledge the same change, and
/// with a fixed interval their later ACKs would arrive together, too.
const ACK_INTERVAL_MS: RangeInclusive<u64> = 150..=350;

/// Shortest time between two ACKs if somebody may wait for the second (rule 18).
const URGENT_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of earlier versions in one ACK (`Ack.earlier`). Versions that are too old for the
/// list count as programmed at the time of the oldest listed version.
const MAX_EARLIER: usize = 64;

/// The messages of one stream. A newer status, ACK or failure replaces a waiting one.
pub(super) struct Outbox {
    /// The number of the stream, from [`crate::state::AgentState::begin_stream`].
    stream: u64,
    /// True if another service proxy programs the node, so that this agent has programmed nothing.
    pub(super) is_standby: bool,
    /// The epoch of the replica; `None` before `Welcome`.
    pub(super) epoch: Option<u64>,
    /// The last status, and whether it waits.
    status: v1::AgentStatus,
    is_status_waiting: bool,
    verified: Reported,
    failed: Option<v1::ApplyFailed>,
    /// True if a failure was reported and no ACK has followed.
    has_failed: bool,
    ack: Option<WaitingAck>,
    /// Version and node revision of the last ACK on this stream.
    acked: Option<(u64, u64)>,
    /// When the next ACK may be sent. Until this time, newer ACKs are merged into the waiting ACK.
    next_ack: Option<Instant>,
    last_ack: Option<Instant>,
    /// The first and the last version for whose ACK somebody may wait.
    urgent: Option<(u64, u64)>,
    /// Requests of pods that stop, and the next of them.
    pub(super) requests: mpsc::Receiver<v1::BarrierRequest>,
    request: Option<v1::BarrierRequest>,
    /// Answers to the replica's queries.
    pub(super) answers: Answers,
}

#[derive(Debug)]
struct WaitingAck {
    ack: v1::Ack,
    /// The versions that the ACK covers, with the time at which each version was programmed. The
    /// last item is the version of the ACK itself.
    programmed: VecDeque<(u64, Instant)>,
}

impl Outbox {
    /// Creates the outbox of the stream with this number. `Hello` has reported `status`.
    pub(super) fn new(stream: u64, status: v1::AgentStatus, answers: Answers) -> Self {
        Self {
            stream,
            is_standby: false,
            epoch: None,
            verified: Reported::in_hello(&status),
            status,
            is_status_waiting: false,
            failed: None,
            has_failed: false,
            ack: None,
            acked: None,
            next_ack: None,
            last_ack: None,
            urgent: None,
            requests: mpsc::channel(1).1,
            request: None,
            answers,
        }
    }

    /// Waits until [`Self::pop`] returns a message. The wait can be abandoned and repeated.
    pub(super) async fn ready(&mut self, rejections: &Rejections) {
        let report_at = self.report_at(Instant::now(), rejections);
        tokio::select! {
            Some(()) = OptionFuture::from(report_at.map(sleep_until)) => {}
            () = std::future::ready(()), if self.request.is_some() => {}
            Some(request) = self.requests.recv(), if self.request.is_none() => self.request = Some(request),
            () = self.answers.ready() => {}
        }
    }

    /// When the next report may be sent; `None` if no report waits. Only an ACK may have to wait.
    fn report_at(&self, now: Instant, rejections: &Rejections) -> Option<Instant> {
        if self.is_status_waiting || rejections.is_due() || self.failed.is_some() {
            return Some(now);
        }
        let waiting = self.ack.as_ref()?;
        let usual = self.next_ack.unwrap_or(now);
        let is_urgent = self.urgent.is_some_and(|(first, _)| first <= waiting.ack.version);
        let urgent = self.last_ack.map_or(now, |last| last + URGENT_INTERVAL);
        Some(if is_urgent { usual.min(urgent) } else { usual })
    }

    /// Makes the next ACK that covers `version` leave without the usual pause.
    pub(super) fn hurry(&mut self, version: u64) {
        let first = self.urgent.map_or(version, |(first, _)| first);
        self.urgent = Some((first, version));
    }

    /// Queues the status if it changed, the last failure, and, once the agent follows the stream,
    /// what the kernel rejects and the ACK.
    pub(super) fn report(&mut self, progress: &Progress, status: v1::AgentStatus, machine: &mut Machine, now: Instant) {
        let verification = progress.verification.as_ref().zip(status.verified.as_ref());
        let is_news = verification.is_some_and(|(verification, wire)| self.verified.is_news(verification.at, wire));
        if is_news || (&status.backend, &status.degraded) != (&self.status.backend, &self.status.degraded) {
            (self.status, self.is_status_waiting) = (status, true);
        }
        let Some(epoch) = self.epoch.filter(|_| !self.is_standby) else { return };
        let programmed = progress.programmed.as_ref().filter(|programmed| programmed.target.epoch == epoch);
        let failed = progress.failure.as_ref().map(|failure| {
            // A replica revokes ACKs of this version and of later ones. A failure to program the
            // state of another replica revokes all, because the kernel may hold a part of it.
            let version = if failure.target.epoch == epoch { failure.target.version } else { 0 };
            let programmed = programmed.filter(|_| failure.is_lost).map(|programmed| programmed.target.version);
            let version = programmed.map_or(version, |programmed| version.min(programmed));
            v1::ApplyFailed { version, error: failure.error.clone(), attempts: failure.attempts }
        });
        let failed_version = failed.as_ref().map(|failed| failed.version);
        if let Some(failed) = failed {
            self.has_failed = true;
            self.apply_failed(failed);
        }
        if let Some(programmed) = programmed.filter(|_| machine.is_following()) {
            let version = programmed.target.version;
            machine.rejections.set_by_node(version, &[&*progress.left_out, &*progress.rejections].concat());
            if failed_version.is_none_or(|failed| version < failed) {
                self.programmed(programmed, failed_version.is_some(), now);
            }
        }
    }

    fn programmed(&mut self, programmed: &Programmed, is_failing: bool, now: Instant) {
        let target = programmed.target;
        let node_revision = if target.stream == self.stream { target.node_revision } else { 0 };
        let reached = (target.version, node_revision);
        // A failure revokes the ACK of an acknowledged version. After the recovery, the replica
        // waits for another ACK of that version (`discovery.proto`, rule 7).
        let has_recovered = self.has_failed && !is_failing;
        if self.acked == Some(reached) && !has_recovered {
            return;
        }
        self.has_failed &= !has_recovered;
        self.acked = Some(reached);
        let ack = v1::Ack {
            version: target.version,
            node_revision,
            apply_microseconds: u64::try_from(programmed.took.as_micros()).unwrap_or(u64::MAX),
            services_planned: programmed.services_planned,
            objects_written: programmed.objects_written,
            ..v1::Ack::default()
        };
        self.ack(ack, now);
    }

    /// Queues an ACK for a version that has just been programmed.
    fn ack(&mut self, mut ack: v1::Ack, now: Instant) {
        let mut programmed = VecDeque::with_capacity(1);
        if let Some(waiting) = self.ack.take() {
            ack.services_planned = ack.services_planned.saturating_add(waiting.ack.services_planned);
            ack.objects_written = ack.objects_written.saturating_add(waiting.ack.objects_written);
            programmed = waiting.programmed;
            // If only the node's revision changed, both ACKs have the same version.
            programmed.retain(|(version, _)| *version < ack.version);
            if programmed.len() > MAX_EARLIER {
                programmed.pop_front();
            }
        }
        programmed.push_back((ack.version, now));
        // The ACK ends a failure, unless the failure concerns a newer version.
        self.failed.take_if(|failed| failed.version <= ack.version);
        self.ack = Some(WaitingAck { ack, programmed });
    }

    /// Queues a failure. Drops a waiting ACK that the failure revokes, because the replica would
    /// take the later ACK for the end of the failure.
    fn apply_failed(&mut self, failed: v1::ApplyFailed) {
        self.ack.take_if(|waiting| failed.version <= waiting.ack.version);
        self.failed = Some(failed);
    }

    /// Takes out the next message that may be sent at `now`, if any.
    pub(super) fn pop(&mut self, now: Instant, rejections: &mut Rejections) -> Option<v1::AgentMessage> {
        let report = self.pop_report(now, rejections);
        let report =
            report.or_else(|| self.request.take().or_else(|| self.requests.try_recv().ok()).map(Body::Barrier));
        Some(v1::AgentMessage { body: Some(report.or_else(|| self.answers.pop(now))?) })
    }

    /// Takes out the next report. An ACK follows only after everything that limits what it means.
    fn pop_report(&mut self, now: Instant, rejections: &mut Rejections) -> Option<Body> {
        if std::mem::take(&mut self.is_status_waiting) {
            let mut status = self.status.clone();
            status.degraded.truncate(MAX_SENTENCES);
            status.degraded.iter_mut().for_each(|sentence| shorten(sentence, MAX_TEXT_BYTES));
            return Some(Body::Status(status));
        }
        if let Some(nack) = rejections.pop() {
            return Some(Body::Nack(nack));
        }
        if let Some(mut failed) = self.failed.take() {
            shorten(&mut failed.error, MAX_ERROR_BYTES);
            return Some(Body::ApplyFailed(failed));
        }
        self.report_at(now, rejections).filter(|at| *at <= now)?;
        let WaitingAck { mut ack, programmed } = self.ack.take()?;
        self.last_ack = Some(now);
        self.urgent = self.urgent.filter(|(_, last)| *last > ack.version);
        if let Some((first, _)) = &mut self.urgent {
            *first = (*first).max(ack.version + 1);
        }
        self.next_ack = Some(now + Duration::from_millis(fastrand::u64(ACK_INTERVAL_MS)));
        let ago = |at: Instant| u64::try_from((now - at).as_micros()).unwrap_or(u64::MAX);
        let mut earlier: Vec<_> = programmed
            .into_iter()
            .map(|(version, at)| v1::ProgrammedVersion { version, ago_microseconds: ago(at) })
            .collect();
        ack.programmed_ago_microseconds = earlier.pop().map_or(0, |own| own.ago_microseconds);
        ack.earlier = earlier;
        Some(Body::Ack(ack))
    }
}

// Answers the replica's queries about this node (`discovery.proto`, rule 17).

/// Maximum number of queries that wait for their turn.
const MAX_WAITING: usize = 4;
/// Maximum number of refusals that wait to be sent. Further queries get no answer.
const MAX_REFUSED: usize = 64;
/// Maximum size of all parts of an answer.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// The preferred size of one part. A part that holds a list has about this size at most.
pub(crate) const PART_BYTES: usize = 16 << 10;
/// How fast parts are sent, at most.
const BYTES_PER_SECOND: usize = 128 << 10;

/// The answer to a query of a kind that this version does not know.
const UNKNOWN: &str =
    concat!("an agent of version ", env!("CARGO_PKG_VERSION"), " does not know this kind of query: upgrade the agent");

/// The parts of an answer, or the reason why there is none: a sentence with the remedy.
pub(crate) type NodeAnswer = Result<Vec<node_answer::Kind>, String>;

/// What the agent knows about its node.
pub(crate) trait NodeKnowledge: fmt::Debug + Send + Sync {
    /// Answers a query. The future must not block its thread.
    fn answer(&self, query: node_query::Kind) -> BoxFuture<'static, NodeAnswer>;
}

/// The queries and answers of one stream.
pub(super) struct Answers {
    knowledge: Option<Arc<dyn NodeKnowledge>>,
    waiting: VecDeque<v1::Query>,
    running: Option<(u64, BoxFuture<'static, NodeAnswer>)>,
    /// The messages that are left of the current answer.
    parts: VecDeque<v1::Answer>,
    next_part: Instant,
}

impl Answers {
    /// Creates the queue of a stream. Without `knowledge`, every query gets an error.
    pub(super) fn new(knowledge: Option<Arc<dyn NodeKnowledge>>) -> Self {
        let (waiting, parts) = (VecDeque::new(), VecDeque::new());
        Self { knowledge, waiting, running: None, parts, next_part: Instant::now() }
    }

    /// Queues a query, or its refusal if too many queries wait. The replica gives up a query that
    /// gets neither an answer nor a refusal.
    pub(super) fn ask(&mut self, query: v1::Query) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(query);
        } else if self.parts.iter().filter(|part| !part.error.is_empty()).count() < MAX_REFUSED {
            let error = format!("{MAX_WAITING} queries already wait; ask again later");
            self.parts.push_back(v1::Answer { id: query.id, error, is_last: true, ..v1::Answer::default() });
        }
    }

    /// Waits until [`Self::pop`] returns a message. The wait can be abandoned and repeated.
    pub(super) async fn ready(&mut self) {
        loop {
            if !self.parts.is_empty() {
                return sleep_until(self.next_part).await;
            }
            if let Some((id, answer)) = &mut self.running {
                let (id, answer) = (*id, answer.await);
                self.running = None;
                self.parts = messages(id, answer);
            } else if let Some(v1::Query { id, query }) = self.waiting.pop_front() {
                let kind = query.and_then(|query| query.kind);
                match self.knowledge.as_ref().zip(kind) {
                    Some((knowledge, kind)) => self.running = Some((id, knowledge.answer(kind))),
                    None => self.parts = messages(id, Err(UNKNOWN.to_owned())),
                }
            } else {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns the next part that may be sent at `now`, if any.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Body> {
        let part = self.parts.pop_front_if(|_| self.next_part <= now)?;
        let pause = Duration::from_secs(1).mul_f64(part.encoded_len() as f64 / BYTES_PER_SECOND as f64);
        self.next_part = now + pause;
        Some(Body::Answer(part))
    }
}

fn messages(id: u64, answer: NodeAnswer) -> VecDeque<v1::Answer> {
    let part = |kind| v1::Answer { id, part: Some(v1::NodeAnswer { kind: Some(kind) }), ..v1::Answer::default() };
    let checked = answer.and_then(|parts| {
        let parts: VecDeque<v1::Answer> = parts.into_iter().map(part).collect();
        let bytes: usize = parts.iter().map(prost::Message::encoded_len).sum();
        if bytes > MAX_ANSWER_BYTES {
            return Err(format!("the answer has {bytes} bytes, and {MAX_ANSWER_BYTES} are allowed; ask for less"));
        }
        Ok(parts)
    });
    let mut parts = checked.unwrap_or_else(|error| [v1::Answer { id, error, ..v1::Answer::default() }].into());
    match parts.back_mut() {
        Some(last) => last.is_last = true,
        None => parts.push_back(v1::Answer { id, is_last: true, ..v1::Answer::default() }),
    }
    parts
}

// Reports verifications on the stream: every change of their result at once, and otherwise few of
// them (`discovery.proto`, rule 19).

/// Maximum number of differences in a status.
const MAX_REPORTED: usize = 5;
/// Shortest time between two reports of the same result.
const INTERVAL: Duration = Duration::from_secs(60);

/// Converts a verification for a status; `None` if the kernel could not be read, or if no
/// difference was found and a part of the kernel was not understood: this must not hide a
/// difference that was found before.
pub(super) fn to_wire(verification: &Verification) -> Option<v1::Verified> {
    let Verification { at, comparison, error, .. } = verification;
    let is_result = comparison.total > 0 || comparison.not_understood.is_empty();
    (error.is_none() && is_result).then(|| v1::Verified {
        ago_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
        drift_count: comparison.total,
        drift: comparison.differences.iter().take(MAX_REPORTED).map(drift_to_wire).collect(),
    })
}

/// Converts a difference. The Service has a field of its own.
pub(crate) fn drift_to_wire(difference: &Difference) -> v1::Drift {
    match &difference.service {
        Some(service) => v1::Drift { service: service.to_string(), difference: difference.sentence.clone() },
        None => v1::Drift { service: String::new(), difference: difference.to_string() },
    }
}

/// Decides which verifications are reported. Times are the starts of verifications.
#[derive(Debug, Default)]
pub(super) struct Reported {
    at: Option<time::Instant>,
    drift: (u64, Vec<v1::Drift>),
}

impl Reported {
    pub(super) fn in_hello(status: &v1::AgentStatus) -> Self {
        let Some(verified) = &status.verified else { return Self::default() };
        let at = time::Instant::now().checked_sub(Duration::from_millis(verified.ago_ms));
        Self { at, drift: (verified.drift_count, verified.drift.clone()) }
    }

    /// True if this verification, which began at `at`, must be reported. Counts as reported then.
    pub(super) fn is_news(&mut self, at: time::Instant, verified: &v1::Verified) -> bool {
        let is_due = self.at.is_none_or(|before| at.saturating_duration_since(before) >= INTERVAL);
        let has_changed = (verified.drift_count, &verified.drift) != (self.drift.0, &self.drift.1);
        let is_news = is_due || has_changed;
        if is_news {
            *self = Self { at: Some(at), drift: (verified.drift_count, verified.drift.clone()) };
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::pin;

    use futures::FutureExt as _;
    use headgate_proto::v1::welcome::ResumeMode;

    use super::*;
    use crate::{
        session::barriers::Barriers,
        state::progress::{Failure, Target},
        testing::Replica,
    };

    fn outbox() -> Outbox {
        Outbox::new(1, v1::AgentStatus::default(), Answers::new(None))
    }

    fn pop(outbox: &mut Outbox, now: Instant) -> Option<v1::AgentMessage> {
        outbox.pop(now, &mut Rejections::default())
    }

    fn report_at(outbox: &Outbox, now: Instant) -> Option<Instant> {
        outbox.report_at(now, &Rejections::default())
    }

    fn ack(message: Option<v1::AgentMessage>) -> v1::Ack {
        match message.unwrap().body {
            Some(Body::Ack(ack)) => ack,
            other => panic!("not an ACK: {other:?}"),
        }
    }

    #[test]
    fn a_newer_ack_replaces_a_waiting_ack_and_adds_its_counts() {
        let (mut outbox, now) = (outbox(), Instant::now());
        outbox.ack(v1::Ack { version: 1, services_planned: 2, objects_written: 3, ..Default::default() }, now);
        outbox.apply_failed(v1::ApplyFailed { version: 2, ..Default::default() });
        outbox.ack(v1::Ack { version: 2, services_planned: 1, objects_written: 1, ..Default::default() }, now);
        let ack = ack(pop(&mut outbox, now));
        assert_eq!((ack.version, ack.services_planned, ack.objects_written), (2, 3, 4));
        assert!(report_at(&outbox, now).is_none() && pop(&mut outbox, now).is_none());
    }

    #[test]
    fn acks_wait_for_the_interval_and_state_when_versions_were_programmed() {
        let (mut outbox, start) = (outbox(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        outbox.ack(v1::Ack { version: 1, ..Default::default() }, at(0));
        assert_eq!(ack(pop(&mut outbox, at(0))).programmed_ago_microseconds, 0, "the first ACK is sent at once");
        outbox.ack(v1::Ack { version: 2, ..Default::default() }, at(50));
        outbox.ack(v1::Ack { version: 3, ..Default::default() }, at(100));
        let ready = report_at(&outbox, at(100)).unwrap();
        assert!(ready >= at(150) && ready <= at(350), "{:?}", ready - start);
        assert!(pop(&mut outbox, at(149)).is_none());
        // Other messages do not wait for the interval.
        outbox.apply_failed(v1::ApplyFailed { version: 4, ..Default::default() });
        assert_eq!(report_at(&outbox, at(110)), Some(at(110)));
        assert!(matches!(pop(&mut outbox, at(110)).unwrap().body, Some(Body::ApplyFailed(_))));
        let late = ack(pop(&mut outbox, at(350)));
        assert_eq!((late.version, late.programmed_ago_microseconds), (3, 250_000));
        assert_eq!(late.earlier, [v1::ProgrammedVersion { version: 2, ago_microseconds: 300_000 }]);
        outbox.ack(v1::Ack { version: 5, ..Default::default() }, at(900));
        assert_eq!(ack(pop(&mut outbox, at(900))).version, 5, "after a quiet time, an ACK is sent at once");
    }

    #[test]
    fn acks_of_agents_that_started_together_spread_over_the_interval() {
        let start = Instant::now();
        let times = (0..100).map(|_| {
            let mut outbox = outbox();
            outbox.ack(v1::Ack::default(), start);
            pop(&mut outbox, start).unwrap();
            outbox.ack(v1::Ack::default(), start);
            report_at(&outbox, start).unwrap() - start
        });
        let times: Vec<Duration> = times.collect();
        let in_a_tenth = |tenth: &u32| {
            let from = Duration::from_millis(150 + 20 * u64::from(*tenth));
            times.iter().any(|time| (from..=from + Duration::from_millis(20)).contains(time))
        };
        // A tenth of the interval without any ACK occurs in a few of ten thousand runs. Four such
        // tenths in one run do not occur.
        assert!((0..10).filter(in_a_tenth).count() > 6, "{times:?}");
    }

    #[test]
    fn an_ack_lists_a_bounded_number_of_earlier_versions_each_once() {
        let (mut outbox, now) = (outbox(), Instant::now());
        for version in 1..=1_000 {
            // The second ACK acknowledges a new revision of the node at the same version.
            outbox.ack(v1::Ack { version, ..Default::default() }, now);
            outbox.ack(v1::Ack { version, node_revision: 1, ..Default::default() }, now);
        }
        let ack = ack(pop(&mut outbox, now));
        let versions: Vec<u64> = ack.earlier.iter().map(|earlier| earlier.version).collect();
        assert_eq!((ack.version, versions), (1_000, (936..1_000).collect()));
    }

    #[tokio::test]
    async fn reports_precede_requests_of_pods_and_requests_precede_answers() {
        let (mut outbox, mut rejections, now) = (outbox(), Rejections::default(), Instant::now());
        outbox.answers.ask(v1::Query { id: 1, query: None });
        outbox.answers.ready().await;
        let barriers = Barriers::default();
        outbox.requests = barriers.begin_stream();
        let mut asked = pin!(barriers.ask(v1::BarrierRequest::default(), now + Duration::from_secs(60)));
        assert!(asked.as_mut().now_or_never().is_none());
        outbox.ack(v1::Ack::default(), now);
        rejections.step(1, &[v1::Rejection::default()], &[], None);
        outbox.apply_failed(v1::ApplyFailed { version: 2, ..Default::default() });
        let mut next = || outbox.pop(now, &mut rejections).and_then(|message| message.body);
        assert!(matches!(next(), Some(Body::Nack(_))));
        assert!(matches!(next(), Some(Body::ApplyFailed(_))));
        assert!(matches!(next(), Some(Body::Ack(_))));
        assert!(matches!(next(), Some(Body::Barrier(_))));
        assert!(matches!(next(), Some(Body::Answer(_))));
        assert!(next().is_none());
    }

    #[test]
    fn a_failure_drops_the_waiting_ack_that_it_revokes() {
        let (mut outbox, now) = (outbox(), Instant::now());
        for (failed, is_revoked) in [(5, true), (4, true), (6, false)] {
            outbox.next_ack = Some(now);
            outbox.ack(v1::Ack { version: 5, ..Default::default() }, now);
            outbox.apply_failed(v1::ApplyFailed { version: failed, ..Default::default() });
            assert!(matches!(pop(&mut outbox, now).unwrap().body, Some(Body::ApplyFailed(_))));
            assert_eq!(pop(&mut outbox, now).is_none(), is_revoked, "{failed}");
        }
    }

    /// An agent that follows a replica of epoch 7 from version 5.
    fn following() -> (Outbox, Machine) {
        let mut machine = Machine::new("node-1".into());
        machine.begin(Some((7, 5)));
        machine.on_message(Replica::new(7, 2).welcome(ResumeMode::Log)).unwrap();
        let outbox = Outbox { epoch: Some(7), ..outbox() };
        (outbox, machine)
    }

    fn target(epoch: u64, version: u64) -> Target {
        Target { epoch, version, stream: 1, node_revision: 1 }
    }

    fn programmed(version: u64) -> Progress {
        let (took, target) = (Duration::ZERO, target(7, version));
        let programmed = Programmed { target, generation: 1, took, services_planned: 1, objects_written: 1 };
        Progress { programmed: Some(programmed), ..Progress::default() }
    }

    /// The messages after a report of this progress.
    fn reported(outbox: &mut Outbox, progress: &Progress, machine: &mut Machine) -> Vec<Body> {
        outbox.report(progress, v1::AgentStatus::default(), machine, Instant::now());
        let mut next = || {
            let at = outbox.report_at(Instant::now(), &machine.rejections)?;
            outbox.pop(at, &mut machine.rejections)?.body
        };
        std::iter::from_fn(&mut next).collect()
    }

    #[test]
    fn while_the_kernel_may_lack_the_acknowledged_version_there_is_no_ack() {
        // The failed attempt's epoch and version, whether rules were lost, what a new stream hears.
        let cases = [
            ((7, 6), false, [Some(6), None], [None, Some(5)]),
            ((7, 6), true, [Some(5), None], [None, None]),
            ((7, 5), true, [Some(5), None], [None, None]),
            ((8, 9), false, [Some(0), None], [None, None]),
        ];
        for ((epoch, version), is_lost, failed, acked) in cases {
            let (mut outbox, mut machine) = following();
            let failure = Failure { target: target(epoch, version), is_lost, error: "locked".into(), attempts: 1 };
            let failing = Progress { failure: Some(failure), ..programmed(5) };
            let messages = reported(&mut outbox, &failing, &mut machine);
            for index in 0..2 {
                match messages.get(index) {
                    Some(Body::ApplyFailed(message)) => assert_eq!(Some(message.version), failed[index]),
                    Some(Body::Ack(message)) => assert_eq!(Some(message.version), acked[index]),
                    None => assert_eq!((failed[index], acked[index]), (None, None), "{epoch} {version} {is_lost}"),
                    other => panic!("{other:?}"),
                }
            }
            let messages = reported(&mut outbox, &programmed(5), &mut machine);
            assert!(matches!(&messages[..], [Body::Ack(message)] if message.version == 5), "{messages:?}");
        }
    }
}

#[cfg(test)]
mod answers_tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;

    use super::*;

    /// Answers with the given number of parts of 16 KiB. The prefix of the query is that number.
    #[derive(Debug)]
    struct Parts;

    impl NodeKnowledge for Parts {
        fn answer(&self, query: node_query::Kind) -> BoxFuture<'static, NodeAnswer> {
            let node_query::Kind::Metrics(v1::MetricsQuery { prefix }) = query else {
                return std::future::ready(Err("only metrics".to_owned())).boxed();
            };
            let part = || node_answer::Kind::Metrics(v1::MetricsText { text: "x".repeat(16 << 10) });
            let parts = std::iter::repeat_with(part).take(prefix.parse().unwrap_or(0)).collect();
            std::future::ready(Ok(parts)).boxed()
        }
    }

    fn query(id: u64, kind: Option<node_query::Kind>) -> v1::Query {
        v1::Query { id, query: Some(v1::NodeQuery { kind }) }
    }

    fn parts(id: u64, count: usize) -> v1::Query {
        query(id, Some(node_query::Kind::Metrics(v1::MetricsQuery { prefix: count.to_string() })))
    }

    async fn next(answers: &mut Answers) -> v1::Answer {
        answers.ready().await;
        match answers.pop(Instant::now()) {
            Some(Body::Answer(answer)) => answer,
            other => panic!("not an answer: {other:?}"),
        }
    }

    #[tokio::test]
    async fn parts_are_sent_slowly_and_in_order() {
        let mut answers = Answers::new(Some(Arc::new(Parts)));
        answers.ask(parts(1, 3));
        answers.ask(parts(2, 0));
        let start = Instant::now();
        let mut found = Vec::new();
        for _ in 0..4 {
            let answer = next(&mut answers).await;
            found.push((answer.id, answer.part.is_some(), answer.is_last));
        }
        assert_eq!(found, [(1, true, false), (1, true, false), (1, true, true), (2, false, true)]);
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(375), "3 parts of 16 KiB took {took:?}");
    }

    #[tokio::test]
    async fn queries_that_cannot_be_answered_get_a_reason() {
        let mut answers = Answers::new(Some(Arc::new(Parts)));
        answers.ask(query(1, None));
        assert_eq!(next(&mut answers).await.error, UNKNOWN, "a kind that only newer replicas know");
        answers.ask(parts(2, 64));
        let too_large = next(&mut answers).await;
        assert!(too_large.is_last && too_large.error.contains("ask for less"), "{too_large:?}");
        for id in 3..=3 + MAX_WAITING as u64 {
            answers.ask(parts(id, 1));
        }
        for id in 0..MAX_REFUSED as u64 + 9 {
            answers.ask(parts(100 + id, 1));
        }
        assert_eq!(answers.parts.len(), MAX_REFUSED, "a faulty replica does not fill the memory");
        let busy = next(&mut answers).await;
        assert!(busy.id == 7 && busy.error.contains("ask again later"), "{busy:?}");
        let mut without = Answers::new(None);
        without.ask(parts(1, 1));
        assert_eq!(next(&mut without).await.error, UNKNOWN);
    }
}

#[cfg(test)]
mod verified_tests {
    use std::sync::Arc;

    use headgate_core::NodeFacts;
    use headgate_oracle::Comparison;

    use super::*;
    use crate::state::progress::Target;
    use std::time::Instant;

    #[test]
    fn a_verification_that_proves_nothing_is_not_reported() {
        let verification = |total, not_understood: &[&str], error: Option<&str>| Verification {
            at: Instant::now(),
            request: 0,
            target: Target { epoch: 1, version: 1, stream: 1, node_revision: 0 },
            comparison: Arc::new(Comparison {
                total,
                not_understood: not_understood.iter().map(ToString::to_string).collect(),
                ..Comparison::default()
            }),
            found: None,
            facts: Arc::new(NodeFacts::named("node-a")),
            cpu_time: None,
            error: error.map(ToOwned::to_owned),
            shadow: None,
        };
        let count = |verification: &Verification| to_wire(verification).map(|verified| verified.drift_count);
        assert_eq!(count(&verification(0, &[], None)), Some(0));
        assert_eq!(count(&verification(0, &[], Some("no permission"))), None);
        assert_eq!(count(&verification(0, &["cannot verify what chain X does"], None)), None);
        assert_eq!(count(&verification(2, &["cannot verify what chain X does"], None)), Some(2));
    }

    #[test]
    fn the_same_result_is_reported_once_a_minute_and_another_result_at_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let drift = |count| v1::Verified { drift_count: count, ..v1::Verified::default() };
        let mut reported = Reported::default();
        assert!(reported.is_news(at(0), &drift(0)));
        assert!(!reported.is_news(at(0), &drift(0)), "the same verification");
        assert!(!reported.is_news(at(59), &drift(0)) && reported.is_news(at(60), &drift(0)));
        assert!(reported.is_news(at(61), &drift(2)) && reported.is_news(at(62), &drift(0)));
    }
}
