//! Property tests: two simulated peers, a simulated kernel with edge-triggered events, and every
//! order of what they do.

use super::*;
use proptest::prelude::*;

/// What a peer does, or what the kernel announces, in one step.
#[derive(Debug, Clone, Copy)]
enum Step {
    Send(Side, u8),
    Fin(Side),
    Rst(Side),
    Read(Side, u8),
    /// The caller handles all announced events.
    Run,
    Expire,
}

/// A socket of the proxy with its peer.
#[derive(Debug, Default)]
struct Socket {
    /// Bytes from the peer that the proxy has not taken, each with its number.
    incoming: std::collections::VecDeque<u32>,
    sent: u32,
    has_fin: bool,
    has_rst: bool,
    /// Bytes for the peer in the send buffer.
    outgoing: Vec<u32>,
    /// Everything that the peer has read.
    received: Vec<u32>,
    got_fin: bool,
    is_readable: bool,
    is_writable: bool,
    /// The writer met a full buffer, so that space is announced.
    wants_space: bool,
}

const BUFFER: usize = 300;

struct World {
    relay: Relay,
    sockets: [Socket; 2],
    held: [Vec<u32>; 2],
    chunk: usize,
    /// Whether a short read counts as the end of the bytes for now.
    is_short_read_empty: bool,
    end: Option<End>,
}

impl World {
    fn new(chunk: usize, is_short_read_empty: bool) -> Self {
        let sockets = [(), ()].map(|()| Socket { is_writable: true, ..Socket::default() });
        Self { relay: Relay::default(), sockets, held: Default::default(), chunk, is_short_read_empty, end: None }
    }

    fn after(steps: Vec<Step>, chunk: usize, is_short_read_empty: bool) -> Self {
        let mut world = Self::new(chunk, is_short_read_empty);
        steps.into_iter().for_each(|step| world.step(step));
        world
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send(side, count) => {
                let socket = &mut self.sockets[side as usize];
                if !socket.has_fin && !socket.has_rst {
                    socket.incoming.extend(socket.sent..socket.sent + u32::from(count));
                    socket.sent += u32::from(count);
                    socket.is_readable = true;
                }
            }
            Step::Fin(side) => {
                self.sockets[side as usize].has_fin = true;
                self.sockets[side as usize].is_readable = true;
            }
            Step::Rst(side) => {
                let socket = &mut self.sockets[side as usize];
                socket.has_rst = true;
                socket.outgoing.clear();
                (socket.is_readable, socket.is_writable) = (true, true);
            }
            Step::Read(side, count) => {
                let socket = &mut self.sockets[side as usize];
                let count = usize::from(count).min(socket.outgoing.len());
                socket.received.extend(socket.outgoing.drain(..count));
                if count > 0 && socket.wants_space {
                    socket.is_writable = true;
                    socket.wants_space = false;
                }
            }
            Step::Run => self.run(),
            Step::Expire => self.relay.expire(),
        }
    }

    fn run(&mut self) {
        for side in Side::BOTH {
            let socket = &mut self.sockets[side as usize];
            if socket.has_rst {
                self.relay.failed(side);
            }
            if std::mem::take(&mut socket.is_readable) {
                self.relay.readable(side);
            }
            if std::mem::take(&mut socket.is_writable) {
                self.relay.writable(side);
            }
        }
        // Each action moves bytes, ends a half, or clears a flag, so that their number is bounded.
        let waiting: usize = self.sockets.iter().map(|socket| socket.incoming.len()).sum();
        let mut actions_left = 4 * (waiting + BUFFER * 2) + 40;
        while self.end.is_none() {
            actions_left = actions_left.checked_sub(1).expect("the machine repeats actions without progress");
            let action = self.relay.next();
            match action {
                Action::Wait => break,
                Action::Finish(end) => {
                    self.end = Some(end);
                    assert_eq!(self.relay.next(), action, "a finished machine gives no other action");
                }
                Action::Shut(to) => {
                    let socket = &mut self.sockets[to as usize];
                    assert!(!socket.got_fin, "FIN was sent twice");
                    assert!(self.held[to.other() as usize].is_empty(), "FIN overtook bytes");
                    let failed = socket.has_rst;
                    socket.got_fin = !failed;
                    let sink = if failed { SinkState::Failed } else { SinkState::Ready };
                    self.relay.done(action, Moved { sink, ..Moved::default() });
                }
                Action::Carry(from) => {
                    let moved = self.carry(from);
                    self.relay.done(action, moved);
                }
                Action::Flush(from) => {
                    assert!(!self.held[from as usize].is_empty(), "nothing to flush");
                    let (given, sink) = self.give(from);
                    self.relay.done(action, Moved { given, sink, ..Moved::default() });
                }
            }
            for from in Side::BOTH {
                // Bytes for a failed sink are dropped.
                if self.relay.held_bytes(from) == 0 {
                    self.held[from as usize].clear();
                }
                assert_eq!(self.relay.held_bytes(from) as usize, self.held[from as usize].len());
            }
        }
    }

    fn carry(&mut self, from: Side) -> Moved {
        assert!(self.held[from as usize].is_empty(), "bytes were taken while others wait");
        let socket = &mut self.sockets[from as usize];
        let count = self.chunk.min(socket.incoming.len());
        let ending = socket.has_fin || socket.has_rst;
        if count == 0 {
            let source = match (socket.has_rst, socket.has_fin) {
                (true, _) => SourceState::Failed,
                (false, true) => SourceState::Ended,
                (false, false) => SourceState::Empty,
            };
            return Moved { source, ..Moved::default() };
        }
        self.held[from as usize].extend(socket.incoming.drain(..count));
        let is_short = count < self.chunk && self.is_short_read_empty && !ending;
        let source = if is_short { SourceState::Empty } else { SourceState::Ready };
        let (given, sink) = self.give(from);
        Moved { taken: u32::try_from(count).unwrap(), given, source, sink }
    }

    /// Gives held bytes to the sink.
    fn give(&mut self, from: Side) -> (u32, SinkState) {
        let sink = &mut self.sockets[from.other() as usize];
        assert!(!sink.got_fin, "bytes follow a FIN");
        if sink.has_rst {
            return (0, SinkState::Failed);
        }
        let held = &mut self.held[from as usize];
        let count = held.len().min(BUFFER - sink.outgoing.len());
        sink.outgoing.extend(held.drain(..count));
        let is_full = !held.is_empty();
        sink.wants_space |= is_full;
        (u32::try_from(count).unwrap(), if is_full { SinkState::Full } else { SinkState::Ready })
    }

    fn read_all(&mut self) {
        for _ in 0..200 {
            for side in Side::BOTH {
                self.step(Step::Read(side, 255));
            }
            self.run();
        }
    }
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Client), Just(Side::Endpoint)]
}

