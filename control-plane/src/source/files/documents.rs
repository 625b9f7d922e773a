//! Reads the documents of one file, and the objects in them.

use std::{fmt, marker::PhantomData};

use serde::{Deserialize, Deserializer, de::DeserializeSeed};
use serde_json::Value;
use serde_path_to_error::Track;
use serde_saphyr::with_deserializer_from_str_with_options;

use crate::{
    model::Event,
    objects::{Header, Object, ObjectKey, ObjectKind},
    transaction::Problem,
};

/// An object in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Definition {
    /// The object, as an event.
    pub(super) event: Event,
    /// Number of the object's document in the file, counted from 1.
    pub(super) document: usize,
}

/// The name of the place where an object is defined, such as `web.yaml, document 2`.
pub(super) fn origin(file: &str, document: usize) -> String {
    format!("{file}, document {document}")
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    /// Objects in the order of the file.
    pub(super) definitions: Vec<Definition>,
    /// The problems of documents in which the name of an object cannot be read. It is unknown which
    /// objects these documents define.
    pub(super) faults: Vec<Problem>,
}

/// A document or item that cannot be used.
struct Fault {
    field: String,
    message: String,
}

/// Reads a file. An error in one document does not affect other documents.
pub(super) fn parse(name: &str, bytes: &[u8]) -> Parsed {
    let mut parsed = Parsed::default();
    let Ok(text) = std::str::from_utf8(bytes) else {
        let message = "the file is not UTF-8 text: save it as UTF-8";
        parsed.fault(String::new(), name, Fault { field: String::new(), message: message.to_owned() });
        return parsed;
    };
    let is_json = name.ends_with(".json");
    let documents = if is_json { vec![(0, text)] } else { split(text) };
    let documents = documents.into_iter().filter(|(_, text)| !is_blank(text));
    for (index, (line, text)) in documents.enumerate() {
        let document = Document { text, first_line: line, is_json, number: index + 1, origin: origin(name, index + 1) };
        document.read(&mut parsed);
    }
    parsed
}

impl Parsed {
    fn fault(&mut self, object: String, origin: &str, fault: Fault) {
        let Fault { field, message } = fault;
        let message = format!("{message}; the objects that the file defined before stay in use");
        self.faults.push(Problem { object, field, message, origin: origin.to_owned() });
    }

    fn define(&mut self, event: Event, document: usize) {
        self.definitions.push(Definition { event, document });
    }
}

/// Cuts a text into documents, each with the number of its first line, counted from 0. A line that
/// begins with `---` always starts a document. A line that begins with `...` always ends a
/// document. Both rules apply even inside a block scalar (YAML 1.2, 9.1.2). So documents can be cut
/// out without being parsed.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let is_marker = |marker: &str| {
            let rest = line.strip_prefix(marker);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
        };
        if is_marker("---") && offset > start {
            documents.push((first_line, &text[start..offset]));
            (start, first_line) = (offset, number);
        }
        offset += line.len();
        if is_marker("...") {
            documents.push((first_line, &text[start..offset]));
            (start, first_line) = (offset, number + 1);
        }
    }
    documents.push((first_line, &text[start..]));
    documents
}

/// Whether a text contains only comments, directives and document markers.
fn is_blank(text: &str) -> bool {
    let is_blank_line =
        |line: &str| line.is_empty() || line.starts_with(['#', '%']) || line == "..." || line.starts_with("... ");
    text.trim_start_matches('\u{feff}').lines().all(|line| {
        let line = line.strip_prefix("---").unwrap_or(line);
        is_blank_line(line.trim())
    })
}

struct Document<'a> {
    text: &'a str,
    first_line: usize,
    is_json: bool,
    number: usize,
    origin: String,
}

