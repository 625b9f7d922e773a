//! Active health checks of endpoints: sockets, timers and metrics.
//! [`headgate_core::endpoint_health`] decides when to check and what a result means. Failing
//! endpoints are in the node's facts, by which the reconcile loop programs their services, with
//! every dataplane.

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, io, net::SocketAddr, sync::Arc, time::Duration};

use futures::future::OptionFuture;
use headgate_core::{
    Family, NodeFacts, Protocol, Service, ServiceKey, State,
    endpoint_health::{Check, CheckTiming, FailingEndpoints, FairCheck, FairChecks, ServiceTargets},
    turns::Turns,
    view::views_of_all_endpoints,
};
use prometheus_client::metrics::{counter::Counter, family, gauge::Gauge};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::{Changes, Follower, Mailbox};
use crate::{
    metric_registry::{AGENT, Labels, metrics},
    state::{AgentState, Wake},
};

/// Maximum number of checks that run at a time. Further checks wait.
pub const MAX_RUNNING: usize = 256;
/// How many lines about a namespace's endpoints the log gets at once, and when it gets one more.
const LINES_AT_ONCE: u32 = 10;
const LINE_INTERVAL: Duration = Duration::from_secs(6);

/// Returns the observer that collects the endpoints to check, and the checker. The caller runs the
/// checker on the async runtime. `namespaces` are those in which Services may ask for checks:
/// names, or `*` for all.
pub fn new(
    namespaces: Vec<String>,
    timing: CheckTiming,
    shared: Arc<AgentState>,
    metrics: EndpointCheckMetrics,
) -> (Follower<Targets>, Checker) {
    let find = move |state: &State, key: &_, node: &_| targets(state, key, node, &namespaces);
    let (follower, mailbox) = Follower::new(Service::is_checked_by_tcp, find);
    let checks = FairChecks::new(timing, fastrand::u64(..), MAX_RUNNING);
    let (reported, started) = (FailingEndpoints::default(), Instant::now());
    let lines = Turns::new(LINE_INTERVAL, LINES_AT_ONCE);
    (follower, Checker { mailbox, shared, metrics, checks, reported, started, lines })
}

