//! Label and field selectors: what the real server accepts, and its refusals.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    kinds::Kind,
    status::{Failure, bad_request},
};

/// What a list or watch asks for: a conjunction of label and field requirements. Empty matches everything.
#[derive(Debug, Clone, Default)]
pub(super) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<FieldRequirement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    Missing,
    Greater(i64),
    Less(i64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FieldRequirement {
    path: String,
    equal: bool,
    value: String,
}

impl Selector {
    /// Parses both query parameters; either may be empty.
    /// Fails with 400 where the text is no selector, or names a field that is not among `indexed_fields`.
    pub(super) fn parse(indexed_fields: &[&str], labels: &str, fields: &str) -> Result<Self, Failure> {
        let labels =
            split_outside_parentheses(labels).into_iter().map(parse_label_requirement).collect::<Result<_, _>>()?;
        let fields = split_unescaped_commas(fields)
            .iter()
            .map(|term| parse_field_requirement(indexed_fields, term))
            .collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    /// Whether nothing is asked for; then a list can say how many items remain.
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether an object is selected.
    pub(super) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).and_then(Value::as_str);
        self.labels.iter().all(|requirement| requirement.matches(label(&requirement.key)))
            && self
                .fields
                .iter()
                .all(|requirement| (field_value(object, &requirement.path) == requirement.value) == requirement.equal)
    }
}

impl Requirement {
    fn matches(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match &self.test {
            Test::In(allowed) => value.is_some_and(|value| allowed.contains(value)),
            // As in the real server, "not" also selects objects without the label.
            Test::NotIn(refused) => value.is_none_or(|value| !refused.contains(value)),
            Test::Exists => value.is_some(),
            Test::Missing => value.is_none(),
            Test::Greater(bound) => number().is_some_and(|number| number > *bound),
            Test::Less(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    if parts == [""] { Vec::new() } else { parts }
}

fn parse_label_requirement(term: &str) -> Result<Requirement, Failure> {
    let refuse = |why: &str| bad_request(&format!("unable to parse requirement: {why} in \"{term}\""));
    let requirement = |key: &str, test: Test| {
        let key = key.trim();
        if is_label_key(key) {
            Ok(Requirement { key: key.to_owned(), test })
        } else {
            Err(refuse(&format!("<nil>: Invalid value: \"{key}\": name part must be a qualified name")))
        }
    };
    let one = |value: &str| {
        let value = value.trim();
        if is_label_value(value) {
            Ok(BTreeSet::from([value.to_owned()]))
        } else {
            Err(refuse(&format!("values[0]: Invalid value: \"{value}\"")))
        }
    };
    let integer = |value: &str| value.trim().parse::<i64>().map_err(|_| refuse("the value must be an integer"));
    if let Some((key, value)) = term.split_once("!=") {
        return requirement(key, Test::NotIn(one(value)?));
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return requirement(key, Test::In(one(value)?));
    }
    if let Some((key, value)) = term.split_once('>') {
        return requirement(key, Test::Greater(integer(value)?));
    }
    if let Some((key, value)) = term.split_once('<') {
        return requirement(key, Test::Less(integer(value)?));
    }
    if let Some(key) = term.strip_prefix('!') {
        return requirement(key, Test::Missing);
    }
    let Some((head, values)) = term.split_once('(') else {
        return requirement(term, Test::Exists);
    };
    let values = values.trim_end().strip_suffix(')').ok_or_else(|| refuse("found '', expected: ',' or ')'"))?;
    let values: BTreeSet<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
    if let Some(bad) = values.iter().find(|value| !is_label_value(value)) {
        return Err(refuse(&format!("values: Invalid value: \"{bad}\"")));
    }
    match head.split_whitespace().collect::<Vec<_>>().as_slice() {
        [key, "in"] => requirement(key, Test::In(values)),
        [key, "notin"] => requirement(key, Test::NotIn(values)),
        _ => Err(refuse("expected: in, notin, =, ==, !=, gt, lt")),
    }
}

fn is_label_value(text: &str) -> bool {
    let edge = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_alphanumeric());
    text.is_empty()
        || (text.len() <= 63
            && edge(text.chars().next())
            && edge(text.chars().next_back())
            && text.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter)))
}

fn is_label_key(text: &str) -> bool {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let prefix_fits = prefix.is_none_or(|prefix| {
        !prefix.is_empty()
            && prefix
                .chars()
                .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-.".contains(letter))
    });
    prefix_fits && !name.is_empty() && is_label_value(name)
}

fn split_unescaped_commas(text: &str) -> Vec<String> {
    let (mut parts, mut part, mut letters) = (Vec::new(), String::new(), text.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                part.push('\\');
                part.extend(letters.next());
            }
            ',' => parts.push(std::mem::take(&mut part)),
            other => part.push(other),
        }
    }
    parts.push(part);
    // The real parser lets empty terms pass.
    parts.retain(|part| !part.is_empty());
    parts
}

