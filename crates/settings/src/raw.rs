//! The settings that flags or a file contain, before they are checked together.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use ipnet::IpNet;
use serde_json::Value as Json;

use super::{
    fields::{self, FIELDS, Field, Meaning},
    remark::Remark,
    value::{Kind, Value},
    yaml::Tree,
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
    values: BTreeMap<&'static str, Value>,
}

/// Problems and notes about a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Errors, each with the field, the problem and the remedy. A file with an error cannot be
    /// used.
    pub problems: Vec<Remark>,
    /// Fields that have no effect, each with the reason.
    pub notes: Vec<Remark>,
}

impl Raw {
    /// Sets a value. Elements of a list, and feature gates, are added to the elements that are
    /// already set.
    pub fn set(&mut self, id: &'static str, value: Value) {
        match (self.values.get_mut(id), value) {
            (Some(Value::List(held)), Value::List(more)) => held.extend(more),
            (Some(Value::Any(Json::Object(held))), Value::Any(Json::Object(more))) => held.extend(more),
            (_, value) => {
                self.values.insert(id, value);
            }
        }
    }

    /// True when the setting was given.
    #[must_use]
    pub fn is_set(&self, id: &str) -> bool {
        self.values.contains_key(id)
    }

    /// True when the setting was given and differs from the default.
    #[must_use]
    pub fn is_changed(&self, id: &str) -> bool {
        let field = fields::by_id(id);
        self.values.get(id).zip(field).is_some_and(|(value, field)| !is_default(field, value))
    }

    /// The name of a setting in messages: its flag or its field.
    #[must_use]
    pub fn name(&self, id: &str) -> String {
        match (self.origin, fields::by_id(id)) {
            (Origin::Flags, Some(Field { flag, .. })) if !flag.is_empty() => format!("--{flag}"),
            _ => id.to_owned(),
        }
    }

    /// The value, or the default if the setting was not given.
    #[must_use]
    pub fn value(&self, id: &str) -> Option<Value> {
        let default = || fields::by_id(id).filter(|f| !f.default.is_empty()).and_then(|f| f.kind.parse(f.default).ok());
        self.values.get(id).cloned().or_else(default)
    }

    /// A boolean; false when unset.
    #[must_use]
    pub fn bool(&self, id: &str) -> bool {
        matches!(self.value(id), Some(Value::Bool(true)))
    }

    /// A number; 0 when unset.
    #[must_use]
    pub fn int(&self, id: &str) -> i64 {
        if let Some(Value::Int(number)) = self.value(id) { number } else { 0 }
    }

    /// A text, trimmed; empty when unset.
    #[must_use]
    pub fn text(&self, id: &str) -> String {
        if let Some(Value::Text(text)) = self.value(id) { text.trim().to_owned() } else { String::new() }
    }

    /// A list; empty when unset.
    #[must_use]
    pub fn list(&self, id: &str) -> Vec<String> {
        if let Some(Value::List(list)) = self.value(id) { list } else { Vec::new() }
    }

    /// A duration; zero when unset.
    #[must_use]
    pub fn duration(&self, id: &str) -> Duration {
        if let Some(Value::Duration(duration)) = self.value(id) { duration } else { Duration::ZERO }
    }

    /// Feature gates by name; empty when unset.
    #[must_use]
    pub fn gates(&self, id: &str) -> BTreeMap<String, bool> {
        let Some(Value::Any(Json::Object(gates))) = self.value(id) else { return BTreeMap::new() };
        gates.into_iter().filter_map(|(name, value)| Some((name, value.as_bool()?))).collect()
    }

    /// The given settings, in the order of the table.
    pub fn given(&self) -> impl Iterator<Item = (&'static Field, &Value)> {
        FIELDS.iter().filter_map(|field| Some((field, self.values.get(field.id())?)))
    }

    /// The given settings that have no effect, each with the reason.
    #[must_use]
    pub fn without_effect(&self) -> Vec<Remark> {
        let given = FIELDS.iter().filter(|field| self.is_set(field.id()));
        let why = |field: &Field| match field.meaning {
            Meaning::Ignored(why) => Some(Remark::new(self.name(field.id()), why)),
            Meaning::Used(_) => None,
        };
        given.filter_map(why).collect()
    }

    /// All settings, including defaults, as a `KubeProxyConfiguration`.
    #[must_use]
    pub fn to_json(&self) -> Json {
        let mut root = serde_json::json!({ "apiVersion": API_VERSION, "kind": KIND });
        for field in FIELDS.iter().filter(|field| !field.path.is_empty()) {
            let value = self.value(field.id()).map_or_else(|| empty(field.kind), |value| value.to_json());
            let mut place = &mut root;
            for part in field.path.split('.') {
                place = &mut place[part];
            }
            *place = value;
        }
        root
    }

    /// Reads a document, and finds all problems in it.
    pub(super) fn from_tree(tree: &Tree) -> (Self, Findings) {
        let (mut raw, mut findings) = (Self { origin: Origin::File, ..Self::default() }, Findings::default());
        let Tree::Mapping(entries) = tree else {
            let what = format!("is not a mapping; begin with `apiVersion: {API_VERSION}`");
            findings.problems.push(Remark::new("the document", what));
            return (raw, findings);
        };
        for (key, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            let found = entries.iter().rev().find(|(found, _)| found == key).map(|(_, tree)| tree.to_json());
            if found != Some(Json::from(expected)) {
                let found = found.map_or_else(|| "missing".to_owned(), |found| format!("{found} cannot be used"));
                findings.problems.push(Remark::new(key, format!("{found}; write {expected}")));
            }
        }
        raw.read_section("", entries, &mut findings);
        (raw, findings)
    }

