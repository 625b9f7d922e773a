//! Finds the few faulty items of a batch by trying halves.

/// A faulty item, and the reason of its failure. Contains several items if the attempts ran out
/// before the search found the faulty items among these items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FaultyItems<K> {
    pub(crate) items: Vec<K>,
    pub(crate) reason: String,
}

/// Finds the faulty items of a batch that failed as a whole for `reason`; nothing if each works by
/// itself. `attempt` returns why some items fail, or `None`. One faulty item of `n` takes about
/// `2·log2(n)` attempts. After `max_attempts`, each group with a faulty item is one
/// [`FaultyItems`]. Errors: the first error of `attempt`, which ends the search.
pub(crate) fn find_faults<K: Clone, E>(
    items: &[K],
    reason: &str,
    max_attempts: u32,
    attempt: impl FnMut(&[K]) -> Result<Option<String>, E>,
) -> Result<Vec<FaultyItems<K>>, E> {
    let mut search = Search { attempt, attempts_left: max_attempts, faults: Vec::new() };
    search.divide(items, reason.to_owned())?;
    Ok(search.faults)
}

struct Search<K, F> {
    attempt: F,
    attempts_left: u32,
    faults: Vec<FaultyItems<K>>,
}

impl<K: Clone, F> Search<K, F> {
    /// Searches items that fail together. Each of these items may still work by itself.
    fn divide<E>(&mut self, items: &[K], reason: String) -> Result<(), E>
    where
        F: FnMut(&[K]) -> Result<Option<String>, E>,
    {
        if items.len() <= 1 {
            return self.test(items, &reason).map(drop);
        }
        let (first, second) = items.split_at(items.len() / 2);
        if self.test(first, &reason)? || second.len() == 1 {
            return self.test(second, &reason).map(drop);
        }
        // The first half works, so the fault is in the second: split it without trying it.
        self.divide(second, reason)
    }

    /// Tries some items, and searches them if they fail. Returns true if they fail. `reason` says
    /// why the larger batch failed. If no attempts are left, the search reports `reason`.
    fn test<E>(&mut self, items: &[K], reason: &str) -> Result<bool, E>
    where
        F: FnMut(&[K]) -> Result<Option<String>, E>,
    {
        if items.is_empty() {
            return Ok(false);
        }
        if self.attempts_left == 0 {
            self.faults.push(FaultyItems { items: items.to_vec(), reason: reason.to_owned() });
            return Ok(true);
        }
        self.attempts_left -= 1;
        let Some(reason) = (self.attempt)(items)? else { return Ok(false) };
        if items.len() == 1 {
            self.faults.push(FaultyItems { items: items.to_vec(), reason });
        } else {
            self.divide(items, reason)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;

    use super::*;

    /// Searches the numbers below `count`, of which `bad` fail. Returns the faults, the number of
    /// attempts, and the number of items in all attempts together.
    fn find(count: u32, bad: &[u32], max_attempts: u32) -> (Vec<FaultyItems<u32>>, u32, usize) {
        let items: Vec<u32> = (0..count).collect();
        let (mut attempts, mut tried) = (0, 0);
        let found = find_faults(&items, "all", max_attempts, |items| {
            attempts += 1;
            tried += items.len();
            let failing = items.iter().find(|item| bad.contains(item));
            Ok::<_, Infallible>(failing.map(|item| format!("line {item}")))
        });
        (found.unwrap(), attempts, tried)
    }

    #[test]
    fn one_faulty_item_is_found_in_few_attempts_at_any_position() {
        for bad in [0, 1, 4_999, 5_000, 9_999] {
            let (found, attempts, tried) = find(10_000, &[bad], 256);
            assert_eq!(found, [FaultyItems { items: vec![bad], reason: format!("line {bad}") }]);
            assert!(attempts <= 2 * 14 + 1, "{attempts}");
            assert!(tried <= 2 * 10_000 + 100, "{tried}");
        }
        assert_eq!(find(1, &[0], 256).0[0].items, [0]);
    }

    #[test]
    fn all_faulty_items_are_found_and_no_others() {
        let (found, attempts, _) = find(1_000, &[3, 4, 500, 999], 256);
        let items: Vec<u32> = found.iter().flat_map(|fault| fault.items.clone()).collect();
        assert_eq!(items, [3, 4, 500, 999]);
        assert!(attempts <= 4 * 20, "{attempts}");
    }

    #[test]
    fn groups_with_all_faulty_items_are_returned_when_attempts_run_out() {
        let bad: Vec<u32> = (0..1_000).step_by(2).collect();
        let (found, attempts, _) = find(1_000, &bad, 20);
        assert_eq!(attempts, 20);
        let items: Vec<u32> = found.iter().flat_map(|fault| fault.items.clone()).collect();
        assert!(bad.iter().all(|bad| items.contains(bad)));
    }

    #[test]
    fn items_that_work_by_themselves_are_not_reported() {
        let (found, ..) = find(10, &[], 256);
        assert!(found.is_empty(), "{found:?}");
        let failed: Result<Vec<FaultyItems<u32>>, &str> = find_faults(&[1, 2], "all", 256, |_| Err("the lock"));
        assert_eq!(failed, Err("the lock"));
    }
}
