//! Parses YAML into a tree that keeps repeated keys, unlike a map.

use std::fmt;

use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, Visitor},
};
use serde_json::Value as Json;

use super::ConfigError;

/// A YAML document, or a part of a document.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "a key must be text")]
pub(super) enum Tree {
    /// A sequence.
    Sequence(Vec<Tree>),
    /// A mapping with all its entries in order, including repeated keys.
    #[serde(deserialize_with = "entries")]
    Mapping(Vec<(String, Tree)>),
    /// A scalar.
    Scalar(Json),
}

impl Tree {
    /// Parses a text with one document. An empty text is an empty mapping. Errors name `path`.
    pub(super) fn parse(path: &str, text: &str) -> Result<Self, ConfigError> {
        let options = serde_saphyr::options! { duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins };
        let tree: Option<Self> =
            serde_saphyr::from_str_with_options(text, options).map_err(|error| match error.without_snippet() {
                serde_saphyr::Error::MultipleDocuments { .. } => ConfigError::Several(path.to_owned()),
                _ => ConfigError::Syntax { path: path.to_owned(), error: error.to_string() },
            })?;
        Ok(tree.unwrap_or_else(|| Self::Mapping(Vec::new())))
    }

    /// Converts the tree to JSON. The last value of a repeated key is used.
    pub(super) fn to_json(&self) -> Json {
        match self {
            Self::Scalar(json) => json.clone(),
            Self::Sequence(elements) => elements.iter().map(Self::to_json).collect(),
            Self::Mapping(entries) => entries.iter().map(|(key, tree)| (key.clone(), tree.to_json())).collect(),
        }
    }
}

fn entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, Tree)>, D::Error> {
    deserializer.deserialize_map(Entries)
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(String, Tree)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, tree)) = access.next_entry()? {
            // YAML also allows numbers and booleans as keys; these become text.
            let key = match key {
                Tree::Scalar(Json::String(text)) => text,
                Tree::Scalar(json) => json.to_string(),
                Tree::Sequence(_) | Tree::Mapping(_) => return Err(A::Error::custom("a key must be text")),
            };
            entries.push((key, tree));
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(text: &str) -> Result<Tree, String> {
        Tree::parse("f", text).map_err(|error| error.to_string())
    }

    #[test]
    fn repeated_keys_are_kept() {
        let tree = parse("a: 1\nb: {c: x, c: null}\na: [true, '2']\n7: z\n").unwrap();
        let Tree::Mapping(entries) = &tree else { panic!("{tree:?}") };
        let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "b", "a", "7"]);
        assert_eq!(tree.to_json(), serde_json::json!({"a": [true, "2"], "b": {"c": null}, "7": "z"}));
        assert_eq!(parse("").unwrap(), Tree::Mapping(vec![]));
        assert!(parse("a: [").unwrap_err().starts_with("f is not YAML"));
        assert!(parse("a: {[b]: 1}").unwrap_err().contains("a key must be text"));
    }

    #[test]
    fn a_text_may_have_document_markers_but_only_one_document() {
        let expected = parse("a: 1");
        for text in ["---\na: 1\n", "# words\n---\na: 1\n...\n", "\u{feff}a: 1\r\n"] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
        assert!(parse("a: 1\n---\nb: 2\n").unwrap_err().starts_with("f holds several YAML documents"));
    }
}
