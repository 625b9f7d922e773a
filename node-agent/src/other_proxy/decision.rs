//! Decides from looks whether the agent programs the node or stands by. Reads no clock.

use std::time::{Duration, Instant};

use super::{Look, Other, Synced};

/// The other proxy has gone if there was no sign for this time.
const PAUSE: Duration = Duration::from_secs(20);

/// The longest such time, for a proxy that returns again and again.
const MAX_PAUSE: Duration = Duration::from_secs(600);

/// A proxy that returns within this time after a take-over doubles the pause.
const STABLE: Duration = Duration::from_secs(600);

/// The longest time between two looks during which a sign cannot have been missed.
const BLIND: Duration = Duration::from_secs(10);

/// The rules of another proxy have been written for this time when the agent yields. An older
/// kube-proxy does not tell the IP families apart, and writes one after the other.
const COMPLETE: Duration = Duration::from_secs(10);

/// What the looks so far say.
#[derive(Debug)]
pub(crate) struct Decision {
    pause: Duration,
    /// When the last sign was seen, in standby.
    last_sign: Option<Instant>,
    last_look: Option<Instant>,
    /// Since when another proxy has written its rules, while the agent programs the node.
    returned: Option<Instant>,
    took_over: Option<Instant>,
}

impl Decision {
    /// The first decision: true if the agent stands by. `last` says whether the last run programmed
    /// the node. An agent that stood by before, or that finds rules of kube-proxy and does not
    /// know who wrote them, waits for signs first.
    pub(crate) fn begin(look: &Look, last: Option<bool>, now: Instant) -> (Self, bool) {
        let stands_by = look.other.is_some() || last == Some(false) || last.is_none() && look.has_rules;
        let decision = Self {
            pause: PAUSE,
            last_sign: stands_by.then_some(now),
            last_look: Some(now),
            returned: None,
            took_over: None,
        };
        (decision, stands_by)
    }

    /// True if an agent in standby takes over.
    pub(crate) fn takes_over(&mut self, look: &Look, now: Instant) -> bool {
        // Nobody knows what happened while this process could not look.
        let was_blind = self.last_look.is_none_or(|last| now.saturating_duration_since(last) > BLIND);
        self.last_look = Some(now);
        if look.other.is_some() || was_blind {
            self.last_sign = Some(now);
        }
        let is_over = self.last_sign.is_none_or(|last| now.saturating_duration_since(last) >= self.pause);
        let has_gone = is_over && look.is_whole;
        if has_gone {
            (self.took_over, self.returned) = (Some(now), None);
        }
        has_gone
    }

    /// True if an agent that programs the node yields: another proxy has returned, and its rules
    /// are complete. An agent with chains of iptables cannot tell kube-proxy's from its own.
    pub(crate) fn yields(&mut self, look: &Look, tells_chains: bool, now: Instant) -> bool {
        let complete_after = look.other.as_ref().and_then(|other| {
            let is_untold = other.program != Other::KUBE_PROXY || !tells_chains;
            match look.synced {
                Some(Synced::None) => None,
                Some(Synced::Some) => Some(Synced::NO_MORE_AFTER),
                Some(Synced::All) => Some(COMPLETE),
                None => (look.has_rules || is_untold).then_some(COMPLETE),
            }
        });
        let Some(complete_after) = complete_after else {
            self.returned = None;
            return false;
        };
        let yields = now.saturating_duration_since(*self.returned.get_or_insert(now)) >= complete_after;
        if yields {
            let was_soon = self.took_over.is_some_and(|at| now.saturating_duration_since(at) < STABLE);
            self.pause = if was_soon { (self.pause * 2).min(MAX_PAUSE) } else { PAUSE };
            (self.last_sign, self.last_look) = (Some(now), Some(now));
        }
        yields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Look {
        Look { other: Some(Other::of(Other::KUBE_PROXY, None)), ..nothing() }
    }

    fn nothing() -> Look {
        Look { is_whole: true, ..Look::default() }
    }

    #[test]
    fn an_agent_waits_for_signs_unless_it_knows_who_wrote_the_rules() {
        let now = Instant::now();
        let rules = Look { has_rules: true, ..Look::default() };
        for (look, last, expected) in [
            (Look::default(), None, false),
            (rules.clone(), None, true),
            (rules.clone(), Some(true), false),
            (Look::default(), Some(false), true),
            (seen(), Some(true), true),
        ] {
            assert_eq!(Decision::begin(&look, last, now).1, expected, "{look:?} {last:?}");
        }
    }

    #[test]
    fn a_proxy_in_a_crash_loop_has_not_gone_and_each_return_doubles_the_pause() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let (mut decision, stands_by) = Decision::begin(&seen(), None, begin);
        assert!(stands_by);
        // It shows a sign every 15 s.
        for second in 1..60 {
            let look = if second % 15 == 0 { seen() } else { nothing() };
            assert!(!decision.takes_over(&look, at(second)), "{second}");
        }
        assert!(!decision.takes_over(&nothing(), at(64)) && !decision.takes_over(&Look::default(), at(65)));
        assert!(decision.takes_over(&nothing(), at(66)));
        // A process that ends at once writes no rules.
        assert!(!decision.yields(&seen(), true, at(70)) && !decision.yields(&seen(), true, at(90)));
        assert!(!decision.yields(&Look::default(), true, at(91)));
        let writes = Look { has_rules: true, ..seen() };
        assert!(!decision.yields(&writes, true, at(92)) && !decision.yields(&writes, true, at(101)));
        assert!(decision.yields(&writes, true, at(102)));
        let taken_over = (103..).find(|second| decision.takes_over(&nothing(), at(*second)));
        assert_eq!(taken_over, Some(102 + 40));
        let synced = |synced| Look { synced: Some(synced), has_rules: true, ..seen() };
        for (second, pause) in [(143, 80), (1000, 20)] {
            assert!(!decision.yields(&synced(Synced::None), true, at(second)));
            assert!(!decision.yields(&synced(Synced::None), true, at(second + 20)), "it cannot reach its API server");
            assert!(!decision.yields(&synced(Synced::All), true, at(second + 21)));
            assert!(decision.yields(&synced(Synced::All), true, at(second + 31)));
            assert_eq!(decision.pause, Duration::from_secs(pause));
        }
        let some = synced(Synced::Some);
        assert!(!decision.yields(&synced(Synced::None), true, at(1999)));
        assert!(!decision.yields(&some, true, at(2000)) && !decision.yields(&some, true, at(2299)));
        assert!(decision.yields(&some, true, at(2300)), "it programs no other family");
    }

    /// As while the machine is suspended.
    #[test]
    fn time_without_looks_does_not_count_as_absence() {
        let begin = Instant::now();
        let (mut decision, _) = Decision::begin(&seen(), None, begin);
        assert!(!decision.takes_over(&nothing(), begin + 5 * PAUSE));
    }

    #[test]
    fn equal_chains_of_this_agent_prove_nothing() {
        let begin = Instant::now();
        let (mut decision, _) = Decision::begin(&Look::default(), None, begin);
        assert!(!decision.yields(&seen(), false, begin));
        assert!(decision.yields(&seen(), false, begin + COMPLETE));
    }
}
