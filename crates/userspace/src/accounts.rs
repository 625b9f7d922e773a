//! Accounts: counters of Kubernetes Services. The entries of the table come and go with endpoints;
//! an account stays, so that its counters do not begin at 0 again.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::stats::{ServiceStats, Stats};

/// A Service may have this many connections for each further connection that the proxy can carry.
/// So one Service alone gets at most 8/9 of all connections, and others find a free place (dynamic
/// thresholds, Choudhury and Hahne 1998).
const PER_FREE_PLACE: u64 = 8;

#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Such as `default/web`.
    pub(crate) name: Arc<str>,
    pub(crate) stats: Stats,
    /// The most open connections; `u64::MAX` for no limit.
    limit: AtomicU64,
}

impl Account {
    /// Counts a connection as open, unless the account has as many as its limit, or too many for
    /// the number of `free` places of the proxy. Returns whether the connection is allowed.
    pub(crate) fn open(&self, free: u64) -> bool {
        let open = self.stats.open.add(1);
        let refusals = if open >= self.limit.load(Relaxed) {
            &self.stats.over_limit
        } else if open >= free.saturating_mul(PER_FREE_PLACE) {
            &self.stats.over_share
        } else {
            return true;
        };
        self.stats.open.subtract(1);
        refusals.add(1);
        false
    }

    /// Sets the limit of open connections. Connections beyond a lower limit continue.
    pub(crate) fn set_limit(&self, limit: Option<u32>) {
        self.limit.store(limit.map_or(u64::MAX, u64::from), Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Accounts {
    by_name: HashMap<Arc<str>, Arc<Account>>,
    /// Removed accounts whose connections may be open.
    removed: Vec<Arc<Account>>,
    /// The sums of the removed accounts that have ended.
    ended: ServiceStats,
    /// The number of removed accounts at which those that have ended are looked for.
    collect_at: usize,
}

impl Accounts {
    /// The account with a name, which is created if it does not exist.
    pub(crate) fn get(&mut self, name: &Arc<str>) -> Arc<Account> {
        let create = || Arc::new(Account { name: Arc::clone(name), limit: u64::MAX.into(), ..Account::default() });
        Arc::clone(self.by_name.entry(Arc::clone(name)).or_insert_with(create))
    }

    /// Removes an account. Its counts stay in the totals.
    pub(crate) fn remove(&mut self, name: &str) {
        const MIN_REMOVED: usize = 64;
        self.removed.extend(self.by_name.remove(name));
        if self.removed.len() >= self.collect_at.max(MIN_REMOVED) {
            self.collect();
            self.collect_at = self.removed.len() * 2;
        }
    }

    /// Moves the counts of removed accounts that nobody uses any more into one sum.
    fn collect(&mut self) {
        let ended = &mut self.ended;
        self.removed.retain(|account| {
            let is_used = Arc::strong_count(account) > 1;
            if !is_used {
                *ended += account.stats.read();
            }
            is_used
        });
    }

    /// The counters of each account by name, and the sum of all accounts that ever existed.
    pub(crate) fn read(&mut self) -> (HashMap<Arc<str>, ServiceStats>, ServiceStats) {
        self.collect();
        let mut totals = self.ended;
        self.removed.iter().for_each(|account| totals += account.stats.read());
        let of = |(name, account): (&Arc<str>, &Arc<Account>)| (Arc::clone(name), account.stats.read());
        let read: HashMap<Arc<str>, ServiceStats> = self.by_name.iter().map(of).collect();
        read.values().for_each(|stats| totals += *stats);
        (read, totals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_keep_the_counts_of_removed_accounts() {
        let mut accounts = Accounts::default();
        let account = accounts.get(&"default/web".into());
        account.stats.accepted.add(3);
        accounts.remove("default/web");
        accounts.remove("default/web");
        account.stats.accepted.add(1);
        let accepted = |accounts: &mut Accounts| accounts.read().1.accepted;
        assert_eq!(accepted(&mut accounts), 4, "an open connection still counts");
        drop(account);
        assert_eq!((accepted(&mut accounts), accounts.removed.len()), (4, 0));
        for number in 0..1000 {
            let name = format!("default/{number}").into();
            accounts.get(&name).stats.accepted.add(1);
            accounts.remove(&name);
        }
        assert!(accounts.removed.len() < 64, "removed accounts do not pile up: {}", accounts.removed.len());
        assert_eq!(accepted(&mut accounts), 1004);
    }

    #[test]
    fn an_account_leaves_places_to_the_others() {
        let mut accounts = Accounts::default();
        let (loud, quiet) = (accounts.get(&"loud".into()), accounts.get(&"quiet".into()));
        let free = |most: u64| most - loud.stats.open.get() - quiet.stats.open.get();
        assert_eq!((0..2000).filter(|_| loud.open(free(900))).count(), 800);
        assert_eq!(loud.stats.over_share.get(), 1200);
        let served = (0..2000).filter(|_| quiet.open(free(900))).count();
        assert_eq!((served, free(900)), (89, 11));
        assert!(!loud.open(1) && accounts.get(&"third".into()).open(1), "the last place is free for a third");
    }
}
