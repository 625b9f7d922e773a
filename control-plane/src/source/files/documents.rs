//! Reads the documents of one file, and the objects in them.

use std::{collections::HashSet, iter};

use serde::Deserialize as _;
use serde_json::Value;
use serde_path_to_error::Track;

use crate::{
    model::{Event, Problem},
    objects::{ManifestHeader, Object, ObjectKey, ObjectKind},
};

/// An object in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Definition {
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
pub(super) struct Parsed<'a> {
    /// Objects in the order of the file.
    pub(super) definitions: Vec<Definition>,
    /// Whether the file has a manifest, such as an empty List or an object that is not read.
    pub(super) has_manifest: bool,
    /// What has no effect. It is known which objects it defines.
    pub(super) notes: Vec<Problem>,
    /// What cannot be read, so that it is unknown which objects it defines: the problem, and the
    /// text; `None` if the text is not known to its end.
    pub(super) faults: Vec<(Problem, Option<&'a str>)>,
}

/// A document at its first byte, or what is wrong, and whether the text ends within it.
type Piece<'a> = (usize, &'a str, Result<Value, (String, bool)>);

/// Reads a file. An error in one document does not affect other documents.
pub(super) fn parse<'a>(name: &str, bytes: &'a [u8]) -> Parsed<'a> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Parsed::unreadable(name, "the file is not UTF-8 text: save it as UTF-8".to_owned());
    };
    let mut parsed = Parsed::default();
    let text = text.trim_start_matches(BYTE_ORDER_MARK);
    let pieces: Box<dyn Iterator<Item = Piece<'_>>> = if name.ends_with(".json") {
        Box::new(read_json(text))
    } else {
        // A directive belongs to the document after it, which does not need it.
        let is_empty = |line: &str| line.trim().is_empty() || line.starts_with(['#', '%']);
        let pieces = split(text).into_iter().filter(move |(_, piece)| !piece.lines().all(is_empty));
        Box::new(pieces.map(move |(start, piece)| (start, piece, read_yaml(&text[..start], piece))))
    };
    // A document without a value has only comments.
    let pieces = pieces.filter(|(.., value)| !matches!(value, Ok(Value::Null)));
    for (index, (start, piece, value)) in pieces.enumerate() {
        let document =
            Document { before: &text[..start], text: piece, number: index + 1, origin: origin(name, index + 1) };
        match value {
            Ok(mut value) => {
                read_whole_numbers(&mut value);
                document.read("", value, &mut parsed);
            }
            Err((message, is_cut)) => {
                let problem = document.problem(String::new(), "", message);
                parsed.faults.push((problem, (!is_cut).then_some(piece)));
            }
        }
    }
    parsed
}

impl<'a> Parsed<'a> {
    /// The content of a file that cannot be read.
    pub(super) fn unreadable(name: &str, message: String) -> Self {
        let problem = Problem { object: String::new(), field: String::new(), message, origin: name.to_owned() };
        Self { faults: vec![(problem, None)], ..Self::default() }
    }

    /// The words of what cannot be read: names of what it may define; `None` if anything.
    pub(super) fn unread_words(&self) -> Option<HashSet<&'a str>> {
        let is_in_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let mut words = HashSet::new();
        for (_, text) in &self.faults {
            words.extend((*text)?.split(|c| !is_in_name(c)).map(|word| word.trim_matches(['-', '.'])));
        }
        Some(words)
    }
}

const BYTE_ORDER_MARK: char = '\u{feff}';

/// Cuts a text into documents, each with the place of its first byte. A line that begins with `---`
/// always starts a document. A line that begins with `...` always ends a document. Both rules apply
/// even inside a block scalar (YAML 1.2, 9.1.2). So documents can be cut out without being parsed.
fn split(text: &str) -> Vec<(usize, &str)> {
    let (mut documents, mut start, mut offset) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        let is_marker = |marker: &str| {
            let rest = line.trim_start_matches(BYTE_ORDER_MARK).strip_prefix(marker);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
        };
        if is_marker("---") {
            documents.push((start, &text[start..offset]));
            start = offset;
        }
        offset += line.len();
        if is_marker("...") {
            documents.push((start, &text[start..offset]));
            start = offset;
        }
    }
    documents.push((start, &text[start..]));
    documents
}

