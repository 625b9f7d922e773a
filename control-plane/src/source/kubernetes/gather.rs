//! Gathers updates that follow one another closely, so that they are committed together.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

/// Upper bound of the updates in one commit.
const MAX_TOGETHER: usize = 4_096;

/// Updates that arrive within this time of one another are committed together, because a Service
/// and its slices change together.
const LINGER: Duration = Duration::from_millis(1);

/// The longest time that an update waits for further updates. After a pause of this length, the
/// next update does not wait.
const LONGEST_LINGER: Duration = Duration::from_millis(5);

/// Gathers the updates of one channel.
#[derive(Debug, Default)]
pub(super) struct Gatherer {
    /// When the last updates were returned.
    last: Option<Instant>,
}

impl Gatherer {
    /// Returns the first update, and the updates that follow it. After a pause, these are only the
    /// updates that have arrived already: an update in a quiet cluster reaches the nodes without a
    /// wait. During a burst, these are the updates that arrive within [`LINGER`] of one another.
    pub(super) async fn together<T>(&mut self, first: T, updates: &mut mpsc::Receiver<T>) -> Vec<T> {
        let mut batch = vec![first];
        let now = Instant::now();
        let is_burst = self.last.is_some_and(|last| now - last < LONGEST_LINGER);
        let until = if is_burst { now + LONGEST_LINGER } else { now };
        while batch.len() < MAX_TOGETHER {
            match updates.try_recv() {
                Ok(update) => batch.push(update),
                Err(_) if Instant::now() >= until => break,
                Err(_) => match timeout(LINGER, updates.recv()).await {
                    Ok(Some(update)) => batch.push(update),
                    Ok(None) | Err(_) => break,
                },
            }
        }
        self.last = Some(Instant::now());
        batch
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn an_update_after_a_pause_does_not_wait() {
        let (sender, mut updates) = mpsc::channel(8);
        let mut gatherer = Gatherer::default();
        sender.try_send(2).unwrap();
        let batch = gatherer.together(1, &mut updates).now_or_never();
        assert_eq!(batch, Some(vec![1, 2]), "updates that have arrived are committed together, at once");
        tokio::time::sleep(LONGEST_LINGER).await;
        assert_eq!(gatherer.together(3, &mut updates).now_or_never(), Some(vec![3]));
    }

    #[tokio::test]
    async fn updates_of_a_burst_are_gathered_for_a_bounded_time() {
        let (sender, mut updates) = mpsc::channel(8);
        let recently = || Gatherer { last: Some(Instant::now()) };
        assert!(recently().together(1, &mut updates).now_or_never().is_none(), "an update in a burst waits");
        let later = async {
            tokio::task::yield_now().await;
            sender.try_send(2).unwrap();
        };
        let mut gatherer = recently();
        let (batch, ()) = tokio::join!(gatherer.together(1, &mut updates), later);
        assert_eq!(batch, [1, 2]);

        let ending = tokio::spawn(async move {
            while sender.send(0).await.is_ok() {
                tokio::task::yield_now().await;
            }
        });
        let start = Instant::now();
        let batch = recently().together(1, &mut updates).await;
        let took = start.elapsed();
        assert!(took >= LONGEST_LINGER || batch.len() == MAX_TOGETHER, "{} updates after {took:?}", batch.len());
        assert!(batch.len() > 1);
        drop(updates);
        ending.await.unwrap();
    }
}
