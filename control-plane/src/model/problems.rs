//! Problems of objects: the findings about an object while it is read, and the list of all present
//! problems.

use std::{collections::BTreeMap, fmt::Display};

use headgate_core::ServiceKey;

use crate::{objects::ObjectKey, transaction::Problem};

/// The most problems of one object that are kept and shown. Of the others, only the number is kept.
pub(super) const MAX_SHOWN: usize = 10;

/// The longest field and the longest message, in bytes.
const MAX_TEXT_BYTES: usize = 1_000;

/// The part of an object that a finding concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// A part of the object, such as an entry of a list. The part is left out, and the rest of the
    /// object is used. The text says so, or says which setting applies instead.
    Part(&'static str),
    /// The object as a whole.
    Object,
}

/// The findings about one object.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// At most [`MAX_SHOWN`] findings, each with its field and a message. Findings about the object
    /// as a whole are kept first.
    kept: Vec<(Reach, String, String)>,
    total: usize,
}

impl Findings {
    fn add(&mut self, reach: Reach, field: impl Display, message: impl Into<String>) {
        self.total += 1;
        if self.kept.len() == MAX_SHOWN {
            let is_part = |(kept, ..): &(Reach, String, String)| *kept != Reach::Object;
            let Some(last) = self.kept.iter().rposition(is_part).filter(|_| reach == Reach::Object) else { return };
            self.kept.remove(last);
        }
        let [field, message] = [field.to_string(), message.into()].map(cut);
        self.kept.push((reach, field, message));
    }

    /// Adds a finding about an entry of a list, which is left out.
    pub(super) fn entry(&mut self, field: impl Display, message: impl Into<String>) {
        self.part(field, message, "this entry is left out");
    }

    /// Adds a finding about a part of the object. `instead` says what becomes of the part.
    pub(super) fn part(&mut self, field: impl Display, message: impl Into<String>, instead: &'static str) {
        self.add(Reach::Part(instead), field, message);
    }

    /// Adds a finding about a Headgate annotation that cannot be read. `instead` says which setting
    /// applies instead.
    pub(super) fn annotation(&mut self, name: &str, message: impl Into<String>, instead: &'static str) {
        self.part(format_args!("metadata.annotations[{name}]"), message, instead);
    }

    /// Adds a finding about the object as a whole. With such a finding, the object cannot be used
    /// as written.
    pub(super) fn object(&mut self, field: impl Display, message: impl Into<String>) {
        self.add(Reach::Object, field, message);
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
        self.kept.iter().all(|(reach, ..)| *reach != Reach::Object)
    }

    /// Turns the findings into problems of an object. `consequence` ends the messages of findings
    /// about the object as a whole.
    pub(super) fn into_problems(self, key: &ObjectKey, origin: &str, consequence: &str) -> Vec<Problem> {
        let object = key.to_string();
        let problem = |(reach, field, message): (Reach, String, String)| {
            let consequence = match reach {
                Reach::Part(instead) => instead,
                Reach::Object => consequence,
            };
            let message = format!("{message}; {consequence}");
            Problem { object: object.clone(), field, message, origin: origin.to_owned() }
        };
        let more = self.total - self.kept.len();
        let problems = self.kept.into_iter().map(problem);
        problems.chain(and_more(&object, origin, more)).collect()
    }
}

/// Cuts a text that is too long, at a character boundary.
fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
    text
}

/// The problem that stands for those which are not shown; `None` if all are shown. It follows the
/// others in the sorted list.
pub(super) fn and_more(object: &str, origin: &str, more: usize) -> Option<Problem> {
    let message = format!("{more} more problems are not shown: correct the ones that are shown first");
    let (object, field, origin) = (object.to_owned(), "…".to_owned(), origin.to_owned());
    (more > 0).then_some(Problem { object, field, message, origin })
}

/// The subject of a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// One object.
    Object(ObjectKey),
    /// The slices of a service, if they contradict each other.
    Slices(ServiceKey),
    /// The slices of a service, if they are over its budget.
    Budget(ServiceKey),
    /// The external addresses of a service for which its endpoints leave no room.
    Addresses(ServiceKey),
    /// A location that is not an object, such as a file.
    Location(String),
}

/// All present problems.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// The problems of each subject, sorted. Their number is bounded.
    by_subject: BTreeMap<Subject, Vec<Problem>>,
    changed: bool,
    /// For the log: the first new problem of each change.
    unlogged: Vec<Problem>,
}

impl Problems {
    /// Replaces the problems of a subject; an empty list removes all problems of the subject.
    /// Returns the number of new problems.
    pub(super) fn set(&mut self, subject: Subject, mut problems: Vec<Problem>) -> usize {
        if let Subject::Location(location) = &subject
            && let more @ 1.. = problems.len().saturating_sub(MAX_SHOWN)
        {
            problems.truncate(MAX_SHOWN);
            problems.extend(and_more(location, "", more));
        }
        let before = self.by_subject.get(&subject).map(Vec::as_slice).unwrap_or_default();
        let is_new = |problem: &&Problem| !before.contains(problem);
        let first = problems.iter().find(is_new).cloned();
        problems.sort_unstable();
        problems.dedup();
        if before == problems.as_slice() {
            return 0;
        }
        let count = problems.iter().filter(is_new).count();
        self.changed = true;
        self.unlogged.extend(first.map(|first| match count {
            1 => first,
            _ => Problem { message: format!("{}; and {} more new problems", first.message, count - 1), ..first },
        }));
        if problems.is_empty() {
            self.by_subject.remove(&subject);
        } else {
            self.by_subject.insert(subject, problems);
        }
        count
    }

    /// For each change since the last call that brought problems, the first of them.
    pub(super) fn take_unlogged(&mut self) -> Vec<Problem> {
        std::mem::take(&mut self.unlogged)
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
        // A stable sort is fast here, because the problems of each kind of object are nearly
        // sorted.
        problems.sort();
        Some(problems)
    }
}
