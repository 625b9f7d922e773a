//! `conntrack`: the cost of finding and deleting 1,000 stale UDP flows among a million entries of
//! the connection tracking table, compared with one listing of the whole table.
//!
//! The bench creates the entries over netlink in a new namespace. The limit of entries is a setting
//! of the whole machine. The bench raises this limit while it runs.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, Protocol, Service, ServiceKey, ServicePort, State,
    conntrack::{Cleanup, Tracker},
};
use headgate_netlink::{BATCH_REQUESTS, Connection, Request, attributes};
use headgate_node_agent::observers::conntrack::{
    NodeAddresses, Swept, sweep,
    wire::{
        self, DESTINATION_PORT, MESSAGE_NEW, PROTOCOL_NUMBER, SOURCE_PORT, TUPLE_IP, TUPLE_ORIGINAL, TUPLE_PROTOCOL,
        TUPLE_REPLY, put_address,
    },
};

use super::{
    clock::{thread_cpu, wall_ms},
    report::{Figure, median},
};
use crate::testbed::Namespace;

const ENTRIES: u32 = 1_000_000;
const STALE: u32 = 1_000;
const RUNS: u32 = 3;
const MAX_SETTING: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// `NLM_F_CREATE | NLM_F_EXCL`.
const CREATE: u16 = 0x400 | 0x200;
const TIMEOUT: u16 = 7;
const STATUS: u16 = 3;
/// `IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED | IPS_SRC_NAT_DONE | IPS_DST_NAT_DONE`.
const ESTABLISHED: u32 = 0x18e;
/// A time-out that is long enough for all entries to outlive the bench.
const TIMEOUT_SECONDS: u32 = 3600;

/// An entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// The IP protocol number.
    pub protocol: u8,
    /// The client.
    pub client: SocketAddr,
    /// The client's destination.
    pub to: SocketAddr,
    /// The server that answers, which is the destination after translation.
    pub answered_by: SocketAddr,
}

impl Flow {
    fn insertion(self) -> Request {
        let family = Family::of(self.to.ip());
        let tuple = move |from: SocketAddr, to: SocketAddr| {
            move |tuple: Request| {
                let ip = move |ip: Request| {
                    let ip = put_address(ip, wire::source_address(family), from.ip());
                    put_address(ip, wire::destination_address(family), to.ip())
                };
                tuple.nested(TUPLE_IP, ip).nested(TUPLE_PROTOCOL, move |part| {
                    part.attribute(PROTOCOL_NUMBER, &[self.protocol])
                        .attribute(SOURCE_PORT, &from.port().to_be_bytes())
                        .attribute(DESTINATION_PORT, &to.port().to_be_bytes())
                })
            }
        };
        Request::new(MESSAGE_NEW, CREATE, &wire::header(family))
            .nested(TUPLE_ORIGINAL, tuple(self.client, self.to))
            .nested(TUPLE_REPLY, tuple(self.answered_by, self.client))
            .attribute(TIMEOUT, &TIMEOUT_SECONDS.to_be_bytes())
            .attribute(STATUS, &ESTABLISHED.to_be_bytes())
    }
}

/// Creates entries in the namespace of the calling thread.
///
/// # Errors
/// The kernel refuses an entry.
pub fn insert(flows: impl IntoIterator<Item = Flow>) -> Result<()> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    let mut flows = flows.into_iter().peekable();
    while flows.peek().is_some() {
        let batch: Vec<Request> = flows.by_ref().take(BATCH_REQUESTS).map(Flow::insertion).collect();
        let mut refusal = None;
        connection.execute(batch, |_, error| refusal = Some(error))?;
        if let Some(error) = refusal {
            return Err(error).context("creating an entry of the connection tracking table");
        }
    }
    Ok(())
}

/// All TCP, UDP and SCTP entries of a family in the namespace of the calling thread.
///
/// # Errors
/// The kernel does not list the entries.
pub fn entries(family: Family) -> Result<BTreeSet<Flow>> {
    let mut found = BTreeSet::new();
    list_all(family, |payload| found.extend(parse(payload)))?;
    Ok(found)
}

fn list_all(family: Family, mut each: impl FnMut(&[u8])) -> Result<()> {
    let request = Request::new(MESSAGE_NEW | 1, 0x300, &wire::header(family));
    Connection::open(libc::NETLINK_NETFILTER)?.dump(request, |_, payload| each(payload))?;
    Ok(())
}

fn parse(payload: &[u8]) -> Option<Flow> {
    let part = |kind: u16| attributes(payload.get(4..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    let (protocol, client, to) = tuple(part(TUPLE_ORIGINAL)?)?;
    let (_, answered_by, _) = tuple(part(TUPLE_REPLY)?)?;
    Some(Flow { protocol, client, to, answered_by })
}

fn tuple(bytes: &[u8]) -> Option<(u8, SocketAddr, SocketAddr)> {
    let of = |part: u16, kinds: &[u16]| {
        let (_, nested) = attributes(bytes).find(|(found, _)| *found == part)?;
        attributes(nested).find(|(found, _)| kinds.contains(found)).map(|(_, value)| value)
    };
    let address = |kinds: &[u16]| {
        let value = of(TUPLE_IP, kinds)?;
        let v4 = <[u8; 4]>::try_from(value).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
    };
    let port = |kind: u16| Some(u16::from_be_bytes(of(TUPLE_PROTOCOL, &[kind])?.try_into().ok()?));
    let source = SocketAddr::new(address(&[1, 3])?, port(SOURCE_PORT)?);
    let destination = SocketAddr::new(address(&[2, 4])?, port(DESTINATION_PORT)?);
    Some((*of(TUPLE_PROTOCOL, &[PROTOCOL_NUMBER])?.first()?, source, destination))
}

fn service_address() -> SocketAddr {
    SocketAddr::from(([10, 96, 0, 10], 53))
}

fn endpoint_address(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 244, 0, last], 5353))
}

