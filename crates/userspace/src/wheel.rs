//! A timer wheel of tokens with a resolution of 100 ms. It does no I/O and reads no clock.
//!
//! A token fires once. The caller checks whether the deadline of the token's object has come, and
//! otherwise adds the token again. Activity of an object therefore costs no work here.

/// The resolution.
pub(crate) const TICK_MS: u64 = 100;
/// Deadlines further away than this number of ticks fire early, and the caller adds them again.
const SLOTS: usize = 512;

/// Tokens by the tick at which they fire.
#[derive(Debug)]
pub(crate) struct Wheel {
    slots: Vec<Vec<u64>>,
    /// The first tick that has not fired.
    next_tick: u64,
    waiting: usize,
}

impl Wheel {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self { slots: vec![Vec::new(); SLOTS], next_tick: now_ms / TICK_MS, waiting: 0 }
    }

    /// Adds a token that fires at the first tick that is not before `at_ms`, or earlier if `at_ms`
    /// is beyond the wheel.
    pub(crate) fn add(&mut self, token: u64, at_ms: u64) {
        let last = self.next_tick + SLOTS as u64 - 1;
        let tick = at_ms.div_ceil(TICK_MS).clamp(self.next_tick, last);
        self.slots[slot(tick)].push(token);
        self.waiting += 1;
    }

    /// Moves the tokens that fire by now to `fired`.
    pub(crate) fn advance(&mut self, now_ms: u64, fired: &mut Vec<u64>) {
        while self.next_tick <= now_ms / TICK_MS {
            if self.waiting == 0 {
                self.next_tick = now_ms / TICK_MS + 1;
                break;
            }
            let due = &mut self.slots[slot(self.next_tick)];
            self.waiting -= due.len();
            fired.append(due);
            // A burst of connections leaves no large allocation behind.
            due.shrink_to(64);
            self.next_tick += 1;
        }
    }

    /// The time until the next tick, if tokens wait.
    pub(crate) fn next_ms(&self, now_ms: u64) -> Option<u64> {
        (self.waiting > 0).then(|| (self.next_tick * TICK_MS).saturating_sub(now_ms))
    }
}

fn slot(tick: u64) -> usize {
    usize::try_from(tick % SLOTS as u64).unwrap_or(0)
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
            let mut wheel = Wheel::new(start_ms);
            for (token, delay_ms) in delays_ms.iter().enumerate() {
                wheel.add(token as u64, start_ms + delay_ms);
            }
            let (mut fired, mut now_ms) = (Vec::new(), start_ms);
            let mut count = 0;
            while wheel.next_ms(now_ms).is_some() {
                now_ms += step_ms;
                wheel.advance(now_ms, &mut fired);
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
        let (mut wheel, mut fired) = (Wheel::new(0), Vec::new());
        wheel.add(7, 3_600_000);
        wheel.advance(SLOTS as u64 * TICK_MS, &mut fired);
        assert_eq!(fired, [7]);
        assert_eq!(wheel.next_ms(0), None);
    }
}
