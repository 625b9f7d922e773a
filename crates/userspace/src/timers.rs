//! Timers of tokens with a resolution of 100 ms, without I/O or clock. A token fires once. The
//! caller adds it again if its deadline has moved, so activity costs no work here.

use std::collections::BTreeMap;

/// The resolution.
pub(crate) const TICK_MS: u64 = 100;
/// Deadlines further away than this number of ticks fire early, and the caller adds them again.
const LONGEST_TICKS: u64 = 512;

/// Tokens by the tick at which they fire.
#[derive(Debug)]
pub(crate) struct Timers {
    tokens: BTreeMap<u64, Vec<u64>>,
    /// The first tick that has not fired.
    next_tick: u64,
}

impl Timers {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self { tokens: BTreeMap::new(), next_tick: now_ms / TICK_MS }
    }

    /// Adds a token that fires at the first tick that is not before `at_ms`, or earlier if `at_ms`
    /// is too far away.
    pub(crate) fn add(&mut self, token: u64, at_ms: u64) {
        let last = self.next_tick + LONGEST_TICKS - 1;
        let tick = at_ms.div_ceil(TICK_MS).clamp(self.next_tick, last);
        self.tokens.entry(tick).or_default().push(token);
    }

    pub(crate) fn advance(&mut self, now_ms: u64, fired: &mut Vec<u64>) {
        self.next_tick = self.next_tick.max(now_ms / TICK_MS + 1);
        while let Some(first) = self.tokens.first_entry().filter(|first| *first.key() < self.next_tick) {
            fired.append(&mut first.remove());
        }
    }

    /// The time until the first token fires, if tokens wait.
    pub(crate) fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let (tick, _) = self.tokens.first_key_value()?;
        Some((tick * TICK_MS).saturating_sub(now_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_token_fires_once_and_not_before_its_time(
            start_ms in 0_u64..10_000, delays_ms in proptest::collection::vec(0_u64..40_000, 0..50), step_ms in 1_u64..3000,
        ) {
            let mut timers = Timers::new(start_ms);
            for (token, delay_ms) in delays_ms.iter().enumerate() {
                timers.add(token as u64, start_ms + delay_ms);
            }
            let (mut fired, mut now_ms) = (Vec::new(), start_ms);
            let mut count = 0;
            while timers.next_ms(now_ms).is_some() {
                now_ms += step_ms;
                timers.advance(now_ms, &mut fired);
                for token in fired.drain(..) {
                    let due_ms = start_ms + delays_ms[usize::try_from(token).unwrap()];
                    prop_assert!(now_ms >= due_ms && now_ms < due_ms + step_ms + TICK_MS);
                    count += 1;
                }
            }
            prop_assert_eq!(count, delays_ms.len());
        }
    }

    #[test]
    fn a_far_deadline_fires_early() {
        let (mut timers, mut fired) = (Timers::new(0), Vec::new());
        timers.add(7, 3_600_000);
        timers.advance(LONGEST_TICKS * TICK_MS, &mut fired);
        assert_eq!(fired, [7]);
        assert_eq!(timers.next_ms(0), None);
    }
}