/// The endpoints to check, and why endpoints are left out.
type Targets = (ServiceTargets, Option<&'static str>);

/// Checks endpoints in the runtime's network namespace, at most [`MAX_RUNNING`] at a time.
#[derive(Debug)]
pub struct Checker {
    mailbox: Mailbox<Targets>,
    shared: Arc<AgentState>,
    metrics: EndpointCheckMetrics,
    checks: FairChecks,
    /// A copy of the failing endpoints in the node's facts. Only changes lock the state.
    reported: FailingEndpoints,
    started: Instant,
    /// The lines of the log about each namespace.
    lines: Turns<String>,
}

impl Checker {
    /// Checks the endpoints until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut running = JoinSet::new();
        loop {
            for check in self.checks.start(self.now_ms()) {
                running.spawn(async move { (check.clone(), connect(check.1).await) });
            }
            let due_at = self.checks.next_due_ms().map(|at_ms| self.started + Duration::from_millis(at_ms));
            let changed = tokio::select! {
                () = shutdown.cancelled() => return,
                changes = self.mailbox.take() => self.take(changes).await,
                Some(joined) = running.join_next(), if !running.is_empty() => match joined {
                    Ok((check, result)) => self.finish(&check, &result),
                    // The tasks do not panic, and nothing aborts them.
                    Err(_) => Vec::new(),
                },
                Some(()) = OptionFuture::from(due_at.map(sleep_until)) => Vec::new(),
            };
            self.report(changed).await;
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn take(&mut self, changes: Changes<Targets>) -> Vec<Arc<ServiceKey>> {
        let (now_ms, mut is_news, mut taken) = (self.now_ms(), false, Vec::new());
        for (key, wanted) in changes {
            let (wanted, left_out) = wanted.unzip();
            is_news |= self.shared.set_unchecked(&key, left_out.flatten());
            self.checks.set_service(&key, wanted, now_ms);
            taken.push(key);
        }
        if is_news {
            self.shared.blocking(|shared| shared.signal(Wake::Problems)).await;
        }
        taken
    }

    fn finish(&mut self, check: &FairCheck, result: &io::Result<()>) -> Vec<Arc<ServiceKey>> {
        let (outcome, label) = match result {
            Ok(()) => (Some(true), "passed"),
            Err(error) if is_local_error(error) => (None, "not_made"),
            Err(_) => (Some(false), "failed"),
        };
        let changed = self.checks.finish(check, outcome, self.now_ms());
        let (namespace, Check { address, .. }) = check;
        if !changed.is_empty() && self.lines.take(namespace.to_string(), Instant::now().into()).is_ok() {
            match result {
                Ok(()) => info!(%namespace, endpoint = %address, "an endpoint passes its health checks again"),
                Err(error) => {
                    info!(%namespace, endpoint = %address, %error, "an endpoint fails its health checks; it gets no new connections while other endpoints of its service pass");
                }
            }
        }
        self.metrics.checked(label);
        changed
    }

    /// Updates the metrics, and writes the failing endpoints of these services to the node's facts.
    async fn report(&mut self, changed: Vec<Arc<ServiceKey>>) {
        let (checked, failing) = self.checks.counts();
        self.metrics.counted(checked, failing);
        let mut news = Vec::new();
        for key in changed {
            let failing = self.checks.failing(&key);
            if self.reported.set(&key, failing.clone()) {
                news.push((key, failing));
            }
        }
        if !news.is_empty() {
            let change = |facts: &mut NodeFacts| {
                let changed = news.into_iter().filter(|(key, failing)| facts.failing.set(key, failing.clone()));
                changed.map(|(key, _)| key).collect()
            };
            self.shared.blocking(|shared| shared.change_facts(change)).await;
        }
    }
}

/// Makes one check: opens a TCP connection to the endpoint and closes it at once.
async fn connect(check: Check) -> io::Result<()> {
    let timeout = Duration::from_millis(check.timeout_ms.into());
    match tokio::time::timeout(timeout, TcpStream::connect(check.address)).await {
        Ok(connected) => connected.map(drop),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"))),
    }
}

/// True if the check failed for a reason on this machine, such as a lack of file descriptors. In
/// this case, it is unknown whether the endpoint works.
fn is_local_error(error: &io::Error) -> bool {
    let local = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT];
    error.raw_os_error().is_some_and(|code| local.contains(&code))
}

// The endpoints that this node checks.

/// Why a Service has fewer checks than it asks for, with the remedy.
const NOT_ALLOWED: &str = "no endpoint is checked of Services with the annotation headgate.io/health-check in namespaces that --health-check-namespaces does not name: add the namespaces to the flag, or remove the annotation";
const NOT_DIALLED: &str = "the node does not check some endpoints of Services with the annotation headgate.io/health-check, because their addresses are in no range of pods, or are addresses of the node or of metadata servers: if they are pods, add their range to --pod-ranges";
const TOO_MANY: &str = "the node checks only 1,000 endpoints of a Service with the annotation headgate.io/health-check, and the others count as passing: divide the Service, or remove the annotation";
/// The maximum number of endpoints of a Service that a node checks. [`TOO_MANY`] names it.
const MAX_TARGETS: usize = 1_000;

/// The endpoints of a service that this node has to check: the TCP endpoints that it may use, and
/// that its programs may connect to. `None` if there are no such endpoints. `namespaces` are those
/// in which services may ask for checks: names, or `*` for all. The cost depends only on the size
/// of this service.
fn targets(state: &State, key: &Arc<ServiceKey>, node: &NodeFacts, namespaces: &[String]) -> Option<Targets> {
    let service = state.entry(key)?.service()?;
    let views = Family::BOTH.into_iter().flat_map(|family| views_of_all_endpoints(state, key, family, node));
    let endpoints = views.filter(|view| view.protocol == Protocol::Tcp).flat_map(|view| view.reachable_endpoints());
    let mut addresses: BTreeSet<SocketAddr> = endpoints.map(|endpoint| endpoint.socket_address()).collect();
    let asked = addresses.len();
    let is_allowed = namespaces.iter().any(|name| name == "*" || *name == *key.namespace);
    addresses.retain(|address| is_allowed && node.dialled.permits(address.ip()));
    let refused = if is_allowed { NOT_DIALLED } else { NOT_ALLOWED };
    let mut shortage = (addresses.len() < asked).then_some(refused);
    if let Some(first_left_out) = addresses.iter().nth(MAX_TARGETS).copied() {
        addresses.split_off(&first_left_out);
        shortage = Some(TOO_MANY);
    }
    let interval_ms = Some(service.health_check_interval_ms).filter(|interval| *interval != 0);
    (asked > 0).then_some((ServiceTargets { interval_ms, addresses }, shortage))
}

metrics! {
    /// Metrics of endpoint checks.
    pub struct EndpointCheckMetrics {}
    AGENT {
        checks: family::Family<Labels<1>, Counter> = "endpoint_checks" ["result (passed, failed, not_made)"],
            "Active health checks of endpoints";
        checked: Gauge = "endpoints_checked",
            "Endpoints that are checked for services with the annotation headgate.io/health-check";
        failing: Gauge = "endpoints_failing",
            "Endpoints that fail their health checks. They get no new connections while other endpoints of their service pass";
    }
}

impl EndpointCheckMetrics {
    /// Counts a check that has ended: the endpoint accepted a connection (`passed`), refused it or
    /// did not answer in time (`failed`), or this machine could not make the check (`not_made`).
    pub(crate) fn checked(&self, result: &'static str) {
        self.checks.get_or_create(&[("result", result)]).inc();
    }

    pub(crate) fn counted(&self, checked: usize, failing: usize) {
        self.checked.set(i64::try_from(checked).unwrap_or(i64::MAX));
        self.failing.set(i64::try_from(failing).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod targets_tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{
        Change, Dirty, Endpoint, EndpointPort, Placement, Service, ServicePort, TrafficPolicy, addresses::DialPolicy,
        view::service_views,
    };

    use std::net::IpAddr;

    use super::*;

    fn state_with(service: Service, endpoints: &[(&str, &str)]) -> (State, Arc<ServiceKey>) {
        let (mut state, mut dirty) = (State::default(), Dirty::default());
        let key = Arc::new(service.key.clone());
        let ports: Arc<[EndpointPort]> = [("web", Protocol::Tcp, 8080), ("dns", Protocol::Udp, 53)]
            .map(|(name, protocol, port)| EndpointPort::new(name, protocol, port))
            .into();
        state.apply(Change::from(service), &mut dirty);
        for (address, node) in endpoints {
            let address: IpAddr = address.parse().unwrap();
            let endpoint =
                Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address, Arc::clone(&ports)) };
            state.apply(Change::Endpoint((*key).clone(), endpoint), &mut dirty);
        }
        (state, key)
    }

    fn service(health_check: &str) -> Service {
        let port = |name: &str, protocol, port| ServicePort { name: name.into(), protocol, port, node_port: 0 };
        let ports = vec![port("web", Protocol::Tcp, 80), port("dns", Protocol::Udp, 53)];
        let addresses = ["10.96.0.1", "fd00::1"].map(|address| address.parse().unwrap());
        let mut service = Service::new(ServiceKey::new("ns", "web"), addresses.to_vec(), ports);
        service.health_check = health_check.into();
        service
    }

    const ENDPOINTS: [(&str, &str); 4] =
        [("10.244.1.1", "node-a"), ("10.244.2.1", "node-b"), ("10.244.2.2", "node-b"), ("fd00:1::1", "node-b")];

    fn facts() -> NodeFacts {
        let ranges = ["10.244.0.0/16", "fd00:1::/64"].map(|range| range.parse().unwrap());
        let dialled = Arc::new(DialPolicy::new(ranges.to_vec(), ["10.244.2.2".parse().unwrap()]));
        NodeFacts { dialled, ..NodeFacts::named("node-a") }
    }

    #[test]
    fn a_node_checks_the_tcp_ports_that_it_uses_and_may_connect_to() {
        let node = facts();
        let targets_of = |service: Service| {
            let (state, key) = state_with(service, &ENDPOINTS);
            targets(&state, &key, &node, &["ns".to_owned()])
        };
        let texts = |addresses: &[&str]| addresses.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<_>>();
        let all = texts(&["10.244.1.1:8080", "10.244.2.1:8080", "[fd00:1::1]:8080"]);
        let expected = ServiceTargets { interval_ms: None, addresses: all };
        assert_eq!(targets_of(service("tcp")), Some((expected, Some(NOT_DIALLED))));
        let is_checked = |kind| service(kind).is_checked_by_tcp();
        assert!(is_checked("tcp") && !is_checked("") && !is_checked("http"), "an unknown kind of check is ignored");
        let mut local = service("tcp");
        (local.internal_traffic_policy, local.health_check_interval_ms) = (TrafficPolicy::Local, 700);
        // Endpoints on other nodes are not checked under policy Local.
        let expected = ServiceTargets { interval_ms: Some(700), addresses: texts(&["10.244.1.1:8080"]) };
        assert_eq!(targets_of(local), Some((expected, None)));
        let none = Arc::new(ServiceKey::new("ns", "none"));
        assert_eq!(targets(&State::default(), &none, &node, &["*".to_owned()]), None);
    }

    #[test]
    fn services_of_other_namespaces_and_endpoints_beyond_the_limit_are_left_out() {
        let node = facts();
        let (state, key) = state_with(service("tcp"), &ENDPOINTS);
        let count = |namespaces: &[&str]| {
            let namespaces: Vec<String> = namespaces.iter().map(|name| (*name).to_owned()).collect();
            let (found, reason) = targets(&state, &key, &node, &namespaces).unwrap();
            (found.addresses.len(), reason)
        };
        for namespaces in [&[][..], &["other"], &["ns2", "n"]] {
            assert_eq!(count(namespaces), (0, Some(NOT_ALLOWED)), "{namespaces:?}");
        }
        for namespaces in [&["*"][..], &["other", "ns"]] {
            assert_eq!(count(namespaces), (3, Some(NOT_DIALLED)), "{namespaces:?}");
        }
        let many: Vec<String> = (0..1_100).map(|last| format!("10.244.{}.{}", 3 + last / 250, last % 250)).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|address| (address.as_str(), "node-b")).collect();
        let (state, key) = state_with(service("tcp"), &many);
        let (found, reason) = targets(&state, &key, &node, &["*".to_owned()]).unwrap();
        assert_eq!((found.addresses.len(), reason), (MAX_TARGETS, Some(TOO_MANY)));
    }

    #[test]
    fn endpoints_that_fail_are_still_checked() {
        let (state, key) = state_with(service("tcp"), &ENDPOINTS);
        let mut node = facts();
        let wanted = targets(&state, &key, &node, &["*".to_owned()]);
        node.failing.set(&key, ["10.244.1.1:8080".parse().unwrap()].into());
        assert_eq!(service_views(&state, &key, Family::V4, &node)[0].cluster_endpoints.len(), 2);
        assert_eq!(targets(&state, &key, &node, &["*".to_owned()]), wanted);
    }
}
