//! What can go wrong between a dataplane and the kernel, and what the caller does about it.

use std::{collections::BTreeSet, fmt, sync::Arc};

use headgate_core::{Family, ServiceKey};

/// What the caller does about a [`DataplaneError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same step may succeed later, as when another process holds a lock.
    Retry,
    /// The kernel is not as the dataplane thinks: only a full sync helps.
    NeedsFullSync,
    /// Nothing has failed: all is done that the kernel takes. [`DataplaneError::services`] come out
    /// differently when they are planned as changed.
    PlanAgain,
    /// The kernel, or the program that writes the rules, rejects some service's rules. The same
    /// step fails again.
    Rejected,
    /// Another attempt helps only when somebody changes the machine, as when a program is missing.
    Fatal,
    /// This machine lacks what the dataplane needs to run at all; there can be no trace of it
    /// either.
    Unavailable,
}

/// A failure of a dataplane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DataplaneError {
    /// What to do about it.
    pub kind: ErrorKind,
    /// What failed, and the remedy where there is one.
    pub message: String,
    /// The families that it concerns; none means both.
    pub families: Vec<Family>,
    /// The services to plan as changed after [`ErrorKind::PlanAgain`].
    pub services: BTreeSet<Arc<ServiceKey>>,
}

impl DataplaneError {
    /// An error of a kind, about both families.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), families: Vec::new(), services: BTreeSet::new() }
    }

    /// Has these services planned as changed.
    pub fn plan_again(message: impl fmt::Display, services: BTreeSet<Arc<ServiceKey>>) -> Self {
        Self { services, ..Self::new(ErrorKind::PlanAgain, message) }
    }

    /// The same error, about one family.
    #[must_use]
    pub fn of(self, family: Family) -> Self {
        Self { families: vec![family], ..self }
    }

    /// One error for some results, as [`Self::join`].
    ///
    /// # Errors
    /// One of them has failed, or several.
    pub(super) fn join_all(results: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        results.into_iter().reduce(Self::join).unwrap_or(Ok(()))
    }

    /// One error for two results. The graver kind counts; [`ErrorKind::PlanAgain`] is the least
    /// grave.
    ///
    /// # Errors
    /// One of the two has failed, or both.
    pub fn join(one: Result<(), Self>, other: Result<(), Self>) -> Result<(), Self> {
        let (mut one, other) = match (one, other) {
            (Err(one), Err(other)) => (one, other),
            (one, other) => return one.and(other),
        };
        let is_lesser = one.kind == ErrorKind::Retry && other.kind != ErrorKind::PlanAgain;
        if is_lesser || one.kind == ErrorKind::PlanAgain {
            one.kind = other.kind;
        }
        if one.families.is_empty() || other.families.is_empty() {
            one.families.clear();
        } else {
            one.families.extend(other.families);
        }
        if one.message != other.message {
            one.message = format!("{}; {}", one.message, other.message);
        }
        one.services.extend(other.services);
        Err(one)
    }
}
