//! The settings that flags or a file contain, before they are checked together.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value as Json};

use super::{
    fields::{self, FIELDS, Field, Meaning},
    remark::Remark,
    value::{Kind, parse_duration},
};

/// The `apiVersion` of the configuration file.
pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
/// The `kind` of the configuration file.
pub const KIND: &str = "KubeProxyConfiguration";

/// The source of settings. Messages name a setting by its flag or by its field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Origin {
    /// Flags, such as `--cluster-cidr`.
    #[default]
    Flags,
    /// A file, with fields such as `clusterCIDR`.
    File,
}

/// The given settings, by [`Field::id`]. All other settings have their defaults.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Raw {
    /// The source of the settings.
    pub origin: Origin,
    values: BTreeMap<&'static str, Json>,
}

/// Problems and notes about a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Errors, each with field, problem and remedy. A file with one cannot be used.
    pub problems: Vec<Remark>,
    /// Fields that have no effect, each with the reason.
    pub notes: Vec<Remark>,
}

impl Raw {
    /// Sets a value. Elements of a list, and feature gates, are added to those already set.
    pub fn set(&mut self, id: &'static str, value: Json) {
        match (self.values.get_mut(id), value) {
            (Some(Json::Array(held)), Json::Array(more)) => held.extend(more),
            (Some(Json::Object(held)), Json::Object(more)) => held.extend(more),
            (_, value) => {
                self.values.insert(id, value);
            }
        }
    }

    /// The value, if the setting was given.
    pub fn given(&self, id: &str) -> Option<&Json> {
        self.values.get(id)
    }

    /// True when the setting was given and differs from the default.
    pub fn is_changed(&self, id: &str) -> bool {
        self.given(id).zip(fields::by_id(id)).is_some_and(|(value, field)| !is_default(field, value))
    }

    /// The name of a setting in messages: its flag or its field.
    pub fn name(&self, id: &str) -> String {
        match (self.origin, fields::by_id(id)) {
            (Origin::Flags, Some(Field { flag, .. })) if !flag.is_empty() => format!("--{flag}"),
            _ => id.to_owned(),
        }
    }

    /// The value, or the default if the setting was not given.
    pub fn value(&self, id: &str) -> Json {
        let default = || fields::by_id(id).map_or(Json::Null, default);
        self.given(id).cloned().unwrap_or_else(default)
    }

    /// A boolean; false when unset.
    pub fn bool(&self, id: &str) -> bool {
        self.value(id) == true
    }

    /// A number; 0 when unset.
    pub fn int(&self, id: &str) -> i64 {
        self.value(id).as_i64().unwrap_or_default()
    }

    /// A text, trimmed; empty when unset.
    pub fn text(&self, id: &str) -> String {
        self.value(id).as_str().unwrap_or_default().trim().to_owned()
    }

    /// A list; empty when unset.
    pub fn list(&self, id: &str) -> Vec<String> {
        self.value(id).as_array().into_iter().flatten().filter_map(Json::as_str).map(str::to_owned).collect()
    }

    /// A duration; zero when unset.
    pub fn duration(&self, id: &str) -> Duration {
        self.value(id).as_str().and_then(parse_duration).unwrap_or_default()
    }

    /// Feature gates by name; empty when unset.
    pub fn gates(&self, id: &str) -> BTreeMap<String, bool> {
        let value = self.value(id);
        let gates = value.as_object().into_iter().flatten();
        gates.filter_map(|(name, value)| Some((name.clone(), value.as_bool()?))).collect()
    }

    /// The given settings that have no effect, each with the reason.
    pub fn without_effect(&self) -> Vec<Remark> {
        let given = FIELDS.iter().filter(|field| self.given(field.id()).is_some());
        let why = |field: &Field| match field.meaning {
            Meaning::Ignored(why) => Some(Remark::new(self.name(field.id()), why)),
            Meaning::Used(_) => None,
        };
        given.filter_map(why).collect()
    }

    /// All settings, including defaults, as a `KubeProxyConfiguration`.
    pub fn to_json(&self) -> Json {
        let mut root = serde_json::json!({ "apiVersion": API_VERSION, "kind": KIND });
        for field in FIELDS.iter().filter(|field| !field.path.is_empty()) {
            let mut place = &mut root;
            for part in field.path.split('.') {
                place = &mut place[part];
            }
            *place = self.value(field.id());
        }
        root
    }

