//! Metrics of the proxy of mode userspace. The proxy counts, and the agent reads its counters when
//! a client requests the metrics.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use headgate_userspace::ServiceStats;
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

use super::services::{MAX_SERVICES, ServiceLabels};
use crate::{
    dataplane::ProxyCounts,
    metric_registry::{self, MetricRegistry, USERSPACE, metrics},
};

/// A counter or gauge: its name, its meaning, and its value among the counts of a Service.
type Figure = (&'static str, &'static str, fn(&ServiceStats) -> u64);

const COUNTERS: [Figure; 18] = [
    ("connections_accepted", "Connections that the proxy accepted, also those that got no endpoint", |s| s.accepted),
    ("connections_over_limit", "Connections that were reset because of headgate.io/max-connections", |s| s.over_limit),
    (
        "connections_over_share",
        "Connections that were reset because their Service had 8 times as many as the node has free places",
        |s| s.over_share,
    ),
    ("connections_without_endpoint", "Connections that were reset because the Service had no endpoint", |s| {
        s.without_endpoint
    }),
    ("connections_failed", "Connections that were reset because no endpoint that was tried accepted", |s| s.failed),
    ("connections_reset", "Connections that ended with a RST, because a side failed or was idle for too long", |s| {
        s.reset
    }),
    ("connections_idle", "Connections that ended because they were idle for too long", |s| s.idle),
    ("endpoint_connects", "Connections that endpoints accepted", |s| s.connected),
    ("endpoint_retries", "Attempts to connect to another endpoint, after an endpoint failed", |s| s.retries),
    (
        "endpoint_loops",
        "Endpoints that were not tried, because their address is the address of a Service or of the node",
        |s| s.loops,
    ),
    ("bytes_to_endpoints", "Bytes from clients to endpoints, without headers", |s| s.bytes_to_endpoints),
    ("bytes_to_clients", "Bytes from endpoints to clients, without headers", |s| s.bytes_to_clients),
    ("affinity_evictions", "Clients whose ClientIP affinity was forgotten early, because the table was full", |s| {
        s.affinity_evicted
    }),
    ("datagrams_to_endpoints", "Datagrams from clients that the proxy sent to endpoints", |s| s.datagrams_to_endpoints),
    ("datagrams_to_clients", "Datagrams from endpoints that the proxy sent to clients", |s| s.datagrams_to_clients),
    ("datagram_bytes_to_endpoints", "Bytes of datagrams from clients to endpoints, without headers", |s| {
        s.datagram_bytes_to_endpoints
    }),
    ("datagram_bytes_to_clients", "Bytes of datagrams from endpoints to clients, without headers", |s| {
        s.datagram_bytes_to_clients
    }),
    ("datagrams_dropped", "Datagrams that the proxy dropped, for every reason of datagrams_dropped_by_reason", |s| {
        s.dropped_datagrams()
    }),
];