fn unescape(text: &str) -> Result<String, Failure> {
    let (mut plain, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        match (letter, letter == '\\') {
            (_, true) => match letters.next() {
                Some(escaped @ ('\\' | ',' | '=')) => plain.push(escaped),
                other => {
                    let sequence = other.map_or_else(|| "\\".to_owned(), |other| format!("\\{other}"));
                    return Err(bad_request(&format!("invalid field selector: invalid escape sequence: {sequence}")));
                }
            },
            ('=', _) => return Err(bad_request("invalid field selector: unescaped '=' in the value")),
            (other, _) => plain.push(other),
        }
    }
    Ok(plain)
}

fn parse_field_requirement(indexed_fields: &[&str], term: &str) -> Result<FieldRequirement, Failure> {
    let (path, equal, value) = if let Some((path, value)) = term.split_once("!=") {
        (path, false, value)
    } else if let Some((path, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        (path, true, value)
    } else {
        return Err(bad_request(&format!("invalid selector: '{term}'; can't understand '{term}'")));
    };
    if !indexed_fields.contains(&path) {
        return Err(bad_request(&format!("field label not supported: {path}")));
    }
    Ok(FieldRequirement { path: path.to_owned(), equal, value: unescape(value)? })
}

/// The fields by which the real server lets each kind be selected. Services by their specs from 1.31 on.
pub(super) fn indexed_fields(kind: Kind, service_field_selectors: bool) -> &'static [&'static str] {
    match kind {
        Kind::Service if service_field_selectors => {
            &["metadata.name", "metadata.namespace", "spec.clusterIP", "spec.type"]
        }
        Kind::Service => &["metadata.name", "metadata.namespace"],
        Kind::EndpointSlice => &["metadata.name", "metadata.namespace"],
        Kind::Node => &["metadata.name", "spec.unschedulable"],
        Kind::ServiceCidr => &["metadata.name"],
    }
}

fn field_value(object: &Value, path: &str) -> String {
    let found = path.split('.').try_fold(object, |value, step| value.get(step));
    match found {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(flag)) => flag.to_string(),
        // Go's zero values: an absent boolean reads as false, an absent string as empty.
        _ if path == "spec.unschedulable" => "false".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn selects(labels: &str, fields: &str) -> bool {
        let object = json!({
            "metadata": {"name": "web", "namespace": "shop", "labels": {"app": "web", "tier": "front", "weight": "7"}},
            "spec": {"clusterIP": "None"},
        });
        Selector::parse(indexed_fields(Kind::Service, true), labels, fields).unwrap().matches(&object)
    }

    #[test]
    fn label_operators() {
        let selecting = [
            "",
            "app",
            "app=web",
            "app==web",
            "app!=db",
            "missing!=x",
            "!missing",
            "app in (web, db)",
            "app in (web),tier",
            "app notin (db,cache)",
            "missing notin (x)",
            "weight>6",
            "weight<8",
            "app=web,tier=front",
        ];
        for text in selecting {
            assert!(selects(text, ""), "{text}");
        }
        let refusing = [
            "missing",
            "app=db",
            "app!=web",
            "!app",
            "app in (db)",
            "app notin (web)",
            "weight>7",
            "app=web,tier=back",
        ];
        for text in refusing {
            assert!(!selects(text, ""), "{text}");
        }
    }

    #[test]
    fn field_operators() {
        for text in ["", "metadata.name=web", "metadata.name==web,metadata.namespace!=x", "spec.clusterIP=None"] {
            assert!(selects("", text), "{text}");
        }
        for text in ["metadata.name=db", "metadata.namespace!=shop", "spec.clusterIP!=None"] {
            assert!(!selects("", text), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_400() {
        for labels in
            ["app in (web", "app in web)", "a b", "=x", "app=web=x", "-app", "app in", "app=ä", ",", "weight>x"]
        {
            let refused = Selector::parse(indexed_fields(Kind::Service, true), labels, "");
            // "app in" alone is a key with a blank in it.
            assert_eq!(refused.err().map(|failure| failure.code), Some(400), "{labels}");
        }
        for fields in ["spec.foo=x", "metadata.name", "metadata.name=a\\b", "metadata.name=a=b"] {
            assert_eq!(
                Selector::parse(indexed_fields(Kind::Service, true), "", fields).err().map(|failure| failure.code),
                Some(400),
                "{fields}"
            );
        }
        assert!(Selector::parse(indexed_fields(Kind::Node, true), "", "spec.clusterIP=None").is_err());
    }
}