/// Reads a YAML document, as kubectl does: as JSON. So text in quotes is never a number.
fn read_yaml(before: &str, text: &str) -> Result<Value, (String, bool)> {
    // High enough for a list of a large cluster. Aliases can expand a document to any size.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: 50_000_000, max_nodes: 50_000_000 },
        with_snippet: false,
    };
    let read = |text: &str| serde_saphyr::from_str_with_options(text, options.clone());
    let text = text.trim_start_matches(BYTE_ORDER_MARK);
    // The empty lines in front make the line numbers of errors count from the start of the file.
    let read = read(text).or_else(|_| read(&format!("{}{text}", "\n".repeat(lines(before)))));
    read.map_err(|error| {
        // The message contains advice for programmers, which does not help the author of the file.
        let error = error.to_string().replace(", set DuplicateKeyPolicy in Options if acceptable", "");
        let remedy = if error.contains("invalid indentation in multiline quoted scalar") {
            "indent each line of the quoted text further than its key, as YAML 1.2 requires"
        } else {
            "correct the document"
        };
        (format!("{error}: {remedy}"), false)
    })
}

/// Reads a stream of JSON values. What follows a syntax error belongs to the same document.
fn read_json(text: &str) -> impl Iterator<Item = Piece<'_>> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    iter::from_fn(move || {
        let start = text.len() - text[values.byte_offset()..].trim_start().len();
        Some(match values.next()? {
            Ok(value) => (start, &text[start..values.byte_offset()], Ok(value)),
            Err(error) => (start, &text[start..], Err((format!("{error}: correct the document"), error.is_eof()))),
        })
    })
}

/// Turns numbers such as 80.0 into integers, as kubectl does.
fn read_whole_numbers(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(read_whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(read_whole_numbers),
        Value::Number(number) if number.is_f64() => {
            // Greater numbers are no whole numbers for the API server either.
            let whole = number.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
            #[allow(clippy::cast_possible_truncation)]
            if let Some(whole) = whole {
                *value = (whole as i64).into();
            }
        }
        _ => {}
    }
}

fn lines(text: &str) -> usize {
    text.matches('\n').count()
}

struct Document<'a> {
    /// The text in front of the document.
    before: &'a str,
    text: &'a str,
    number: usize,
    origin: String,
}

impl<'a> Document<'a> {
    fn problem(&self, object: String, field: &str, message: String) -> Problem {
        Problem { object, field: field.trim_end_matches('.').to_owned(), message, origin: self.origin.clone() }
    }

    /// Reads a list or an object. `at` is its place in the document, such as `items[2].`.
    fn read(&self, at: &str, mut value: Value, parsed: &mut Parsed<'a>) {
        if ["apiVersion", "kind", "metadata"].iter().all(|field| value.get(field).is_none()) {
            let message = "this is no manifest, because it has no apiVersion and no kind: correct it, or move it out of the folder";
            return parsed.notes.push(self.problem(String::new(), at, message.to_owned()));
        }
        if let Err((object, field, message)) = self.read_manifest(at, &mut value, parsed) {
            parsed.faults.push((self.problem(object, &field, message), Some(self.text)));
        }
    }

    /// Reads a list or an object. The error has the kind if known, the field and the message.
    fn read_manifest(
        &self,
        at: &str,
        value: &mut Value,
        parsed: &mut Parsed<'a>,
    ) -> Result<(), (String, String, String)> {
        let decoded = self.decode(at, |deserializer| ManifestHeader::deserialize(deserializer), value);
        let header = decoded.map_err(|(field, message)| (String::new(), field, message))?;
        let of_items = ObjectKind::ALL.into_iter().find(|kind| header.kind.strip_suffix("List") == Some(kind.name()));
        if header.kind == "List" || of_items.is_some() {
            parsed.has_manifest = true;
            let items = Option::<Vec<Value>>::deserialize(value["items"].take());
            let items = items.map_err(|error| (header.kind, format!("{at}items"), format!("{error}: write a list")))?;
            for (index, mut item) in items.into_iter().flatten().enumerate() {
                // Items of a typed list, such as a ServiceList, may omit their apiVersion and kind.
                if let (Some(kind), Some(fields)) = (of_items, item.as_object_mut()) {
                    fields.entry("apiVersion").or_insert_with(|| kind.api_version().into());
                    fields.entry("kind").or_insert_with(|| kind.name().into());
                }
                self.read(&format!("{at}items[{index}]."), item, parsed);
            }
            return Ok(());
        }
        let event = match identify(&header) {
            Ok(None) => {
                let (origin, kind) = (&self.origin, &header.kind);
                tracing::debug!(origin, at, kind, "objects of this kind are not read: ignored");
                // One problem is enough for a file with the Endpoints of a whole cluster.
                if (header.api_version.as_str(), kind.as_str()) == ("v1", "Endpoints")
                    && parsed.notes.iter().all(|note| !note.object.starts_with("Endpoints "))
                {
                    let message = "Endpoints are not read: write EndpointSlices with the label kubernetes.io/service-name instead";
                    let object = format!("Endpoints {}/{}", header.metadata.namespace, header.metadata.name);
                    parsed.notes.push(self.problem(object, at, message.to_owned()));
                }
                None
            }
            Ok(Some(key)) => {
                let decoded = self.decode(at, |deserializer| Object::deserialize(key.kind, deserializer), value);
                Some(decoded.map_or_else(
                    |(field, message)| Event::Undecodable { key, field, message },
                    |object| Event::Apply(Box::new(object)),
                ))
            }
            Err((Some(key), field, message)) => {
                Some(Event::Undecodable { key, field: format!("{at}{field}"), message })
            }
            Err((None, field, message)) => return Err((header.kind, format!("{at}{field}"), message)),
        };
        parsed.has_manifest = true;
        parsed.definitions.extend(event.map(|event| Definition { event, document: self.number }));
        Ok(())
    }