/// A reason, and the number of datagrams that the proxy dropped for it.
type Drop = (&'static str, fn(&ProxyCounts) -> u64);

/// Why the proxy drops datagrams.
const DROPS: [Drop; 9] = [
    ("unknown_destination", |counts| counts.udp.unknown_destination),
    ("limit", |counts| counts.totals.dropped_by_limit),
    ("no_endpoint", |counts| counts.totals.dropped_without_endpoint),
    ("loop", |counts| counts.totals.dropped_by_loop),
    ("exhausted", |counts| counts.totals.dropped_by_exhaustion),
    ("unreachable", |counts| counts.totals.dropped_unreachable),
    ("full_buffer", |counts| counts.totals.dropped_by_full_buffer),
    ("refused", |counts| counts.totals.dropped_by_refusal),
    ("session_ended", |counts| counts.totals.dropped_after_end),
];

const GAUGES: [Figure; 4] = [
    ("connections_open", "Open connections and UDP sessions", |s| s.open),
    ("udp_sessions", "Open UDP sessions", |s| s.udp_sessions),
    ("endpoints_resting", "Endpoints that get no connections for a while, after failures", |s| s.resting_endpoints),
    ("affinity_clients", "Clients with ClientIP affinity", |s| s.affinity_clients),
];

const CONNECT_SECONDS: (&str, &str) =
    ("endpoint_connect_seconds", "The sum of the times that endpoints took to accept connections");

type Reason = metric_registry::Labels<1>;

type SecondsCounter = Counter<f64, AtomicU64>;

#[derive(Debug, Clone, Default)]
struct Totals {
    counters: [Counter; COUNTERS.len()],
    gauges: [Gauge; GAUGES.len()],
    connect_seconds: SecondsCounter,
}

/// The same figures for each Service.
#[derive(Debug, Clone, Default)]
struct Services {
    counters: [Family<ServiceLabels, Counter>; COUNTERS.len()],
    gauges: [Family<ServiceLabels, Gauge>; GAUGES.len()],
    connect_seconds: Family<ServiceLabels, SecondsCounter>,
    omitted: Gauge,
}

metrics! {
    pub(crate) struct UserspaceMetrics {
        totals: Totals,
        services: Services,
    }
    USERSPACE {
        unknown_destination: Counter = "connections_unknown_destination",
            "Connections that were reset because no Service has their destination, such as connections to a listener itself";
        exhausted: Counter = "descriptors_exhausted",
            "How often the kernel had no descriptor, no memory or no local port for a connection or a UDP session";
        dropped: Family<Reason, Counter> = "datagrams_dropped_by_reason" ["reason"],
            "Datagrams that the proxy dropped";
        accept_pauses: Counter = "accept_pauses",
            "How often a thread stopped accepting for 100 ms, because of exhaustion or of the limit of open files";
        pipes: Gauge = "pipes", "Pipes of splice(2), each with two descriptors";
        pipes_refused: Counter = "pipes_refused",
            "How often a transfer got no pipe, and copied its bytes through a buffer instead";
    }
}

impl UserspaceMetrics {
    /// Registers the figures, as sums and for each Service.
    pub(super) fn register_figures(&self, registry: &mut MetricRegistry) {
        let Self { totals, services, .. } = self;
        let mut add = registry.adder(USERSPACE);
        let labels = "namespace, service";
        let of_service = |help: &str| format!("{help}, for each Service, with --userspace-service-counters");
        for ((name, help, _), (total, service)) in COUNTERS.iter().zip(totals.counters.iter().zip(&services.counters)) {
            add.add(name, "", help, total.clone());
            add.add(&format!("service_{name}"), labels, &of_service(help), service.clone());
        }
        for ((name, help, _), (total, service)) in GAUGES.iter().zip(totals.gauges.iter().zip(&services.gauges)) {
            add.add(name, "", help, total.clone());
            add.add(&format!("service_{name}"), labels, &of_service(help), service.clone());
        }
        let (name, help) = CONNECT_SECONDS;
        add.add(name, "", help, totals.connect_seconds.clone());
        add.add(&format!("service_{name}"), labels, &of_service(help), services.connect_seconds.clone());
        let help = "Services without metrics of their own, because the first 5,000 Services by name have metrics";
        add.add("services_without_counters", "", help, services.omitted.clone());
    }

    /// Sets all metrics. Services have metrics of their own only if `has_services` is true.
    pub(crate) fn refresh(&self, counts: &ProxyCounts, has_services: bool) {
        let Self { totals, services, unknown_destination, exhausted, dropped, accept_pauses, pipes, pipes_refused } =
            self;
        let ProxyCounts { services: counted, totals: sums, tcp, udp } = counts;
        let set = |counter: &Counter, value| counter.inner().store(value, Relaxed);
        COUNTERS.iter().zip(&totals.counters).for_each(|((.., value), counter)| set(counter, value(sums)));
        for ((.., value), gauge) in GAUGES.iter().zip(&totals.gauges) {
            gauge.set(gauge_value(value(sums)));
        }
        totals.connect_seconds.inner().store(connect_seconds(sums).to_bits(), Relaxed);
        set(unknown_destination, tcp.unknown_destination);
        set(exhausted, tcp.exhausted + udp.exhausted);
        DROPS.iter().for_each(|(reason, value)| set(&dropped.get_or_create(&[("reason", reason)]), value(counts)));
        set(accept_pauses, tcp.accept_pauses);
        pipes.set(gauge_value(tcp.pipes));
        set(pipes_refused, tcp.pipes_refused);
        if has_services {
            services.set(&counted.iter().map(|(name, stats)| (&**name, stats)).collect());
        }
    }
}

impl Services {
    /// Sets the metrics of the first Services by name. Removed Services disappear.
    fn set(&self, counted: &BTreeMap<&str, &ServiceStats>) {
        let Self { counters, gauges, connect_seconds: seconds, omitted } = self;
        counters.iter().for_each(Family::clear);
        gauges.iter().for_each(Family::clear);
        seconds.clear();
        for (name, stats) in counted.iter().take(MAX_SERVICES) {
            let (namespace, name) = name.split_once('/').unwrap_or(("", name));
            let labels = [("namespace", namespace.to_owned()), ("service", name.to_owned())];
            for ((.., value), counter) in COUNTERS.iter().zip(counters) {
                counter.get_or_create(&labels).inc_by(value(stats));
            }
            for ((.., value), gauge) in GAUGES.iter().zip(gauges) {
                gauge.get_or_create(&labels).set(gauge_value(value(stats)));
            }
            seconds.get_or_create(&labels).inc_by(connect_seconds(stats));
        }
        omitted.set(gauge_value(counted.len().saturating_sub(MAX_SERVICES) as u64));
    }
}

fn gauge_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn connect_seconds(stats: &ServiceStats) -> f64 {
    stats.connect_microseconds as f64 / 1e6
}
