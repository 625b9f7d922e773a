//! Messages that wait to be sent to the replica: reports, then requests of pods, then answers to
//! queries. The size of the waiting reports is bounded, even if the replica reads nothing.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use headgate_proto::{
    MAX_AGENT_MESSAGE_BYTES,
    v1::{self, agent_message::Body},
};
use prost::Message as _;
use tokio::time::{Instant, sleep_until};

use super::{
    answers::Answers,
    barriers::{Barriers, OfStream},
};

/// Maximum length of a field of a rejection. Longer texts are cut.
const MAX_TEXT_BYTES: usize = 1024;
/// Maximum number of sentences in a status.
const MAX_SENTENCES: usize = 64;
/// Maximum size of the waiting rejections and withdrawals. Further ones are dropped and count in
/// `Nack.in_force`.
const MAX_WAITING_BYTES: usize = 8 << 20;
/// Maximum size of the items of one NACK: half of the maximum message size, which leaves room for
/// the other fields.
const NACK_BYTES: usize = MAX_AGENT_MESSAGE_BYTES / 2;

/// Shortest time between two ACKs in milliseconds. Each agent draws a new random time from this
/// range after each ACK (`discovery.proto`, rule 7).
///
/// Most of the messages that a replica reads are ACKs: up to one per agent and change. After a
/// quiet time, all agents acknowledge the next change at the same time. With a fixed interval, the
/// agents' later ACKs would also arrive together, and would delay each change that the replica
/// sends at that moment.
const ACK_INTERVAL_MS: RangeInclusive<u64> = 150..=350;

/// Shortest time between two ACKs if somebody may wait for the second ACK (`discovery.proto`, rule
/// 18).
const URGENT_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of earlier versions in one ACK (`Ack.earlier`). Versions that are too old for the
/// list count as programmed at the time of the oldest listed version.
const MAX_EARLIER: usize = 64;

/// The waiting messages of one stream. A newer status, ACK or failure replaces a waiting message of
/// the same kind.
pub(super) struct Outbox {
    status: Option<v1::AgentStatus>,
    nacks: Nacks,
    failed: Option<v1::ApplyFailed>,
    ack: Option<WaitingAck>,
    /// When the next ACK may be sent. Until this time, newer ACKs are merged into the waiting ACK.
    next_ack: Option<Instant>,
    /// When the last ACK was sent.
    last_ack: Option<Instant>,
    /// The first and the last version for whose ACK somebody may wait.
    urgent: Option<(u64, u64)>,
    /// Requests of pods that stop.
    pub(super) barriers: OfStream,
    /// Answers to the replica's queries.
    pub(super) answers: Answers,
}

/// The waiting rejections and withdrawals.
#[derive(Debug, Default)]
struct Nacks {
    /// By the name of the resource; `None` means that the rejection is withdrawn.
    waiting: BTreeMap<String, Option<v1::Rejection>>,
    bytes: usize,
    version: u64,
    /// The number of rejections in force, and the number that the last NACK stated.
    in_force: u64,
    stated: u64,
    /// The number of dropped withdrawals. The replica takes these rejections for in force until the
    /// stream ends.
    lost_withdrawals: u64,
}

impl Nacks {
    /// Queues an item in place of an older item of the same resource. Returns false if there is no
    /// room.
    fn put(&mut self, mut resource: String, mut rejection: Option<v1::Rejection>) -> bool {
        shorten(&mut resource, MAX_TEXT_BYTES);
        if let Some(v1::Rejection { resource, field, reason }) = &mut rejection {
            [resource, field, reason].into_iter().for_each(|text| shorten(text, MAX_TEXT_BYTES));
        }
        let bytes = size(&resource, rejection.as_ref());
        let before = self.waiting.get(&resource).map_or(0, |before| size(&resource, before.as_ref()));
        let after = self.bytes - before + bytes;
        let has_room = after <= MAX_WAITING_BYTES;
        if has_room {
            self.waiting.insert(resource, rejection);
            self.bytes = after;
        } else if rejection.is_none() {
            self.lost_withdrawals += 1;
        }
        has_room
    }

    /// The number that the next NACK has to state.
    fn to_state(&self) -> u64 {
        self.in_force + self.lost_withdrawals
    }