    fn read_section(&mut self, prefix: &str, entries: &[(String, Tree)], findings: &mut Findings) {
        for (i, (key, tree)) in entries.iter().enumerate() {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            let is_repeated = entries[i + 1..].iter().any(|(later, _)| later == key);
            if is_repeated {
                findings.notes.push(Remark::new(path, "appears more than once; the last value is used"));
                continue;
            }
            if path == "apiVersion" || path == "kind" {
                continue;
            }
            // A key with a dot is not a path: `iptables.syncPeriod` at the top level is unknown.
            let field = fields::by_id(&path).filter(|field| !field.path.is_empty() && !key.contains('.'));
            match (field, tree) {
                (_, Tree::Scalar(Json::Null)) => {}
                (Some(field), tree) => self.read_field(field, tree, findings),
                (None, Tree::Mapping(inner)) if fields::is_section(&path) => self.read_section(&path, inner, findings),
                (None, _) if fields::is_section(&path) => {
                    let what = format!("{} cannot be used; write a mapping", tree.to_json());
                    findings.problems.push(Remark::new(path, what));
                }
                (None, _) => findings.notes.push(Remark::new(path, "unknown")),
            }
        }
    }

    fn read_field(&mut self, field: &'static Field, tree: &Tree, findings: &mut Findings) {
        let json = tree.to_json();
        match field.kind.from_json(&json) {
            // kube-proxy does not distinguish an empty value from an absent value, and kubeadm
            // writes all fields, including empty fields.
            Ok(_) if means_unset(field, &json) => {}
            Ok(value) if is_default(field, &value) && matches!(field.meaning, Meaning::Ignored(_)) => {}
            Ok(value) => self.set(field.path, value),
            Err(error) => findings.problems.push(Remark::new(field.path, error)),
        }
    }

    /// The IP address in a setting.
    ///
    /// # Errors
    /// The value is not an address. The error names the setting and the remedy.
    pub fn address(&self, id: &str) -> Result<IpAddr, Remark> {
        let text = self.text(id);
        let wrong = |_| Remark::new(self.name(id), format!("{text:?} is not an IP address; write one such as 0.0.0.0"));
        text.parse().map_err(wrong)
    }

    /// Parses `text`, a part of the setting `id`, as a CIDR. As in kube-proxy, the bits after the
    /// prefix are cleared: `10.244.1.5/16` becomes `10.244.0.0/16`. The kernel clears these bits in
    /// rules too. If the agent kept the bits, the rules in the kernel would never match the wanted
    /// rules.
    ///
    /// # Errors
    /// The text is not a CIDR. The error names the setting and the remedy.
    pub fn cidr(&self, id: &str, text: &str) -> Result<IpNet, Remark> {
        let text = text.trim();
        let cidr: Result<IpNet, _> = text.parse();
        let wrong = |_| Remark::new(self.name(id), format!("{text:?} is not a CIDR; write one such as 10.0.0.0/8"));
        cidr.map(|cidr| cidr.trunc()).map_err(wrong)
    }
}

/// The value that a written configuration file contains for an unset setting.
fn empty(kind: Kind) -> Json {
    match kind {
        Kind::Bool => Json::from(false),
        Kind::Int(..) => Json::from(0),
        Kind::Text | Kind::Choice(_) => Json::from(""),
        Kind::List => Json::Array(Vec::new()),
        Kind::Duration => Json::from("0s"),
        Kind::Gates | Kind::Any => Json::Object(serde_json::Map::new()),
    }
}

/// True for an empty value, which means the default. `false` and `0` are empty only in fields that
/// have no effect in Headgate: in other fields, they may be values that differ from the default.
fn means_unset(field: &Field, json: &Json) -> bool {
    match json {
        Json::Null => true,
        Json::String(text) if text.is_empty() => true,
        Json::String(_) if field.kind == Kind::Duration => {
            // The durations of conntrack are pointers in the API, and zero keeps the kernel's
            // value.
            !field.path.starts_with("conntrack.") && field.kind.from_json(json) == Ok(Value::Duration(Duration::ZERO))
        }
        Json::Array(list) => list.is_empty(),
        Json::Object(map) => map.is_empty(),
        Json::Bool(value) => !value && matches!(field.meaning, Meaning::Ignored(_)),
        Json::Number(number) => number.as_f64() == Some(0.0) && matches!(field.meaning, Meaning::Ignored(_)),
        Json::String(_) => false,
    }
}

/// True for the default, and for a value that kubeadm writes for an unset field.
fn is_default(field: &Field, value: &Value) -> bool {
    let default = field.kind.parse(field.default);
    match value {
        Value::Any(json) => is_unset(json) || json.to_string().trim_matches('"') == field.default,
        Value::Text(text) if field.default.is_empty() => text.is_empty(),
        Value::List(list) if field.default.is_empty() => list.is_empty(),
        value => !field.default.is_empty() && default.is_ok_and(|default| default == *value),
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
