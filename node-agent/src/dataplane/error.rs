//! Errors of dataplanes, and how the caller reacts to each.

use std::{collections::BTreeSet, fmt, sync::Arc};

use headgate_core::{Family, ServiceKey};

/// How the caller reacts to a [`DataplaneError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same attempt may succeed later. For example, another process holds a lock.
    Retry,
    /// The kernel differs from the dataplane's records. Only a full sync helps.
    NeedsFullSync,
    /// The dataplane has written everything that the kernel accepts. Plan
    /// [`DataplaneError::services`] as changed, because their new plan differs from the rejected
    /// plan.
    PlanAgain,
    /// The kernel, or the program that writes the rules, rejects the rules of some service. The
    /// same plan would fail again.
    Rejected,
    /// Another attempt helps only after somebody changes the machine. For example, a program is
    /// missing.
    Fatal,
    /// This machine cannot run the dataplane at all, so the kernel cannot hold any objects of the
    /// dataplane either.
    Unavailable,
}

/// A failure of a dataplane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DataplaneError {
    /// How to react to the error.
    pub kind: ErrorKind,
    /// What failed, and the remedy if one is known.
    pub message: String,
    /// The affected families; an empty list means both families.
    pub families: Vec<Family>,
    /// The services to plan as changed after [`ErrorKind::PlanAgain`].
    pub services: BTreeSet<Arc<ServiceKey>>,
}

impl DataplaneError {
    /// An error of this kind that affects both families.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), families: Vec::new(), services: BTreeSet::new() }
    }

    /// An error that makes the caller plan these services as changed.
    pub fn plan_again(message: impl fmt::Display, services: BTreeSet<Arc<ServiceKey>>) -> Self {
        Self { services, ..Self::new(ErrorKind::PlanAgain, message) }
    }

    /// Limits the error to one family.
    #[must_use]
    pub fn of(self, family: Family) -> Self {
        Self { families: vec![family], ..self }
    }

    /// Joins the errors of all results with [`Self::join`].
    ///
    /// # Errors
    /// At least one result is an error.
    pub(super) fn join_all(results: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        results.into_iter().reduce(Self::join).unwrap_or(Ok(()))
    }

    /// Joins the errors of two results. The joined error has the more serious kind: the least
    /// serious is [`ErrorKind::PlanAgain`], and the next is [`ErrorKind::Retry`]. If both errors
    /// are more serious than these two kinds, the joined error has the kind of `one`.
    ///
    /// # Errors
    /// At least one of the two results is an error.
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
