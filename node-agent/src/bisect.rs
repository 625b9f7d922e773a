//! Finding the few items of a batch that are at fault, by trying halves.

/// Items that cannot be used, and why. One, unless tries ran out before they could be told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault<K> {
    pub(crate) items: Vec<K>,
    pub(crate) reason: String,
}

/// Finds what is at fault in a batch that failed for `reason` as a whole. `attempt` tries some of
/// the items and says why these fail, if they do. For one item at fault among `n`, some `2·log2(n)`
/// attempts are made, on ever fewer items: all together they try each item a few times. After
/// `max_attempts`, groups that still hold an item at fault are given as a whole.
///
/// Empty when each item works by itself.
///
/// # Errors
/// Those of `attempt`, when it cannot find out.
pub(crate) fn find_faults<K: Clone, E>(
    items: &[K],
    reason: &str,
    max_attempts: u32,
    attempt: impl FnMut(&[K]) -> Result<Option<String>, E>,
) -> Result<Vec<Fault<K>>, E> {
    let mut search = Search { attempt, attempts_left: max_attempts, faults: Vec::new() };
    search.divide(items, reason.to_owned())?;
    Ok(search.faults)
}

struct Search<K, F> {
    attempt: F,
    attempts_left: u32,
    faults: Vec<Fault<K>>,
}

impl<K: Clone, F> Search<K, F> {
    /// Looks into items that fail together, though each of them may work by itself.
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
        // What fails is in the second half: that need not be tried as a whole.
        self.divide(second, reason)
    }

    /// Tries some items; looks into them if they fail, and returns whether they do. `reason` is
    /// that of the batch that they are part of.
    fn test<E>(&mut self, items: &[K], reason: &str) -> Result<bool, E>
    where
        F: FnMut(&[K]) -> Result<Option<String>, E>,
    {
        if items.is_empty() {
            return Ok(false);
        }
        if self.attempts_left == 0 {
            self.faults.push(Fault { items: items.to_vec(), reason: reason.to_owned() });
            return Ok(true);
        }
        self.attempts_left -= 1;
        let Some(reason) = (self.attempt)(items)? else { return Ok(false) };
        if items.len() == 1 {
            self.faults.push(Fault { items: items.to_vec(), reason });
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

    /// Numbers below `count`, of which `bad` fail. Returns what was found, the attempts, and the
    /// items tried in all of them together.
    fn find(count: u32, bad: &[u32], max_attempts: u32) -> (Vec<Fault<u32>>, u32, usize) {
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
    fn one_item_is_found_in_few_attempts_wherever_it_is() {
        for bad in [0, 1, 4_999, 5_000, 9_999] {
            let (found, attempts, tried) = find(10_000, &[bad], 256);
            assert_eq!(found, [Fault { items: vec![bad], reason: format!("line {bad}") }]);
            assert!(attempts <= 2 * 14 + 1, "{attempts}");
            assert!(tried <= 2 * 10_000 + 100, "{tried}");
        }
        assert_eq!(find(1, &[0], 256).0[0].items, [0]);
    }

    #[test]
    fn several_items_are_all_found_and_nothing_else() {
        let (found, attempts, _) = find(1_000, &[3, 4, 500, 999], 256);
        let items: Vec<u32> = found.iter().flat_map(|fault| fault.items.clone()).collect();
        assert_eq!(items, [3, 4, 500, 999]);
        assert!(attempts <= 4 * 20, "{attempts}");
    }

    #[test]
    fn when_attempts_run_out_groups_are_given_that_hold_all_that_is_at_fault() {
        let bad: Vec<u32> = (0..1_000).step_by(2).collect();
        let (found, attempts, _) = find(1_000, &bad, 20);
        assert_eq!(attempts, 20);
        let items: Vec<u32> = found.iter().flat_map(|fault| fault.items.clone()).collect();
        assert!(bad.iter().all(|bad| items.contains(bad)));
    }

    #[test]
    fn what_works_by_itself_is_not_accused() {
        let (found, ..) = find(10, &[], 256);
        assert!(found.is_empty(), "{found:?}");
        let failed: Result<Vec<Fault<u32>>, &str> = find_faults(&[1, 2], "all", 256, |_| Err("the lock"));
        assert_eq!(failed, Err("the lock"));
    }
}