    /// Reads a document, and finds all problems in it. `repeated` is a note about it.
    pub(super) fn from_document(document: &Json, repeated: Option<Remark>) -> (Self, Findings) {
        let mut raw = Self { origin: Origin::File, ..Self::default() };
        let mut findings = Findings { notes: repeated.into_iter().collect(), ..Findings::default() };
        let Json::Object(entries) = document else {
            let what = format!("is not a mapping; begin with `apiVersion: {API_VERSION}`");
            findings.problems.push(Remark::new("the document", what));
            return (raw, findings);
        };
        for (key, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            if document[key] != expected {
                let found = entries.get(key).map(|found| format!("{found} cannot be used"));
                let found = found.unwrap_or_else(|| "missing".to_owned());
                findings.problems.push(Remark::new(key, format!("{found}; write {expected}")));
            }
        }
        raw.read_section("", entries, &mut findings);
        (raw, findings)
    }

    fn read_section(&mut self, prefix: &str, entries: &Map<String, Json>, findings: &mut Findings) {
        for (key, value) in entries {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            if path == "apiVersion" || path == "kind" {
                continue;
            }
            // A key with a dot is not a path: `iptables.syncPeriod` at the top level is unknown.
            let field = fields::by_id(&path).filter(|field| !field.path.is_empty() && !key.contains('.'));
            match (field, value) {
                (_, Json::Null) => {}
                (Some(field), value) => self.read_field(field, value, findings),
                (None, Json::Object(inner)) if fields::is_section(&path) => self.read_section(&path, inner, findings),
                (None, _) if fields::is_section(&path) => {
                    let what = format!("{value} cannot be used; write a mapping");
                    findings.problems.push(Remark::new(path, what));
                }
                (None, _) => findings.notes.push(Remark::new(path, "unknown")),
            }
        }
    }

    fn read_field(&mut self, field: &'static Field, json: &Json, findings: &mut Findings) {
        match field.kind.from_json(json) {
            // kube-proxy does not distinguish an empty value from an absent value, and kubeadm
            // writes all fields, including empty fields.
            Ok(_) if means_unset(field, json) => {}
            Ok(value) if is_default(field, &value) && matches!(field.meaning, Meaning::Ignored(_)) => {}
            Ok(value) => self.set(field.path, value),
            Err(error) => findings.problems.push(Remark::new(field.path, error)),
        }
    }
}

/// The default. A setting that is unset by default has an empty value, as in a configuration file.
fn default(field: &Field) -> Json {
    match field.kind {
        Kind::List if field.default.is_empty() => Json::Array(Vec::new()),
        Kind::Gates | Kind::Any if field.default.is_empty() => Json::Object(serde_json::Map::new()),
        // The test of the table parses each default.
        kind => kind.parse(field.default).unwrap_or_default(),
    }
}

/// True for an empty value, which means the default. `false` and `0` are empty only in fields that
/// have no effect in Headgate: in other fields, they may be values that differ from the default.
fn means_unset(field: &Field, json: &Json) -> bool {
    match json {
        Json::Null => true,
        Json::String(text) if text.is_empty() => true,
        Json::String(text) if field.kind == Kind::Duration => {
            // Conntrack's durations are pointers in the API; zero keeps the kernel's value.
            !field.path.starts_with("conntrack.") && parse_duration(text) == Some(Duration::ZERO)
        }
        Json::Array(list) => list.is_empty(),
        Json::Object(map) => map.is_empty(),
        Json::Bool(value) => !value && matches!(field.meaning, Meaning::Ignored(_)),
        Json::Number(number) => number.as_f64() == Some(0.0) && matches!(field.meaning, Meaning::Ignored(_)),
        Json::String(_) => false,
    }
}

/// True for the default, and for a value that kubeadm writes for an unset field.
fn is_default(field: &Field, value: &Json) -> bool {
    match field.kind {
        Kind::Gates | Kind::Any => is_unset(value) || value.to_string().trim_matches('"') == field.default,
        _ => default(field) == *value,
    }
}

/// True if kubeadm writes this value for an unset field or for a section with only unset fields.
/// Such values are zeros, empty texts, and the defaults of logging.
fn is_unset(json: &Json) -> bool {
    match json {
        Json::Object(map) => map.values().all(is_unset),
        Json::Array(list) => list.is_empty(),
        Json::String(text) => ["", "0", "0s", "5s", "text"].contains(&text.as_str()),
        Json::Number(number) => number.as_f64() == Some(0.0),
        Json::Bool(value) => !value,
        Json::Null => true,
    }
}
