//! What is wrong with objects: findings while one is read, and the list of all present problems.

use std::{collections::BTreeMap, net::IpAddr};

use headgate_core::ServiceKey;

use crate::{objects::ObjectKey, transaction::Problem};

/// How far a finding reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// One entry of a list is left out; the object is used otherwise.
    Entry,
    /// An annotation that only adds to the object means nothing, and this is done instead; the
    /// object is used otherwise.
    Annotation(&'static str),
    /// The object cannot be used as a whole.
    Object,
}

/// What was found while one object was read.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<(Reach, String, String)>);

impl Findings {
    /// An entry of a list is left out.
    pub(super) fn entry(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push((Reach::Entry, field.into(), message.into()));
    }

    /// An annotation of Headgate's cannot be read; `instead` says what is done.
    pub(super) fn annotation(&mut self, name: &str, message: impl Into<String>, instead: &'static str) {
        let field = format!("metadata.annotations[{name}]");
        self.0.push((Reach::Annotation(instead), field, message.into()));
    }

    /// The object cannot be used as it is.
    pub(super) fn object(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push((Reach::Object, field.into(), message.into()));
    }

    /// True unless the object as a whole is unfit.
    pub(super) fn is_fit(&self) -> bool {
        self.0.iter().all(|(reach, ..)| *reach != Reach::Object)
    }

    /// As problems of an object. `consequence` ends the message of findings about the whole object.
    pub(super) fn into_problems(self, key: &ObjectKey, origin: &str, consequence: &str) -> Vec<Problem> {
        let problem = |(reach, field, message): (Reach, String, String)| {
            let consequence = match reach {
                Reach::Entry => "this entry is left out",
                Reach::Annotation(instead) => instead,
                Reach::Object => consequence,
            };
            Problem {
                object: key.to_string(),
                field,
                message: format!("{message}; {consequence}"),
                origin: origin.to_owned(),
            }
        };
        self.0.into_iter().map(problem).collect()
    }
}

/// What a problem is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// One object.
    Object(ObjectKey),
    /// One address of a service, which several slices carry.
    Endpoint(ServiceKey, IpAddr),
    /// A location outside of objects, such as a file.
    Location(String),
}

/// All present problems.
#[derive(Debug, Default)]
pub(super) struct Problems {
    by_subject: BTreeMap<Subject, Vec<Problem>>,
    changed: bool,
}

impl Problems {
    /// Replaces what is wrong with a subject; nothing if the list is empty. Returns how many
    /// problems were not there before.
    pub(super) fn set(&mut self, subject: Subject, problems: Vec<Problem>) -> usize {
        let before = self.by_subject.get(&subject).map(Vec::as_slice).unwrap_or_default();
        if before == problems.as_slice() {
            return 0;
        }
        let new = problems.iter().filter(|problem| !before.contains(problem)).count();
        self.changed = true;
        if problems.is_empty() {
            self.by_subject.remove(&subject);
        } else {
            self.by_subject.insert(subject, problems);
        }
        new
    }

    /// Objects that something is wrong with.
    pub(super) fn objects(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_subject.keys().filter_map(|subject| match subject {
            Subject::Object(key) => Some(key),
            _ => None,
        })
    }

    /// The sorted list, if it changed since it was last taken.
    pub(super) fn take(&mut self) -> Option<Vec<Problem>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let mut problems: Vec<Problem> = self.by_subject.values().flatten().cloned().collect();
        problems.sort_unstable();
        Some(problems)
    }
}
