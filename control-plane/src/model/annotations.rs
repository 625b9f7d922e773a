//! Annotations of Services, for settings for which the API has no field. An annotation that cannot
//! be read is ignored and reported as a problem.

use headgate_core::{Service, ipvs::Scheduler};

use super::problems::Findings;
use crate::objects::Annotations;

const SCHEDULER: &str = "headgate.io/scheduler";
const HEALTH_CHECK: &str = "headgate.io/health-check";
const INTERVAL: &str = "headgate.io/health-check-interval";

/// Bounds of the interval of health checks, in milliseconds.
const INTERVAL_MS: std::ops::RangeInclusive<u64> = 500..=3_600_000;

/// Reads the annotations into a service.
pub(super) fn read(annotations: &Annotations, service: &mut Service, findings: &mut Findings) {
    if let Some(name) = &annotations.scheduler {
        match Scheduler::parse(name) {
            Some(scheduler) => service.scheduler = scheduler.as_str().into(),
            None => {
                let known = Scheduler::ALL.map(Scheduler::as_str).join(", ");
                let message = format!("{name:?} is not a scheduler of IPVS: write one of {known}");
                findings.annotation(SCHEDULER, message, "the cluster's scheduler is used");
            }
        }
    }
    match annotations.health_check.as_deref() {
        None => {}
        Some("tcp") => service.health_check = "tcp".into(),
        Some(other) => {
            let message = format!("{other:?} is not a kind of health check: write tcp");
            findings.annotation(HEALTH_CHECK, message, "its endpoints are not checked");
        }
    }
    if let Some(text) = &annotations.health_check_interval {
        let milliseconds = milliseconds(text).filter(|milliseconds| INTERVAL_MS.contains(milliseconds));
        match milliseconds.and_then(|milliseconds| u32::try_from(milliseconds).ok()) {
            Some(milliseconds) => service.health_check_interval_ms = milliseconds,
            None => {
                let message = format!("{text:?} is not a time between 500ms and 1h: write a time such as 5s");
                findings.annotation(INTERVAL, message, "the agents' interval is used");
            }
        }
    }
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
