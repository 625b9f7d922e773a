//! Measures bare writes: the lowest possible cost of sending a message to many agents on this
//! machine. One thread writes a message to each of many plain sockets, and another thread reads the
//! messages, without TLS, HTTP/2, state and answers. Benches compare a replica with bare writes,
//! because the speed of a machine differs from the speed of other machines and changes over time.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Socket, Type};

use super::{
    latency::Histogram,
    rig::{CpuTime, LOAD_CORE, Machines, SERVER_CORE, pin_this_thread},
};
use crate::bench::clock::thread_cpu;

/// The TCP payload of one endpoint's change: a message of 38 bytes, and 5 bytes for gRPC, 9 for
/// HTTP/2 and 22 for TLS 1.3.
const MESSAGE_BYTES: usize = 74;
/// The time limit for one write and for the wait for the next bytes.
const PATIENCE: Duration = Duration::from_secs(30);

/// The cost of bare writes.
#[derive(Debug, Clone)]
pub struct BareWrites {
    /// CPU time of the writing thread for one write, in microseconds.
    pub cpu_us: f64,
    /// CPU time for one write including interrupts on the writer's core, in microseconds.
    pub cpu_with_interrupts_us: f64,
    /// The times from the start of a round until the reader has received a message of the round, in
    /// microseconds.
    pub latency: Histogram,
    /// The times from the start of a round until the reader has received all messages of the round,
    /// in microseconds.
    pub last: Histogram,
}

/// Writes `rounds` messages to each connection, `rate` rounds a second. The writer uses the
/// replicas' machine and core. The reader uses the agents' machine and core.
///
/// # Errors
/// The connections cannot be opened, or not all messages arrive.
pub fn measure(machines: &Machines, connections: usize, rounds: u32, rate: u32) -> Result<BareWrites> {
    let (written, read) = connect(machines, connections)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || read_all(read, rounds, rate, start));
        let writer = scope.spawn(|| write_all(&written, rounds, rate, start));
        let writer = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (latency, last) = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let (cpu, with_interrupts) = writer?;
        let each = |seconds: f64| seconds * 1e6 / (connections as f64 * f64::from(rounds));
        Ok(BareWrites { cpu_us: each(cpu), cpu_with_interrupts_us: each(with_interrupts), latency, last })
    })
}

/// Opens the connections. Returns the writer's ends and the reader's ends, in the same order.
fn connect(machines: &Machines, connections: usize) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let listener = machines.server().run(|| Ok(TcpListener::bind((machines.server_address(), 0))?))?;
    let to = listener.local_addr()?;
    machines.agents().run(|| {
        let mut ends = (Vec::with_capacity(connections), Vec::with_capacity(connections));
        for number in 0..connections {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            socket.bind(&SocketAddr::new(machines.host(number), 0).into())?;
            socket.connect_timeout(&to.into(), PATIENCE).context("connecting a plain socket")?;
            let (written, from) = listener.accept()?;
            let read = TcpStream::from(socket);
            ensure!(read.local_addr()? == from, "another program connected: {from}");
            written.set_nodelay(true)?;
            written.set_write_timeout(Some(PATIENCE))?;
            read.set_nonblocking(true)?;
            ends.0.push(written);
            ends.1.push(read);
        }
        Ok(ends)
    })
}

/// The time at which a round begins.
fn begins(start: Instant, round: u32, rate: u32) -> Instant {
    start + Duration::from_secs(1) * (round + 1) / rate
}

/// Writes all messages. Returns two CPU times of this thread in seconds: the first without and the
/// second with the interrupts on the thread's core.
fn write_all(streams: &[TcpStream], rounds: u32, rate: u32, start: Instant) -> Result<(f64, f64)> {
    pin_this_thread(SERVER_CORE)?;
    let (cpu, core) = (thread_cpu(), CpuTime::of_core(SERVER_CORE)?);
    for round in 0..rounds {
        std::thread::sleep(begins(start, round, rate).saturating_duration_since(Instant::now()));
        for mut stream in streams {
            stream.write_all(&[0; MESSAGE_BYTES]).context("writing to a plain socket")?;
        }
    }
    let core = CpuTime::of_core(SERVER_CORE)?.since(&core);
    let cpu = (thread_cpu() - cpu).as_secs_f64();
    Ok((cpu, core.with_interrupts(cpu)))
}

/// Reads all messages. Returns the latencies of all messages, and those of the last message of each
/// round.
fn read_all(streams: Vec<TcpStream>, rounds: u32, rate: u32, start: Instant) -> Result<(Histogram, Histogram)> {
    pin_this_thread(LOAD_CORE)?;
    let mut poll = Poll::new().context("creating an epoll instance")?;
    let mut streams: Vec<_> = streams.into_iter().map(|stream| (mio::net::TcpStream::from_std(stream), 0)).collect();
    for (index, (stream, _)) in streams.iter_mut().enumerate() {
        poll.registry().register(stream, Token(index), Interest::READABLE)?;
    }
    let (mut events, mut buffer) = (Events::with_capacity(1024), [0; 4096]);
    let (mut latency, mut last) = (Histogram::default(), vec![0; rounds as usize]);
    let mut missing = streams.len() * rounds as usize;
    while missing > 0 {
        poll.poll(&mut events, Some(PATIENCE))?;
        if events.is_empty() {
            bail!("{missing} messages to plain sockets did not arrive");
        }
        for event in &events {
            let (stream, had) = &mut streams[event.token().0];
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => bail!("a plain socket was closed too early"),
                    Ok(length) => {
                        let now = Instant::now();
                        let before = *had / MESSAGE_BYTES;
                        *had += length;
                        for round in before..*had / MESSAGE_BYTES {
                            let last = last.get_mut(round).context("more messages arrived than were written")?;
                            let taken = now.saturating_duration_since(begins(start, u32::try_from(round)?, rate));
                            let taken = u64::try_from(taken.as_micros()).unwrap_or(u64::MAX);
                            latency.record(taken);
                            *last = taken.max(*last);
                            missing -= 1;
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("reading a plain socket"),
                }
            }
        }
    }
    let mut lasts = Histogram::default();
    last.into_iter().for_each(|taken| lasts.record(taken));
    Ok((latency, lasts))
}