impl Document<'_> {
    fn read(&self, parsed: &mut Parsed) {
        match self.decode(PhantomData::<Header>) {
            Ok(header) if is_list(&header.kind) => self.read_list(&header.kind, parsed),
            header => self.read_object(None, header, |kind| self.decode(OfKind(kind)), parsed),
        }
    }

    fn read_list(&self, kind: &str, parsed: &mut Parsed) {
        #[derive(Deserialize)]
        struct List {
            #[serde(default)]
            items: Option<Vec<Value>>,
        }
        let list: List = match self.decode(PhantomData) {
            Ok(list) => list,
            Err(fault) => return parsed.fault(kind.to_owned(), &self.origin, fault),
        };
        for (index, mut item) in list.items.unwrap_or_default().into_iter().enumerate() {
            // Items of a typed list, such as a ServiceList, may omit their apiVersion and kind.
            if let Some((api_version, kind)) = kind_of_items(kind)
                && let Some(fields) = item.as_object_mut()
            {
                fields.entry("apiVersion").or_insert_with(|| api_version.into());
                fields.entry("kind").or_insert_with(|| kind.into());
            }
            let header = Header::deserialize(&item).map_err(|error| {
                let message = format!("{error}: write an object with apiVersion, kind and metadata");
                Fault { field: String::new(), message }
            });
            let decode = |kind| {
                let mut track = Track::new();
                let object = Object::deserialize(kind, serde_path_to_error::Deserializer::new(&item, &mut track));
                object.map_err(|error| Fault {
                    field: track.path().to_string(),
                    message: format!("{error}: correct the field"),
                })
            };
            self.read_object(Some(index), header, decode, parsed);
        }
    }

    /// Reads an object. `index` is the place of the object in a list; `None` if the object is the
    /// whole document.
    fn read_object(
        &self,
        index: Option<usize>,
        header: Result<Header, Fault>,
        decode: impl FnOnce(ObjectKind) -> Result<Object, Fault>,
        parsed: &mut Parsed,
    ) {
        let at = |Fault { field, message }| match index {
            None => Fault { field, message },
            Some(index) => {
                let dot = if field.is_empty() { "" } else { "." };
                Fault { field: format!("items[{index}]{dot}{field}"), message }
            }
        };
        let header = match header {
            Ok(header) => header,
            Err(fault) => return parsed.fault(String::new(), &self.origin, at(fault)),
        };
        match identify(&header) {
            Ok(None) => {
                let (api_version, kind, origin) = (header.api_version, header.kind, &self.origin);
                tracing::debug!(origin, index, api_version, kind, "objects of this kind are not read: ignored");
            }
            Ok(Some(key)) => {
                let decoded = decode(key.kind).map_err(at);
                parsed.define(decoded.map_or_else(|fault| undecodable(key, fault), apply), self.number);
            }
            Err((Some(key), fault)) => parsed.define(undecodable(key, at(fault)), self.number),
            Err((None, fault)) => parsed.fault(header.kind, &self.origin, at(fault)),
        }
    }

    /// Decodes the document. YAML that cannot be decoded is read a second time, to find the field
    /// and the line of the error.
    fn decode<S, T>(&self, seed: S) -> Result<T, Fault>
    where
        S: for<'de> DeserializeSeed<'de, Value = T> + Copy,
    {
        if self.is_json {
            let mut deserializer = serde_json::Deserializer::from_str(self.text);
            let mut track = Track::new();
            let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
            let decoded = seed.deserialize(tracked).and_then(|value| deserializer.end().map(|()| value));
            return decoded.map_err(|error| Fault::new(track.path().to_string(), &error));
        }
        let plain = with_deserializer_from_str_with_options(self.text, options(), |deserializer| {
            seed.deserialize(deserializer)
        });
        plain.or_else(|_| {
            // The empty lines in front make the line numbers of errors count from the start of the
            // file.
            let text = format!("{}{}", "\n".repeat(self.first_line), self.text);
            let mut track = Track::new();
            let tracked = with_deserializer_from_str_with_options(&text, options(), |deserializer| {
                seed.deserialize(serde_path_to_error::Deserializer::new(deserializer, &mut track))
            });
            tracked.map_err(|error| Fault::new(track.path().to_string(), error.without_snippet()))
        })
    }
}