    fn is_due(&self) -> bool {
        !self.waiting.is_empty() || self.to_state() != self.stated
    }

    /// Takes out as many items as fit into a message.
    fn pop(&mut self) -> Option<v1::Nack> {
        if !self.is_due() {
            return None;
        }
        self.stated = self.to_state();
        let mut nack = v1::Nack { version: self.version, in_force: self.stated, ..v1::Nack::default() };
        let mut room = NACK_BYTES;
        while let Some(item) = self.waiting.first_entry() {
            let bytes = size(item.key(), item.get().as_ref());
            let Some(left) = room.checked_sub(bytes) else { break };
            room = left;
            self.bytes -= bytes;
            match item.remove_entry() {
                (_, Some(rejection)) => nack.rejections.push(rejection),
                (resource, None) => nack.withdrawn.push(resource),
            }
        }
        Some(nack)
    }
}

/// The size of an item in a message, at most.
fn size(resource: &str, rejection: Option<&v1::Rejection>) -> usize {
    rejection.map_or(resource.len(), v1::Rejection::encoded_len) + 8
}

/// An ACK that may have to wait.
#[derive(Debug)]
struct WaitingAck {
    ack: v1::Ack,
    /// The versions that the ACK covers, with the time at which each version was programmed. The
    /// last item is the version of the ACK itself.
    programmed: VecDeque<(u64, Instant)>,
}

impl Outbox {
    /// Creates the outbox of a stream.
    pub(super) fn new(barriers: Arc<Barriers>, answers: Answers) -> Self {
        Self {
            status: None,
            nacks: Nacks::default(),
            failed: None,
            ack: None,
            next_ack: None,
            last_ack: None,
            urgent: None,
            barriers: OfStream(barriers),
            answers,
        }
    }

    /// Waits until [`Self::pop`] returns a message. The wait can be abandoned and repeated.
    pub(super) async fn ready(&mut self) {
        let report_at = self.report_at(Instant::now());
        tokio::select! {
            () = sleep_until(report_at.unwrap_or_else(Instant::now)), if report_at.is_some() => {}
            () = self.barriers.0.ready() => {}
            () = self.answers.ready() => {}
        }
    }

