//! Messages that wait to be sent to the replica. The total size of these messages is bounded, even
//! if the replica reads nothing.

use std::{collections::VecDeque, ops::RangeInclusive, time::Duration};

use headgate_proto::{
    MAX_AGENT_MESSAGE_BYTES,
    v1::{self, agent_message::Body},
};
use prost::Message as _;
use tokio::time::Instant;

/// Maximum length of a field of a rejection. Longer texts are cut.
const MAX_TEXT_BYTES: usize = 1024;
/// Maximum number of waiting NACKs. The contents of further NACKs are counted and dropped.
const MAX_WAITING_NACKS: usize = 64;
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

/// The waiting messages. A newer status, ACK or failure replaces a waiting message of the same
/// kind.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    nacks: VecDeque<v1::Nack>,
    failed: Option<v1::ApplyFailed>,
    ack: Option<WaitingAck>,
    /// When the next ACK may be sent. Until this time, newer ACKs are merged into the waiting ACK.
    next_ack: Option<Instant>,
    /// When the last ACK was sent.
    last_ack: Option<Instant>,
    /// The first and the last version for whose ACK somebody may wait.
    urgent: Option<(u64, u64)>,
    status: Option<v1::AgentStatus>,
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
    /// When the next message may be sent; `None` if no message waits. Only an ACK may have to wait.
    pub(super) fn ready_at(&self, now: Instant) -> Option<Instant> {
        if !self.nacks.is_empty() || self.failed.is_some() || self.status.is_some() {
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
        // The ACK supersedes a failure, unless the failure concerns a newer version.
        self.failed.take_if(|failed| failed.version <= ack.version);
        self.ack = Some(WaitingAck { ack, programmed });
    }

    pub(super) fn status(&mut self, mut status: v1::AgentStatus) {
        status.degraded.truncate(MAX_WAITING_NACKS);
        status.degraded.iter_mut().for_each(|sentence| shorten(sentence, MAX_TEXT_BYTES));
        self.status = Some(status);
    }

    pub(super) fn apply_failed(&mut self, mut failed: v1::ApplyFailed) {
        shorten(&mut failed.error, 16 * MAX_TEXT_BYTES);
        self.failed = Some(failed);
    }

    /// Queues rejections and withdrawals, split into messages by size. Returns the number of items
    /// that were dropped for lack of room.
    pub(super) fn nack(&mut self, nack: v1::Nack) -> usize {
        let version = nack.version;
        let (mut part, mut bytes, mut dropped) = (v1::Nack { version, ..v1::Nack::default() }, 0, 0);
        // Withdrawals come first, so that a resource that is withdrawn and rejected for another
        // reason ends up as rejected.
        for mut resource in nack.withdrawn {
            shorten(&mut resource, MAX_TEXT_BYTES);
            dropped += self.make_room(&mut part, &mut bytes, resource.len() + 8);
            part.withdrawn.push(resource);
        }
        for mut rejection in nack.rejections {
            let fields = [&mut rejection.resource, &mut rejection.field, &mut rejection.reason];
            fields.into_iter().for_each(|text| shorten(text, MAX_TEXT_BYTES));
            dropped += self.make_room(&mut part, &mut bytes, rejection.encoded_len() + 8);
            part.rejections.push(rejection);
        }
        dropped + self.push_nack(part)
    }

    /// If an item of this size does not fit into `part`, queues `part` and starts a new NACK.
    /// Returns the number of items that were dropped for lack of room.
    fn make_room(&mut self, part: &mut v1::Nack, bytes: &mut usize, size: usize) -> usize {
        let is_full = *bytes + size > NACK_BYTES;
        *bytes = if is_full { size } else { *bytes + size };
        if !is_full {
            return 0;
        }
        let version = part.version;
        self.push_nack(std::mem::replace(part, v1::Nack { version, ..v1::Nack::default() }))
    }

    fn push_nack(&mut self, nack: v1::Nack) -> usize {
        if self.nacks.len() >= MAX_WAITING_NACKS {
            return nack.rejections.len() + nack.withdrawn.len();
        }
        self.nacks.push_back(nack);
        0
    }

    /// Takes out the next message that may be sent at `now`, if any.
    pub(super) fn pop(&mut self, now: Instant) -> Option<v1::AgentMessage> {
        let body = if let Some(status) = self.status.take() {
            Body::Status(status)
        } else if let Some(nack) = self.nacks.pop_front() {
            Body::Nack(nack)
        } else if let Some(failed) = self.failed.take() {
            Body::ApplyFailed(failed)
        } else {
            self.ready_at(now).filter(|at| *at <= now)?;
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
        Some(v1::AgentMessage { body: Some(body) })
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
    use super::*;

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
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.ack(v1::Ack { version: 1, services_planned: 2, objects_written: 3, ..Default::default() }, now);
        outbox.apply_failed(v1::ApplyFailed { version: 2, ..Default::default() });
        outbox.ack(v1::Ack { version: 2, services_planned: 1, objects_written: 1, ..Default::default() }, now);
        let ack = ack(outbox.pop(now));
        assert_eq!((ack.version, ack.services_planned, ack.objects_written), (2, 3, 4));
        assert!(outbox.ready_at(now).is_none() && outbox.pop(now).is_none());
    }

    #[test]
    fn acks_wait_for_the_interval_and_state_when_versions_were_programmed() {
        let (mut outbox, start) = (Outbox::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        outbox.ack(v1::Ack { version: 1, ..Default::default() }, at(0));
        assert_eq!(ack(outbox.pop(at(0))).programmed_ago_microseconds, 0, "the first ACK is sent at once");
        outbox.ack(v1::Ack { version: 2, ..Default::default() }, at(50));
        outbox.ack(v1::Ack { version: 3, ..Default::default() }, at(100));
        let ready = outbox.ready_at(at(100)).unwrap();
        assert!(ready >= at(150) && ready <= at(350), "{:?}", ready - start);
        assert!(outbox.pop(at(149)).is_none());
        // Other messages do not wait for the interval.
        outbox.apply_failed(v1::ApplyFailed { version: 4, ..Default::default() });
        assert_eq!(outbox.ready_at(at(110)), Some(at(110)));
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
            let mut outbox = Outbox::default();
            outbox.ack(v1::Ack::default(), start);
            outbox.pop(start).unwrap();
            outbox.ack(v1::Ack::default(), start);
            outbox.ready_at(start).unwrap() - start
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
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        for version in 1..=1_000 {
            // The second ACK acknowledges a new revision of the node at the same version.
            outbox.ack(v1::Ack { version, ..Default::default() }, now);
            outbox.ack(v1::Ack { version, node_revision: 1, ..Default::default() }, now);
        }
        let ack = ack(outbox.pop(now));
        let versions: Vec<u64> = ack.earlier.iter().map(|earlier| earlier.version).collect();
        assert_eq!((ack.version, versions), (1_000, (936..1_000).collect()));
    }

    #[test]
    fn rejections_are_split_into_messages_of_limited_size_and_number() {
        let mut outbox = Outbox::default();
        let long = "é".repeat(1_000);
        let dropped =
            outbox.nack(v1::Nack { version: 7, rejections: vec![rejection(&long); 9_000], withdrawn: vec![long; 900] });
        assert!(dropped > 0);
        let mut sent = 0;
        while let Some(message) = outbox.pop(Instant::now()) {
            assert!(message.encoded_len() <= MAX_AGENT_MESSAGE_BYTES);
            let Some(Body::Nack(nack)) = message.body else { panic!("not a NACK") };
            assert_eq!(nack.version, 7);
            sent += nack.rejections.len() + nack.withdrawn.len();
        }
        assert_eq!(sent + dropped, 9_900);
    }

    #[test]
    fn rejections_are_sent_before_the_ack() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.ack(v1::Ack::default(), now);
        assert_eq!(outbox.nack(v1::Nack { version: 1, rejections: vec![rejection("x")], ..Default::default() }), 0);
        assert!(matches!(outbox.pop(now).unwrap().body, Some(Body::Nack(_))));
        assert!(matches!(outbox.pop(now).unwrap().body, Some(Body::Ack(_))));
    }
}
