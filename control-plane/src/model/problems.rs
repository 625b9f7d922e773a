//! Findings about an object, the list of all problems, and the rule for invalid objects.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    hash::Hash,
};

use headgate_core::ServiceKey;

use crate::{objects::ObjectKey, transaction::Problem};

/// The most problems of one object that are kept and shown. Of the others, only the number is kept.
pub(super) const MAX_SHOWN: usize = 10;

/// The longest field and the longest message, in bytes.
const MAX_TEXT_BYTES: usize = 1_000;

/// The part of an object that a finding concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// A part of the object is left out, such as an entry of a list. The text says what follows.
    Part(&'static str),
    Object,
}

/// The findings about one object.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// At most [`MAX_SHOWN`] fields with messages, first those about the object as a whole.
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

    /// Adds a finding about an unreadable Headgate annotation. `instead` is what applies then.
    pub(super) fn annotation(&mut self, name: &str, message: impl Into<String>, instead: &'static str) {
        self.part(format_args!("metadata.annotations[{name}]"), message, instead);
    }

    /// Adds a finding about the object as a whole, which cannot be used as written.
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

    /// Turns findings into problems. `consequence` ends those about the object as a whole.
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

/// The problem that stands for those not shown, if any; it is the last in the sorted list.
pub(super) fn and_more(object: &str, origin: &str, more: usize) -> Option<Problem> {
    let message = format!("{more} more problems are not shown: correct the ones that are shown first");
    let (object, field, origin) = (object.to_owned(), "…".to_owned(), origin.to_owned());
    (more > 0).then_some(Problem { object, field, message, origin })
}

/// The subject of a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
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

#[derive(Debug, Default)]
pub(super) struct Problems {
    /// The problems of each subject, sorted. Their number is bounded.
    by_subject: BTreeMap<Subject, Vec<Problem>>,
    changed: bool,
    /// For the log: the first new problem of each change.
    unlogged: Vec<Problem>,
}

impl Problems {
    /// Replaces the problems of a subject. Returns the number of new ones.
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
        // A stable sort is fast here: problems of a kind are nearly sorted.
        problems.sort();
        Some(problems)
    }
}

// The objects of one kind that are in use, and the rule for invalid objects.
//
// The rule: **an invalid version of an object never removes a good version.** A finding concerns
// one of three parts:
// - An *entry* of a list (an externalIP, a load balancer address, an endpoint, an address of a
//   Node): the entry is left out, and the rest of the version is used. If the old version stayed
//   in use instead, traffic would still be sent to entries that the new version has removed.
//   Entries beyond the budget of a Service are left out in the same way.
// - A Headgate *annotation*: the annotation is ignored, and the rest of the version is used.
// - The *object* (ports, ClusterIPs, policies, source ranges, labels that name the owner, text
//   that cannot be decoded): the last good version stays in use as a whole while the object is
//   invalid. Without a good version, the valid parts are used, unless these parts alone would
//   allow traffic that the object is meant to block.
//
// A deleted object is removed, valid or not. An object is also removed when its new version is not
// for this proxy (headless, ExternalName, or served by another proxy).

/// The result of reading an object.
#[derive(Debug)]
pub(super) struct Reading<T> {
    /// The usable value, if there is one.
    pub(super) value: Option<T>,
    pub(super) findings: Findings,
}

impl<T> Reading<T> {
    /// The result for an object that this proxy does not serve.
    pub(super) fn nothing() -> Self {
        Self { value: None, findings: Findings::default() }
    }

    /// Applies the rule for invalid objects. Calls `set` with the value, and with whether the value
    /// is good. `has_good` says whether a good version is in use. If so, and if the object is
    /// invalid, the good version stays in use, and `set` is not called.
    pub(super) fn take_in(self, has_good: bool, set: impl FnOnce(Option<T>, bool)) -> Outcome {
        let Self { value, findings } = self;
        let (is_good, is_served) = (findings.is_fit(), value.is_some());
        let is_kept = !is_good && has_good;
        if !is_kept {
            set(value, is_good);
        }
        let consequence = match (is_kept, is_served) {
            (true, _) => "its last good version stays in use",
            (false, true) => "the rest of it is in use",
            (false, false) => "it is not in use",
        };
        Outcome { findings, consequence }
    }
}

/// The result of [`Reading::take_in`].
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) findings: Findings,
    /// The last part of each message about a problem that concerns the object as a whole.
    pub(super) consequence: &'static str,
}

/// The values in use, and the values before the pending changes.
#[derive(Debug)]
pub(super) struct ObjectSet<K, V> {
    /// The value in use of each object, and whether it is as written but for invalid entries.
    held: HashMap<K, (V, bool)>,
    before: HashMap<K, Option<V>>,
}

impl<K, V> Default for ObjectSet<K, V> {
    fn default() -> Self {
        Self { held: HashMap::new(), before: HashMap::new() }
    }
}

impl<K: Hash + Eq + Clone + Ord, V: PartialEq + Clone> ObjectSet<K, V> {
    /// Applies a version of an object.
    pub(super) fn put(&mut self, key: K, reading: Reading<V>) -> Outcome {
        let has_good = self.held.get(&key).is_some_and(|(_, is_good)| *is_good);
        reading.take_in(has_good, |value, is_good| self.set(key, value, is_good))
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.held.get(key).map(|(value, _)| value)
    }

    /// Changes the value in use of an object, and returns the result of `change`.
    pub(super) fn amend<R>(&mut self, key: &K, change: impl FnOnce(&mut V) -> R) -> Option<R> {
        let (mut value, is_good) = self.held.get(key)?.clone();
        let result = change(&mut value);
        self.set(key.clone(), Some(value), is_good);
        Some(result)
    }

    /// The keys of the objects in use.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.held.keys()
    }

    fn set(&mut self, key: K, value: Option<V>, is_good: bool) {
        let old = match value {
            Some(value) => {
                if let Some((held, was_good)) = self.held.get_mut(&key)
                    && *held == value
                {
                    (*held, *was_good) = (value, is_good);
                    return;
                }
                self.held.insert(key.clone(), (value, is_good))
            }
            None => match self.held.remove(&key) {
                None => return,
                old => old,
            },
        };
        self.before.entry(key).or_insert(old.map(|(value, _)| value));
    }

    /// The values that changed since the last call, in order; `None` for a removed object.
    pub(super) fn take_changes(&mut self) -> Vec<(K, Option<V>)> {
        let mut changes: Vec<(K, Option<V>)> = std::mem::take(&mut self.before)
            .into_iter()
            .map(|(key, before)| (before, self.held.get(&key).map(|(value, _)| value), key))
            .filter(|(before, now, _)| before.as_ref() != *now)
            .map(|(_, now, key)| (key, now.cloned()))
            .collect();
        changes.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        changes
    }
}
