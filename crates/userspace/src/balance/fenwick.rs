//! Sums of weights in a Fenwick tree: a change and a search take O(log n).

/// Weights by slot.
#[derive(Debug, Default, Clone)]
pub(super) struct Weights {
    /// `sums[i]` is the sum of the weights of the slots that node `i` covers. Slot `s` is at
    /// position `s + 1`; position 0 is unused.
    sums: Vec<u64>,
    weights: Vec<u32>,
}

impl Weights {
    pub(super) fn total(&self) -> u64 {
        self.before(self.weights.len())
    }

    /// The weight of a slot, 0 if it was never set.
    pub(super) fn get(&self, slot: usize) -> u32 {
        self.weights.get(slot).copied().unwrap_or(0)
    }

    /// Sets the weight of a slot. A slot with weight 0 is never found.
    pub(super) fn set(&mut self, slot: usize, weight: u32) {
        while self.weights.len() <= slot {
            let position = self.weights.len() + 1;
            let first = position - lowest_bit(position);
            let sum = self.before(self.weights.len()) - self.before(first);
            self.weights.push(0);
            self.sums.resize(position.max(1), 0);
            self.sums.push(sum);
        }
        let old = std::mem::replace(&mut self.weights[slot], weight);
        let mut position = slot + 1;
        while position < self.sums.len() {
            self.sums[position] = self.sums[position] - u64::from(old) + u64::from(weight);
            position += lowest_bit(position);
        }
    }

    /// The slot that covers `point`, below [`Self::total`], if all weights are laid out in a row.
    pub(super) fn find(&self, mut point: u64) -> usize {
        let mut position = 0;
        let mut step = self.weights.len().next_power_of_two();
        while step > 0 {
            let next = position + step;
            if next < self.sums.len() && self.sums[next] <= point {
                point -= self.sums[next];
                position = next;
            }
            step /= 2;
        }
        position
    }

    /// The sum of the weights of the slots below `end`.
    fn before(&self, end: usize) -> u64 {
        let (mut position, mut sum) = (end, 0);
        while position > 0 {
            sum += self.sums[position];
            position -= lowest_bit(position);
        }
        sum
    }
}

fn lowest_bit(position: usize) -> usize {
    position & position.wrapping_neg()
}
