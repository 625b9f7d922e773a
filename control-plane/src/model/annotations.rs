//! Annotations of Services and EndpointSlices, for settings for which the API has no field. An
//! annotation that cannot be read is ignored and reported as a problem.

use std::{collections::BTreeMap, net::IpAddr};

use headgate_core::{LoadBalancing, ProxyProtocol, Service, Weight, ipvs::Scheduler};

use super::{parse::shown, problems::Findings};
use crate::objects::{
    Annotations,
    keys::{
        CILIUM_WEIGHT, HEALTH_CHECK, HEALTH_CHECK_INTERVAL, LOAD_BALANCING, MAX_CONNECTIONS, PROXY_PROTOCOL, SCHEDULER,
        WEIGHTS,
    },
};

/// The highest limit of connections. A node has fewer ports for connections to one endpoint.
const HIGHEST_LIMIT: u32 = 1_000_000;

/// Bounds of the interval of health checks, in milliseconds.
const INTERVAL_MS: std::ops::RangeInclusive<u64> = 500..=3_600_000;

/// Reads the annotations of a Service into the service.
pub(super) fn read(annotations: &Annotations, service: &mut Service, findings: &mut Findings) {
    if let Some(name) = annotations.get(LOAD_BALANCING) {
        match LoadBalancing::parse(name) {
            Some(algorithm) => service.load_balancing = algorithm.as_str().into(),
            None => {
                let known = LoadBalancing::ALL.map(LoadBalancing::as_str).join(", ");
                let message = format!("{} is not an algorithm for load balancing: write one of {known}", shown(name));
                findings.annotation(LOAD_BALANCING, message, "each node uses the default of its mode");
            }
        }
    }
    if let Some(name) = annotations.get(SCHEDULER) {
        match Scheduler::parse(name) {
            Some(scheduler) => service.scheduler = scheduler.as_str().into(),
            None => {
                let known = Scheduler::ALL.map(Scheduler::as_str).join(", ");
                let message = format!("{} is not a scheduler of IPVS: write one of {known}", shown(name));
                findings.annotation(SCHEDULER, message, "the cluster's scheduler is used");
            }
        }
    }
    if let Some(name) = annotations.get(PROXY_PROTOCOL) {
        service.proxy_protocol = ProxyProtocol::parse(name);
        if service.proxy_protocol.is_none() {
            let known = ProxyProtocol::ALL.map(ProxyProtocol::as_str).join(" or ");
            let message = format!("{} is not a version of the PROXY protocol: write {known}", shown(name));
            findings.annotation(PROXY_PROTOCOL, message, "its endpoints get no header");
        }
    }
    if let Some(text) = annotations.get(MAX_CONNECTIONS) {
        match text.parse() {
            Ok(limit @ 1..=HIGHEST_LIMIT) => service.max_connections = limit,
            _ => {
                let message =
                    format!("{text:?} is not a limit of connections: write a whole number from 1 to {HIGHEST_LIMIT}");
                findings.annotation(MAX_CONNECTIONS, message, "its connections are not limited");
            }
        }
    }
    match annotations.get(HEALTH_CHECK) {
        None => {}
        Some("tcp") => service.health_check = "tcp".into(),
        Some(other) => {
            let message = format!("{} is not a kind of health check: write tcp", shown(other));
            findings.annotation(HEALTH_CHECK, message, "its endpoints are not checked");
        }
    }
    if let Some(text) = annotations.get(HEALTH_CHECK_INTERVAL) {
        let milliseconds = milliseconds(text).filter(|milliseconds| INTERVAL_MS.contains(milliseconds));
        match milliseconds.and_then(|milliseconds| u32::try_from(milliseconds).ok()) {
            Some(milliseconds) => service.health_check_interval_ms = milliseconds,
            None => {
                let message = format!("{} is not a time between 500ms and 1h: write a time such as 5s", shown(text));
                findings.annotation(HEALTH_CHECK_INTERVAL, message, "the agents' interval is used");
            }
        }
    }
}

/// Reads Cilium's weight of all endpoints of an EndpointSlice. Without it, the weight is 1, which
/// is Cilium's default of 100.
pub(super) fn weight_of_all(annotations: &Annotations, findings: &mut Findings) -> Weight {
    let Some(text) = annotations.get(CILIUM_WEIGHT) else { return Weight::default() };
    let weight = text.trim().parse().map(Weight::from_hundredths);
    weight.unwrap_or_else(|_| {
        let message = format!("{} is not a weight: write a whole number from 0 to 65535", shown(text));
        findings.annotation(CILIUM_WEIGHT, message, "the endpoints have their default weight");
        Weight::default()
    })
}

/// Reads the weights of some endpoints of an EndpointSlice: `10.0.0.1=3, 10.0.0.2=0`. An entry that
/// cannot be read is left out.
pub(super) fn weights(annotations: &Annotations, findings: &mut Findings) -> BTreeMap<IpAddr, Weight> {
    let mut weights = BTreeMap::new();
    let text = annotations.get(WEIGHTS).unwrap_or_default();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let read = entry.split_once('=').and_then(|(address, weight)| {
            let address: IpAddr = address.trim().parse().ok()?;
            Some((address, Weight::new(weight.trim().parse().ok()?)?))
        });
        let message = match read {
            None => format!(
                "{} is not an address with a weight: write ADDRESS=WEIGHT, with a weight from 0 to {}",
                shown(entry),
                Weight::MAX
            ),
            Some((address, weight)) => match weights.insert(address, weight) {
                Some(earlier) if earlier != weight => format!("{address} has two weights: write it once"),
                _ => continue,
            },
        };
        findings.annotation(WEIGHTS, message, "the rest of the annotation is used");
    }
    weights
}

/// Parses a whole number with a unit: `500ms`, `5s`, `1m`, `1h`.
fn milliseconds(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit_ms)
}