    /// When the next report may be sent; `None` if no report waits. Only an ACK may have to wait.
    fn report_at(&self, now: Instant) -> Option<Instant> {
        if self.status.is_some() || self.nacks.is_due() || self.failed.is_some() {
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

    /// Queues an ACK for a version that has just been programmed.
    pub(super) fn ack(&mut self, mut ack: v1::Ack, now: Instant) {
        let mut programmed = VecDeque::with_capacity(1);
        if let Some(waiting) = self.ack.take() {
            ack.services_planned = ack.services_planned.saturating_add(waiting.ack.services_planned);
            ack.objects_written = ack.objects_written.saturating_add(waiting.ack.objects_written);
            programmed = waiting.programmed;
            // If only the node's revision changed, the new ACK has the same version as the waiting
            // ACK.
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

    pub(super) fn status(&mut self, mut status: v1::AgentStatus) {
        status.degraded.truncate(MAX_SENTENCES);
        status.degraded.iter_mut().for_each(|sentence| shorten(sentence, MAX_TEXT_BYTES));
        self.status = Some(status);
    }

    /// Queues a failure. Drops a waiting ACK that the failure revokes, because the replica would
    /// take the later ACK for the end of the failure.
    pub(super) fn apply_failed(&mut self, mut failed: v1::ApplyFailed) {
        shorten(&mut failed.error, 16 * MAX_TEXT_BYTES);
        self.ack.take_if(|waiting| failed.version <= waiting.ack.version);
        self.failed = Some(failed);
    }

    /// Queues rejections and withdrawals. A resource that is both ends up as rejected. Returns the
    /// number of items that were dropped for lack of room.
    pub(super) fn nack(&mut self, nack: v1::Nack) -> usize {
        self.nacks.version = nack.version;
        let withdrawn = nack.withdrawn.into_iter().map(|resource| (resource, None));
        let rejected = nack.rejections.into_iter().map(|rejection| (rejection.resource.clone(), Some(rejection)));
        let items = withdrawn.chain(rejected);
        items.map(|(resource, rejection)| usize::from(!self.nacks.put(resource, rejection))).sum()
    }

    /// Sets the number of rejections in force. If it differs from what the replica knows, it is
    /// sent, also without an item.
    pub(super) fn set_in_force(&mut self, count: u64) {
        self.nacks.in_force = count;
    }

    /// Takes out the next message that may be sent at `now`, if any.
    pub(super) fn pop(&mut self, now: Instant) -> Option<v1::AgentMessage> {
        let body = self.pop_report(now).or_else(|| self.barriers.0.pop()).or_else(|| self.answers.pop(now))?;
        Some(v1::AgentMessage { body: Some(body) })
    }

    /// Takes out the next report. An ACK follows only after everything that limits what it means.
    fn pop_report(&mut self, now: Instant) -> Option<Body> {
        let body = if let Some(status) = self.status.take() {
            Body::Status(status)
        } else if let Some(nack) = self.nacks.pop() {
            Body::Nack(nack)
        } else if let Some(failed) = self.failed.take() {
            Body::ApplyFailed(failed)
        } else {
            self.report_at(now).filter(|at| *at <= now)?;
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
            Body::Ack(ack)
        };
        Some(body)
    }
}

/// Cuts a text that is too long, at a character boundary.
fn shorten(text: &mut String, max_bytes: usize) {
    if text.len() > max_bytes {
        let end = text.floor_char_boundary(max_bytes);
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::pin;

    use futures::FutureExt as _;

    use super::*;
    use crate::session::barriers::Pod;

    impl Outbox {
        /// Takes out the next message, after its pause.
        pub(in crate::session) fn pop_at_last(&mut self) -> Option<v1::AgentMessage> {
            let at = self.report_at(Instant::now())?;
            self.pop(at)
        }
    }

    fn outbox() -> Outbox {
        Outbox::new(Arc::default(), Answers::new(None))
    }

    fn rejection(reason: &str) -> v1::Rejection {
        v1::Rejection { resource: "Service a/b".into(), field: "ports".into(), reason: reason.into() }
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
        let ack = ack(outbox.pop(now));
        assert_eq!((ack.version, ack.services_planned, ack.objects_written), (2, 3, 4));
        assert!(outbox.report_at(now).is_none() && outbox.pop(now).is_none());
    }

    #[test]
    fn acks_wait_for_the_interval_and_state_when_versions_were_programmed() {
        let (mut outbox, start) = (outbox(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        outbox.ack(v1::Ack { version: 1, ..Default::default() }, at(0));
        assert_eq!(ack(outbox.pop(at(0))).programmed_ago_microseconds, 0, "the first ACK is sent at once");
        outbox.ack(v1::Ack { version: 2, ..Default::default() }, at(50));
        outbox.ack(v1::Ack { version: 3, ..Default::default() }, at(100));
        let ready = outbox.report_at(at(100)).unwrap();
        assert!(ready >= at(150) && ready <= at(350), "{:?}", ready - start);
        assert!(outbox.pop(at(149)).is_none());
        // Other messages do not wait for the interval.
        outbox.apply_failed(v1::ApplyFailed { version: 4, ..Default::default() });
        assert_eq!(outbox.report_at(at(110)), Some(at(110)));
        assert!(matches!(outbox.pop(at(110)).unwrap().body, Some(Body::ApplyFailed(_))));
        let late = ack(outbox.pop(at(350)));
        assert_eq!((late.version, late.programmed_ago_microseconds), (3, 250_000));
        assert_eq!(late.earlier, [v1::ProgrammedVersion { version: 2, ago_microseconds: 300_000 }]);
        outbox.ack(v1::Ack { version: 5, ..Default::default() }, at(900));
        assert_eq!(ack(outbox.pop(at(900))).version, 5, "after a quiet time, an ACK is sent at once");
    }

    #[test]
    fn acks_of_agents_that_started_together_spread_over_the_interval() {
        let start = Instant::now();
        let times = (0..100).map(|_| {
            let mut outbox = outbox();
            outbox.ack(v1::Ack::default(), start);
            outbox.pop(start).unwrap();
            outbox.ack(v1::Ack::default(), start);
            outbox.report_at(start).unwrap() - start
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
        let ack = ack(outbox.pop(now));
        let versions: Vec<u64> = ack.earlier.iter().map(|earlier| earlier.version).collect();
        assert_eq!((ack.version, versions), (1_000, (936..1_000).collect()));
    }

    fn nack(message: Option<v1::AgentMessage>) -> v1::Nack {
        match message.unwrap().body {
            Some(Body::Nack(nack)) => nack,
            other => panic!("not a NACK: {other:?}"),
        }
    }

    #[test]
    fn rejections_are_split_into_messages_of_limited_size_and_number() {
        let mut outbox = outbox();
        let long = "é".repeat(1_000);
        let named = |number: usize| v1::Rejection { resource: number.to_string(), ..rejection(&long) };
        let rejections: Vec<_> = (0..9_000).map(named).collect();
        let withdrawn = (0..900).map(|number| format!("{number}{long}")).collect();
        let dropped = outbox.nack(v1::Nack { version: 7, rejections, withdrawn, in_force: 0 });
        outbox.set_in_force(9_000);
        assert!(dropped > 0);
        let mut sent = 0;
        while let Some(message) = outbox.pop(Instant::now()) {
            assert!(message.encoded_len() <= MAX_AGENT_MESSAGE_BYTES);
            let nack = nack(Some(message));
            assert_eq!((nack.version, nack.in_force), (7, 9_000), "dropped rejections count");
            sent += nack.rejections.len() + nack.withdrawn.len();
        }
        assert_eq!(sent + dropped, 9_900);
    }

    #[test]
    fn a_nack_states_the_rejections_in_force_and_a_dropped_withdrawal_counts_as_one() {
        let (mut outbox, now) = (outbox(), Instant::now());
        let named = |name: &str| v1::Rejection { resource: name.into(), ..rejection("x") };
        let rejections = vec![named("a"), named("b")];
        outbox.nack(v1::Nack { version: 1, rejections, ..Default::default() });
        outbox.nack(v1::Nack { version: 2, withdrawn: vec!["b".into()], ..Default::default() });
        outbox.set_in_force(1);
        let first = nack(outbox.pop(now));
        assert_eq!((first.rejections, first.withdrawn), (vec![named("a")], vec!["b".to_owned()]));
        assert_eq!((first.version, first.in_force), (2, 1));
        // The count alone, because the replica does not need a name.
        outbox.set_in_force(5);
        let count = nack(outbox.pop(now));
        assert_eq!((count.rejections.len(), count.withdrawn.len(), count.in_force), (0, 0, 5));
        assert!(outbox.pop(now).is_none());
        outbox.nacks.bytes = MAX_WAITING_BYTES;
        assert_eq!(outbox.nack(v1::Nack { withdrawn: vec!["a".into()], ..Default::default() }), 1);
        outbox.set_in_force(4);
        assert!(outbox.pop(now).is_none(), "the replica still has the name, so the count stays");
        outbox.set_in_force(3);
        assert_eq!(nack(outbox.pop(now)).in_force, 4);
    }

    #[tokio::test]
    async fn reports_precede_requests_of_pods_and_requests_precede_answers() {
        let (mut outbox, now) = (outbox(), Instant::now());
        outbox.answers.ask(v1::Query { id: 1, query: None });
        outbox.answers.ready().await;
        let barriers = Arc::clone(&outbox.barriers.0);
        barriers.begin_stream();
        let mut asked = pin!(barriers.ask(Pod::At([10, 0, 0, 1].into()), String::new(), now, Duration::ZERO));
        assert!(asked.as_mut().now_or_never().is_none());
        outbox.ack(v1::Ack::default(), now);
        outbox.nack(v1::Nack { version: 1, rejections: vec![rejection("x")], ..Default::default() });
        outbox.apply_failed(v1::ApplyFailed { version: 2, ..Default::default() });
        let mut next = || outbox.pop(now).and_then(|message| message.body);
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
            assert!(matches!(outbox.pop(now).unwrap().body, Some(Body::ApplyFailed(_))));
            assert_eq!(outbox.pop(now).is_none(), is_revoked, "{failed}");
        }
    }
}