    /// Decodes a value. The error has the field and the message.
    fn decode<'v, T>(
        &self,
        at: &str,
        read: impl FnOnce(serde_path_to_error::Deserializer<'_, '_, &'v Value>) -> Result<T, serde_json::Error>,
        value: &'v Value,
    ) -> Result<T, (String, String)> {
        let mut track = Track::new();
        let decoded = read(serde_path_to_error::Deserializer::new(value, &mut track));
        decoded.map_err(|error| {
            let begin = lines(self.before) + 1;
            let message = format!("{error}: correct the field (the document begins at line {begin})");
            (format!("{at}{}", track.path()).trim_end_matches('.').to_owned(), message)
        })
    }
}

/// The object of a header; `None` for kinds that are not read. The error has the key if known.
fn identify(header: &ManifestHeader) -> Result<Option<ObjectKey>, (Option<ObjectKey>, &'static str, String)> {
    let ManifestHeader { api_version, kind: written, metadata } = header;
    for (field, value) in [("apiVersion", api_version), ("kind", written)] {
        if value.is_empty() {
            return Err((None, field, "the field is missing: say what kind of object this is".to_owned()));
        }
    }
    // Another API group may have a kind with the same name, which is not read.
    let group = |api_version: &str| api_version.rsplit_once('/').map(|(group, _)| group.to_owned());
    let is_named = |kind: &ObjectKind| kind.name() == written && group(kind.api_version()) == group(api_version);
    let Some(kind) = ObjectKind::ALL.into_iter().find(is_named) else { return Ok(None) };
    if metadata.name.is_empty() {
        return Err((None, "metadata.name", format!("this {written} has no name: add metadata.name")));
    }
    let key = ObjectKey::new(kind, &metadata.namespace, &metadata.name);
    if ObjectKind::of(api_version, written).is_none() {
        let message = format!("version {api_version:?} of the API is not supported: write {}", kind.api_version());
        return Err((Some(key), "apiVersion", message));
    }
    Ok(Some(key))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn keys(parsed: &Parsed<'_>) -> Vec<String> {
        parsed.definitions.iter().map(|definition| definition.event.key().to_string()).collect()
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
            assert_eq!(parsed.faults[0].0.field, "items[2].apiVersion");
        }
        let typed = "apiVersion: v1\nkind: NodeList\nitems:\n- metadata: {name: n2}\n";
        assert_eq!(keys(&parse("b.yml", typed.as_bytes())), ["Node n2"]);
    }

    #[test]
    fn a_file_without_objects_defines_nothing_and_other_text_is_a_fault() {
        for text in ["", "\n\n", "# only a comment\n---\n...\n", "---", "\u{feff}", "%YAML 1.2\n---\n"] {
            let parsed = parse("a.yaml", text.as_bytes());
            assert!(parsed.definitions.is_empty() && parsed.faults.is_empty(), "{text:?}: {parsed:?}");
            assert!(parsed.notes.is_empty() && !parsed.has_manifest, "{text:?}: {parsed:?}");
        }
        assert_eq!(parse("a.yaml", b"\xff\xfe").faults.len(), 1);
        for text in ["just words", "- a\n- b\n", "replicas: 3\n", "5"] {
            let parsed = parse("a.yaml", text.as_bytes());
            assert!(parsed.faults.is_empty() && !parsed.has_manifest, "{text:?}: {parsed:?}");
            assert!(parsed.notes[0].message.contains("this is no manifest"), "{text:?}: {parsed:?}");
        }
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
