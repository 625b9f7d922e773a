//! Counts of open connections and similar things, in all and by key, for limits.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// How many things count, in all and by key.
#[derive(Debug)]
pub(crate) struct Tally<K>(Mutex<(usize, HashMap<K, usize>)>);

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// One thing that counts until this value is dropped.
#[derive(Debug)]
pub(crate) struct Counted<K: Hash + Eq> {
    tally: Arc<Tally<K>>,
    key: K,
}

impl<K: Hash + Eq + Clone> Tally<K> {
    /// Counts one more of `key`. `may` receives the present numbers in all and of the key.
    ///
    /// # Errors
    ///
    /// The error of `may`; then nothing is counted.
    pub(crate) fn add<E>(
        self: &Arc<Self>,
        key: K,
        may: impl FnOnce(usize, usize) -> Result<(), E>,
    ) -> Result<Counted<K>, E> {
        let mut numbers = self.numbers();
        let (all, by_key) = &mut *numbers;
        may(*all, by_key.get(&key).copied().unwrap_or_default())?;
        *all += 1;
        *by_key.entry(key.clone()).or_default() += 1;
        Ok(Counted { tally: Arc::clone(self), key })
    }

    /// Returns the numbers in all and of a key.
    pub(crate) fn count(&self, key: &K) -> (usize, usize) {
        let (all, by_key) = &*self.numbers();
        (*all, by_key.get(key).copied().unwrap_or_default())
    }
}

impl<K> Tally<K> {
    /// Returns the number in all.
    pub(crate) fn all(&self) -> usize {
        self.numbers().0
    }

    fn numbers(&self) -> MutexGuard<'_, (usize, HashMap<K, usize>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq> Drop for Counted<K> {
    fn drop(&mut self) {
        let (all, by_key) = &mut *self.tally.numbers();
        *all -= 1;
        if let Some(count) = by_key.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                by_key.remove(&self.key);
            }
        }
    }
}