/// The cleanups that the tracker plans in two cases. In the first case, one of ten endpoints is
/// removed. In the second case, the tracker is new and does not know the earlier endpoints of the
/// Service.
fn cleanups() -> Result<(Cleanup, Cleanup)> {
    let key = ServiceKey::new("kube-system", "dns");
    let udp = Protocol::Udp;
    let port = ServicePort { name: "dns".into(), protocol: udp, port: service_address().port(), node_port: 0 };
    let service = Service::new(key.clone(), vec![service_address().ip()], vec![port]);
    let (mut state, mut dirty, mut tracker) = (State::default(), Dirty::default(), Tracker::default());
    let endpoint = |last: u8| {
        let port = EndpointPort::new("dns", udp, endpoint_address(last).port());
        Change::Endpoint(key.clone(), Endpoint::new(endpoint_address(last).ip(), [port].into()))
    };
    state.apply(Change::from(service), &mut dirty);
    for last in 2..=11 {
        state.apply(endpoint(last), &mut dirty);
    }
    let plan = tracker.plan(&state, &dirty.services);
    drop(tracker.commit(plan));
    state.apply(Change::RemoveEndpoint(key.clone(), endpoint_address(2).ip()), &mut dirty);
    let plan = tracker.plan(&state, &dirty.services);
    let replaced = tracker.commit(plan);
    let unknown = Tracker::default().plan(&state, &dirty.services).cleanup;
    Ok((replaced, unknown))
}

/// Flows to other Services, which must not be deleted. One flow in ten is UDP, and the others are
/// TCP.
fn others(count: u32) -> impl Iterator<Item = Flow> {
    (0..count).map(|i| {
        let [_, high, middle, low] = i.to_be_bytes();
        let client = SocketAddr::from(([172, 16 + high, middle, low], 20_000));
        let to = SocketAddr::from(([10, 96, 1, low], 80));
        let answered_by = SocketAddr::from(([10, 245, middle, low], 8080));
        Flow { protocol: if i % 10 == 0 { 17 } else { 6 }, client, to, answered_by }
    })
}

/// UDP flows to the Service. The removed endpoint answers these flows.
fn stale(count: u32, run: u32) -> impl Iterator<Item = Flow> {
    (0..count).map(move |i| {
        let [_, _, middle, low] = i.to_be_bytes();
        let client =
            SocketAddr::from((Ipv4Addr::new(172, 32 + u8::try_from(run % 64).unwrap_or(0), middle, low), 30_000));
        Flow { protocol: 17, client, to: service_address(), answered_by: endpoint_address(2) }
    })
}

/// Runs the bench.
///
/// # Errors
/// A namespace cannot be created, the setting cannot be raised, or a stale flow is not deleted.
pub fn run() -> Result<Vec<Figure>> {
    let _raised = Raised::to(ENTRIES + 10 * STALE)?;
    let namespace = Namespace::create(format!("hg{}-bench-conntrack", std::process::id()))?;
    namespace.run(measure)
}

fn measure() -> Result<Vec<Figure>> {
    let (replaced, unknown) = cleanups()?;
    let (insert_ms, inserted) = wall_ms(|| insert(others(ENTRIES)));
    inserted?;
    let mut figures = vec![Figure::alone("conntrack/insert", insert_ms, "ms")];
    let (mut all_ms, mut all_cpu_ms) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let mut listed = 0_u32;
        let (ms, cpu_ms, result) = timed(|| list_all(Family::V4, |_| listed += 1));
        result?;
        ensure!(listed >= ENTRIES, "the kernel listed {listed} entries, fewer than {ENTRIES}");
        all_ms.push(ms);
        all_cpu_ms.push(cpu_ms);
    }
    let (all_ms, all_cpu_ms) = (median(all_ms), median(all_cpu_ms));
    for (name, cleanup) in [("endpoint-removed", &replaced), ("past-unknown", &unknown)] {
        let (mut times, mut cpu_times) = (Vec::new(), Vec::new());
        for run in 0..RUNS {
            insert(stale(STALE, run))?;
            let mut swept = Swept::default();
            let (ms, cpu_ms, result) = timed(|| sweep(cleanup, Family::V4, &NodeAddresses::default(), &mut swept));
            result?;
            ensure!(swept.deleted == u64::from(STALE), "{swept:?}: expected {STALE} deleted flows");
            times.push(ms);
            cpu_times.push(cpu_ms);
        }
        let beside = "one listing of the whole table";
        figures.push(Figure::against(format!("conntrack/{name}/wall"), median(times), "ms", beside, all_ms));
        figures.push(Figure::against(format!("conntrack/{name}/cpu"), median(cpu_times), "ms", beside, all_cpu_ms));
    }
    Ok(figures)
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, f64, T) {
    let cpu = thread_cpu();
    let (ms, result) = wall_ms(work);
    (ms, (thread_cpu().saturating_sub(cpu)).as_secs_f64() * 1e3, result)
}

/// Raises the machine's limit of entries. Dropping this value restores the limit.
struct Raised {
    before: String,
}

impl Raised {
    fn to(entries: u32) -> Result<Self> {
        let before = fs::read_to_string(MAX_SETTING).with_context(|| format!("reading {MAX_SETTING}"))?;
        fs::write(MAX_SETTING, entries.to_string()).with_context(|| format!("writing {MAX_SETTING}"))?;
        Ok(Self { before })
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if let Err(error) = fs::write(MAX_SETTING, self.before.trim()) {
            eprintln!("warning: {MAX_SETTING} cannot be restored: {error}");
        }
    }
}
