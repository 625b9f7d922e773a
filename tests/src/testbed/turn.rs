//! Serialises series of requests to one target.
//!
//! IPVS's scheduler `rr` assigns connections to the endpoints in a fixed rotation. If two clients
//! alternate their requests, each client sees only every second endpoint: two of four. Such an
//! alternation rarely happens by chance, but on a machine with one CPU the threads may alternate
//! for a long time. Therefore only one series at a time may send requests to a target. The tests
//! follow this rule for every backend, so that all backends receive equal requests.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::client::{Request, Transport};

/// Protocol, address and port of a virtual server. Every node has its own virtual server for a
/// target, so clients of different nodes do not disturb each other. Clients of different nodes
/// still wait for each other, which costs little time.
type Target = (Transport, SocketAddr);

static TARGETS: LazyLock<Mutex<HashMap<Target, Arc<Mutex<()>>>>> = LazyLock::new(Mutex::default);

/// Runs `ask` while no other call runs for the target of `request`.
pub fn in_turn<T>(request: &Request, ask: impl FnOnce() -> T) -> T {
    let protocol = if request.transport == Transport::Http { Transport::Tcp } else { request.transport };
    let turn = {
        let mut targets = TARGETS.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(targets.entry((protocol, request.to)).or_default())
    };
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    ask()
}

/// Calls `ask`, and then pauses for `shortest`, or for as long as all `clients` clients need for
/// such a call one after the other. On a machine with one slow CPU, clients that repeat their
/// requests would otherwise leave little time to the programs under test.
pub(crate) fn ask_and_pause<T>(clients: usize, shortest: Duration, ask: impl FnOnce() -> T) -> T {
    let asked = Instant::now();
    let result = ask();
    let all_clients = asked.elapsed() * u32::try_from(clients).unwrap_or(u32::MAX);
    std::thread::sleep(all_clients.clamp(shortest, LONGEST_PAUSE.max(shortest)));
    result
}

/// Pauses do not grow with long waits for an answer.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