/// Decodes an object of this kind.
#[derive(Clone, Copy)]
struct OfKind(ObjectKind);

impl<'de> DeserializeSeed<'de> for OfKind {
    type Value = Object;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Object, D::Error> {
        Object::deserialize(self.0, deserializer)
    }
}

impl Fault {
    fn new(path: String, error: &impl fmt::Display) -> Self {
        let field = if path == "." { String::new() } else { path };
        // The message contains advice for programmers, which does not help the author of the file.
        let error = error.to_string().replace(", set DuplicateKeyPolicy in Options if acceptable", "");
        Self { field, message: format!("{error}: correct the document") }
    }
}

/// Limits the number of YAML nodes, because aliases can expand a small document to any size. The
/// limits are high enough for one list from a large cluster.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: 50_000_000, max_nodes: 50_000_000 },
        with_snippet: false,
    }
}

fn is_list(kind: &str) -> bool {
    kind == "List" || kind_of_items(kind).is_some()
}

/// `apiVersion` and `kind` of the items of a typed list.
fn kind_of_items(list: &str) -> Option<(&'static str, &'static str)> {
    match list {
        "ServiceList" => Some(("v1", "Service")),
        "NodeList" => Some(("v1", "Node")),
        "EndpointSliceList" => Some(("discovery.k8s.io/v1", "EndpointSlice")),
        "ServiceCIDRList" => Some(("networking.k8s.io/v1", "ServiceCIDR")),
        _ => None,
    }
}

fn apply(object: Object) -> Event {
    Event::Apply(Box::new(object))
}

fn undecodable(key: ObjectKey, fault: Fault) -> Event {
    Event::Undecodable { key, field: fault.field, message: fault.message }
}

/// The object that a header names; `None` for kinds that are not read. The error contains the key
/// of the object if the key is known.
fn identify(header: &Header) -> Result<Option<ObjectKey>, (Option<ObjectKey>, Fault)> {
    let fault = |field: &str, message: String| Fault { field: field.to_owned(), message };
    for (field, value) in [("apiVersion", &header.api_version), ("kind", &header.kind)] {
        if value.is_empty() {
            return Err((None, fault(field, "the field is missing: say what kind of object this is".to_owned())));
        }
    }
    let kind = ObjectKind::of(&header.api_version, &header.kind);
    let of_other_version = || {
        ObjectKind::ALL.into_iter().find(|kind| kind.name() == header.kind && shares_group(*kind, &header.api_version))
    };
    let Some(kind) = kind.or_else(of_other_version) else { return Ok(None) };
    let names = &header.metadata;
    if names.name.is_empty() {
        return Err((None, fault("metadata.name", format!("this {} has no name: add metadata.name", kind.name()))));
    }
    let key = ObjectKey::new(kind, &names.namespace, &names.name);
    if ObjectKind::of(&header.api_version, &header.kind).is_none() {
        let message =
            format!("version {:?} of the API is not supported: write {}", header.api_version, api_version(kind));
        return Err((Some(key), fault("apiVersion", message)));
    }
    Ok(Some(key))
}

fn api_version(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::Service | ObjectKind::Node | ObjectKind::Pod => "v1",
        ObjectKind::EndpointSlice => "discovery.k8s.io/v1",
        ObjectKind::ServiceCidr => "networking.k8s.io/v1",
    }
}