fn steps(with_failures: bool) -> impl Strategy<Value = Vec<Step>> {
    let failures = if with_failures { 1 } else { 0 };
    let step = prop_oneof![
        8 => (side(), any::<u8>()).prop_map(|(side, count)| Step::Send(side, count)),
        8 => (side(), any::<u8>()).prop_map(|(side, count)| Step::Read(side, count)),
        12 => Just(Step::Run),
        1 => side().prop_map(Step::Fin),
        failures => side().prop_map(Step::Rst),
        failures => Just(Step::Expire),
    ];
    proptest::collection::vec(step, 0..60)
}

fn in_order(bytes: &[u32]) -> bool {
    bytes.iter().enumerate().all(|(index, byte)| index == *byte as usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn without_failures_every_byte_arrives_once_and_the_connection_closes(
        steps in steps(false), chunk in 1_usize..500, is_short_read_empty: bool,
    ) {
        let mut world = World::after(steps, chunk, is_short_read_empty);
        world.read_all();
        for side in Side::BOTH {
            let (from, to) = (&world.sockets[side as usize], &world.sockets[side.other() as usize]);
            prop_assert!(in_order(&to.received));
            prop_assert_eq!(to.received.len(), from.sent as usize, "bytes are missing before the FIN");
            prop_assert_eq!(to.got_fin, from.has_fin, "a FIN passes on, and only a FIN of the source");
            world.step(Step::Fin(side));
        }
        world.read_all();
        prop_assert_eq!(world.end, Some(End::Closed));
        for side in Side::BOTH {
            prop_assert!(world.sockets[side as usize].got_fin);
        }
    }

    #[test]
    fn bytes_before_a_reset_arrive_and_both_sides_are_reset(
        steps in steps(false), chunk in 1_usize..500, is_short_read_empty: bool, failing in side(),
    ) {
        let mut world = World::after(steps, chunk, is_short_read_empty);
        let was_finished = world.end.is_some();
        world.step(Step::Rst(failing));
        world.read_all();
        let (from, to) = (&world.sockets[failing as usize], &world.sockets[failing.other() as usize]);
        prop_assert!(in_order(&to.received));
        prop_assert_eq!(to.received.len(), from.sent as usize, "the answer before the RST is lost");
        prop_assert!(world.end == Some(End::Reset) || was_finished || (from.got_fin && to.got_fin));
        prop_assert!(world.end.is_some());
    }

    #[test]
    fn no_order_of_failures_repeats_or_reorders_bytes_or_keeps_a_connection(
        steps in steps(true), chunk in 1_usize..500, is_short_read_empty: bool, last in side(),
    ) {
        let mut world = World::after(steps, chunk, is_short_read_empty);
        world.read_all();
        world.step(Step::Rst(last));
        world.read_all();
        for side in Side::BOTH {
            let (from, to) = (&world.sockets[side as usize], &world.sockets[side.other() as usize]);
            prop_assert!(in_order(&to.received));
            prop_assert!(to.received.len() <= from.sent as usize);
        }
        prop_assert!(world.end.is_some(), "a failed connection ends");
        prop_assert!(world.end != Some(End::Closed) || world.sockets.iter().all(|socket| socket.got_fin));
    }
}

#[test]
fn an_idle_connection_waits_and_an_expired_connection_resets() {
    let mut world = World::new(64, true);
    world.run();
    assert_eq!(world.relay.next(), Action::Wait);
    world.step(Step::Expire);
    world.run();
    assert_eq!(world.end, Some(End::Reset));
}
