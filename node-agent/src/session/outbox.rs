//! What the agent has to say and could not yet: bounded, whatever the replica reads.

use std::{collections::VecDeque, ops::RangeInclusive, time::Duration};

use headgate_proto::{
    MAX_AGENT_MESSAGE_BYTES,
    v1::{self, agent_message::Body},
};
use prost::Message as _;
use tokio::time::Instant;

/// Longest field of a rejection that is sent.
const MAX_TEXT_BYTES: usize = 1024;
/// Rejections that wait at most; further ones are counted and logged, not sent.
const MAX_WAITING_NACKS: usize = 64;
/// Half of what a message may be, so that its own fields have room.
const NACK_BYTES: usize = MAX_AGENT_MESSAGE_BYTES / 2;

/// Least time between two ACKs in milliseconds, drawn anew for each (contract, 7). A fleet's ACKs
/// are most of what a replica has to read: thousands of agents times the changes a second. With one
/// time for all they would go on coming at the same moments, since the change that follows a quiet
/// time is acknowledged by all at once, and each change that meets them there would have to wait.
const ACK_INTERVAL_MS: RangeInclusive<u64> = 150..=350;

/// Times of earlier versions in one ACK (`Ack.earlier`); what is older counts as programmed with
/// the oldest of them.
const MAX_EARLIER: usize = 64;

/// Messages in order. A newer status, ACK, or failure, replaces one that waits.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    nacks: VecDeque<v1::Nack>,
    failed: Option<v1::ApplyFailed>,
    ack: Option<WaitingAck>,
    /// Before then, an ACK waits for others.
    next_ack: Option<Instant>,
    status: Option<v1::AgentStatus>,
}

/// An ACK that may wait for others.
#[derive(Debug)]
struct WaitingAck {
    ack: v1::Ack,
    /// The versions that it covers, and when each was programmed. The last is its own.
    programmed: VecDeque<(u64, Instant)>,
}

impl Outbox {
    /// When there is something to send; `None` when there is nothing. An ACK may have to wait,
    /// anything else goes at once.
    pub(super) fn ready_at(&self, now: Instant) -> Option<Instant> {
        if !self.nacks.is_empty() || self.failed.is_some() || self.status.is_some() {
            return Some(now);
        }
        self.ack.as_ref()?;
        Some(self.next_ack.unwrap_or(now))
    }

    /// Queues an ACK of what has been programmed just now.
    pub(super) fn ack(&mut self, mut ack: v1::Ack, now: Instant) {
        let mut programmed = VecDeque::with_capacity(1);
        if let Some(waiting) = self.ack.take() {
            ack.services_planned = ack.services_planned.saturating_add(waiting.ack.services_planned);
            ack.objects_written = ack.objects_written.saturating_add(waiting.ack.objects_written);
            programmed = waiting.programmed;
            // A node's revision alone is acknowledged by the same version.
            programmed.retain(|(version, _)| *version < ack.version);
            if programmed.len() > MAX_EARLIER {
                programmed.pop_front();
            }
        }
        programmed.push_back((ack.version, now));
        // A failure of what this covers is made good; one of a newer version is not.
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

    /// Queues rejections and their withdrawals, in as many messages as their size asks for. Returns
    /// how many found no room.
    pub(super) fn nack(&mut self, nack: v1::Nack) -> usize {
        let version = nack.version;
        let (mut part, mut bytes, mut dropped) = (v1::Nack { version, ..v1::Nack::default() }, 0, 0);
        // Withdrawals come first: what is rejected again for another reason is rejected at the end.
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

    /// Queues what has come together when an item of this size does not fit in any more. Returns
    /// how many items found no room.
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

    /// The next message to send, if there is one and its time has come.
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

/// Cuts a text that is too long, at a character's border.
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
    fn a_newer_ack_replaces_and_sums() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.ack(v1::Ack { version: 1, services_planned: 2, objects_written: 3, ..Default::default() }, now);
        outbox.apply_failed(v1::ApplyFailed { version: 2, ..Default::default() });
        outbox.ack(v1::Ack { version: 2, services_planned: 1, objects_written: 1, ..Default::default() }, now);
        let ack = ack(outbox.pop(now));
        assert_eq!((ack.version, ack.services_planned, ack.objects_written), (2, 3, 4));
        assert!(outbox.ready_at(now).is_none() && outbox.pop(now).is_none());
    }

    #[test]
    fn acks_keep_a_distance_and_say_how_old_they_are() {
        let (mut outbox, start) = (Outbox::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        outbox.ack(v1::Ack { version: 1, ..Default::default() }, at(0));
        assert_eq!(ack(outbox.pop(at(0))).programmed_ago_microseconds, 0, "the first goes at once");
        outbox.ack(v1::Ack { version: 2, ..Default::default() }, at(50));
        outbox.ack(v1::Ack { version: 3, ..Default::default() }, at(100));
        let ready = outbox.ready_at(at(100)).unwrap();
        assert!(ready >= at(150) && ready <= at(350), "{:?}", ready - start);
        assert!(outbox.pop(at(149)).is_none());
        // What else there is to say does not wait.
        outbox.apply_failed(v1::ApplyFailed { version: 4, ..Default::default() });
        assert_eq!(outbox.ready_at(at(110)), Some(at(110)));
        assert!(matches!(outbox.pop(at(110)).unwrap().body, Some(Body::ApplyFailed(_))));
        let late = ack(outbox.pop(at(350)));
        assert_eq!((late.version, late.programmed_ago_microseconds), (3, 250_000));
        assert_eq!(late.earlier, [v1::ProgrammedVersion { version: 2, ago_microseconds: 300_000 }]);
        outbox.ack(v1::Ack { version: 5, ..Default::default() }, at(900));
        assert_eq!(ack(outbox.pop(at(900))).version, 5, "after a quiet time one goes at once");
    }

    #[test]
    fn acks_of_agents_that_began_together_do_not_stay_together() {
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
        // By chance one stays empty in some of ten thousand runs, and four in none.
        assert!((0..10).filter(in_a_tenth).count() > 6, "{times:?}");
    }

    #[test]
    fn times_of_earlier_versions_are_bounded_and_of_each_version_once() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        for version in 1..=1_000 {
            // A version, and then the node's revision with it.
            outbox.ack(v1::Ack { version, ..Default::default() }, now);
            outbox.ack(v1::Ack { version, node_revision: 1, ..Default::default() }, now);
        }
        let ack = ack(outbox.pop(now));
        let versions: Vec<u64> = ack.earlier.iter().map(|earlier| earlier.version).collect();
        assert_eq!((ack.version, versions), (1_000, (936..1_000).collect()));
    }

    #[test]
    fn rejections_are_split_below_the_limit_and_bounded() {
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
    fn rejections_go_before_the_ack() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.ack(v1::Ack::default(), now);
        assert_eq!(outbox.nack(v1::Nack { version: 1, rejections: vec![rejection("x")], ..Default::default() }), 0);
        assert!(matches!(outbox.pop(now).unwrap().body, Some(Body::Nack(_))));
        assert!(matches!(outbox.pop(now).unwrap().body, Some(Body::Ack(_))));
    }
}
