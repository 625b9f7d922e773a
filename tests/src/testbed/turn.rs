//! Clients that ask the same target take turns.
//!
//! Scheduler `rr` hands a virtual server's connections out one endpoint after the other. Two
//! clients that ask it at once, each as fast as it is answered, may fall into step: with four
//! endpoints each client then gets every second one, as often as it asks, and sees two endpoints
//! although all four take their turns. By chance that happens rarely, and on a machine with one
//! CPU, which lets threads run in a fixed order, it lasts. A series of requests that is to show who
//! answers has its target for itself, therefore. All backends do the same, so that what is asked of
//! them does not differ.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::client::{Request, Transport};

/// A target as a virtual server knows it. Clients of several nodes ask several virtual servers of
/// the same name, and wait for each other as well, which costs little.
type Target = (Transport, SocketAddr);

static TARGETS: LazyLock<Mutex<HashMap<Target, Arc<Mutex<()>>>>> = LazyLock::new(Mutex::default);

/// Runs `ask`, which asks the target of `request`, while nobody else does so.
pub fn in_turn<T>(request: &Request, ask: impl FnOnce() -> T) -> T {
    let protocol = if request.transport == Transport::Http { Transport::Tcp } else { request.transport };
    let turn = {
        let mut targets = TARGETS.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(targets.entry((protocol, request.to)).or_default())
    };
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    ask()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_target_is_asked_by_one_client_at_a_time_and_another_beside_it() {
        let to = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for transport in [Transport::Tcp, Transport::Http, Transport::Tcp, Transport::Http] {
                let (inside, most) = (&inside, &most);
                scope.spawn(move || {
                    for _ in 0..200 {
                        in_turn(&Request::new(transport, to(80)), || {
                            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
        // Others are free meanwhile: with one lock for all, this would not end.
        let others = [(Transport::Udp, 80), (Transport::Tcp, 81)];
        let asked = in_turn(&Request::new(Transport::Tcp, to(80)), || {
            others.map(|(transport, port)| in_turn(&Request::new(transport, to(port)), || port))
        });
        assert_eq!(asked, [80, 81]);
    }
}
