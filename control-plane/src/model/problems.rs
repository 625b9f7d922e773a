//! Problems of objects: the findings about an object while it is read, and the list of all present
//! problems.

use std::{collections::BTreeMap, fmt::Display, net::IpAddr};

use headgate_core::ServiceKey;

use crate::{objects::ObjectKey, transaction::Problem};

/// The part of an object that a finding concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// One entry of a list. The entry is left out, and the rest of the object is used.
    Entry,
    /// A Headgate annotation. The annotation is ignored, and the rest of the object is used. The
    /// text says which setting applies instead.
    Annotation(&'static str),
    /// The object as a whole.
    Object,
}

/// The findings about one object.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<(Reach, String, String)>);

impl Findings {
    /// Adds a finding about an entry of a list, which is left out.
    pub(super) fn entry(&mut self, field: impl Display, message: impl Into<String>) {
        self.0.push((Reach::Entry, field.to_string(), message.into()));
    }

    /// Adds a finding about a Headgate annotation that cannot be read. `instead` says which setting
    /// applies instead.
    pub(super) fn annotation(&mut self, name: &str, message: impl Into<String>, instead: &'static str) {
        let field = format!("metadata.annotations[{name}]");
        self.0.push((Reach::Annotation(instead), field, message.into()));
    }

    /// Adds a finding about the object as a whole. With such a finding, the object cannot be used
    /// as written.
    pub(super) fn object(&mut self, field: impl Display, message: impl Into<String>) {
        self.0.push((Reach::Object, field.to_string(), message.into()));
    }

    /// The value of a result. An error becomes a finding about the object as a whole.
    pub(super) fn checked<T>(&mut self, field: impl Display, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.object(field, message)).ok()
    }

    /// The value of a result. An error becomes a finding about an entry of a list.
    pub(super) fn checked_entry<T>(&mut self, field: impl Display, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.entry(field, message)).ok()
    }

    /// True unless a finding concerns the object as a whole.
    pub(super) fn is_fit(&self) -> bool {
        self.0.iter().all(|(reach, ..)| *reach != Reach::Object)
    }

    /// Turns the findings into problems of an object. `consequence` ends the messages of findings
    /// about the object as a whole.
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

/// The subject of a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// One object.
    Object(ObjectKey),
    /// An address that several slices of a service contain.
    Endpoint(ServiceKey, IpAddr),
    /// A location that is not an object, such as a file.
    Location(String),
}

/// All present problems.
#[derive(Debug, Default)]
pub(super) struct Problems {
    by_subject: BTreeMap<Subject, Vec<Problem>>,
    changed: bool,
}

impl Problems {
    /// Replaces the problems of a subject; an empty list removes all problems of the subject.
    /// Returns the number of new problems.
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

    /// The objects with problems.
    pub(super) fn objects(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_subject.keys().filter_map(|subject| match subject {
            Subject::Object(key) => Some(key),
            _ => None,
        })
    }

    /// The sorted list of all problems, if it has changed since the last call.
    pub(super) fn take(&mut self) -> Option<Vec<Problem>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let mut problems: Vec<Problem> = self.by_subject.values().flatten().cloned().collect();
        problems.sort_unstable();
        Some(problems)
    }
}