/// Whether an `apiVersion` belongs to the API group of the kind. Another group may have a kind with
/// the same name. Objects of the other group are not read.
fn shares_group(kind: ObjectKind, written: &str) -> bool {
    let group = |api_version: &str| api_version.rsplit_once('/').map(|(group, _)| group.to_owned());
    group(api_version(kind)) == group(written)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: prod}\n";

    fn keys(parsed: &Parsed) -> Vec<String> {
        parsed.definitions.iter().map(|definition| definition.event.key().to_string()).collect()
    }

    #[test]
    fn an_error_in_one_document_does_not_affect_the_others() {
        let text = format!(
            "# head\n---\n{SERVICE}---\nkind: [broken\n--- # third\n{{apiVersion: v1, kind: Node, metadata: {{name: n1}}}}\n---\n---\n\
             apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: web}}\n"
        );
        let parsed = parse("a.yaml", text.as_bytes());
        assert_eq!(keys(&parsed), ["Service prod/web", "Node n1"]);
        assert_eq!(parsed.definitions[1].document, 3);
        assert_eq!(parsed.faults.len(), 1);
        assert_eq!(parsed.faults[0].origin, "a.yaml, document 2");
        assert!(
            parsed.faults[0].message.contains('7') || parsed.faults[0].message.contains('8'),
            "{:?}",
            parsed.faults
        );
    }

    #[test]
    fn an_end_marker_ends_a_document() {
        let node = |name: &str| format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n");
        let text = node("n1") + "...\n" + &node("n2") + "... # that was the second\n---\n" + &node("n3") + "...";
        let parsed = parse("a.yaml", text.as_bytes());
        assert_eq!(keys(&parsed), ["Node n1", "Node n2", "Node n3"], "{parsed:?}");
        assert_eq!(parsed.faults.len(), 0);
        assert_eq!(parsed.definitions[2].document, 3);
    }

    #[test]
    fn the_message_for_a_duplicate_key_omits_advice_for_programmers() {
        let parsed = parse("a.yaml", b"apiVersion: v1\nkind: Service\nkind: Node\nmetadata: {name: a}\n");
        let message = &parsed.faults[0].message;
        assert!(message.contains("duplicate mapping key: kind at line 3"), "{message}");
    }

    #[test]
    fn a_wrong_field_is_named_with_its_line() {
        let text = format!("{SERVICE}spec:\n  clusterIP: 10.0.0.1\n  ports:\n  - port: eighty\n");
        let parsed = parse("a.yaml", format!("{SERVICE}---\n{text}").as_bytes());
        let Event::Undecodable { key, field, message } = &parsed.definitions[1].event else { panic!("{parsed:?}") };
        assert_eq!((key.to_string().as_str(), field.as_str()), ("Service prod/web", "spec.ports[0].port"));
        assert!(message.contains("line 11"), "{message}");
    }

    #[test]
    fn lists_and_json_are_read() {
        let list = r#"{"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": 5}},
            {"kind": "Pod"}]}"#;
        for name in ["a.json", "a.yaml"] {
            let parsed = parse(name, list.as_bytes());
            assert_eq!(keys(&parsed), ["Node n1", "Service default/s"]);
            let Event::Undecodable { field, .. } = &parsed.definitions[1].event else { panic!("{parsed:?}") };
            assert_eq!(field, "items[1].spec.ports");
            assert_eq!(parsed.faults[0].field, "items[2].apiVersion");
        }
        let typed = "apiVersion: v1\nkind: NodeList\nitems:\n- metadata: {name: n2}\n";
        assert_eq!(keys(&parse("b.yml", typed.as_bytes())), ["Node n2"]);
    }

    #[test]
    fn a_file_without_objects_defines_nothing_and_other_text_is_a_fault() {
        for text in ["", "\n\n", "# only a comment\n---\n...\n", "---", "\u{feff}", "%YAML 1.2\n---\n"] {
            let parsed = parse("a.yaml", text.as_bytes());
            assert!(parsed.definitions.is_empty() && parsed.faults.is_empty(), "{text:?}: {parsed:?}");
        }
        assert_eq!(parse("a.yaml", b"\xff\xfe").faults.len(), 1);
        assert_eq!(parse("a.yaml", b"just words").faults.len(), 1);
    }

    #[test]
    fn kinds_of_other_groups_are_ignored_and_other_versions_are_errors() {
        let foreign = "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: x}\n";
        assert!(parse("a.yaml", foreign.as_bytes()).definitions.is_empty());
        let old = "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: x}\n";
        let parsed = parse("a.yaml", old.as_bytes());
        assert!(matches!(&parsed.definitions[0].event, Event::Undecodable { field, .. } if field == "apiVersion"));
    }
}
