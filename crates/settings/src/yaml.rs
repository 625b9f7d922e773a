//! Parses YAML into a tree that keeps repeated keys, unlike a map.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;

/// A YAML document, or a part of a document.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tree {
    /// A scalar.
    Scalar(Json),
    /// A sequence.
    Sequence(Vec<Tree>),
    /// A mapping with all its entries in order, including repeated keys.
    Mapping(Vec<(String, Tree)>),
}

/// Why a text cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mistake {
    /// The text is not YAML. Contains the place and the reason.
    Syntax(String),
    /// The text has several documents.
    Several,
}

impl Tree {
    /// Parses a text with one document. An empty text is an empty mapping.
    pub(super) fn parse(text: &str) -> Result<Self, Mistake> {
        let options = serde_saphyr::options! { duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins };
        let tree: Option<Self> =
            serde_saphyr::from_str_with_options(text, options).map_err(|error| match error.without_snippet() {
                serde_saphyr::Error::MultipleDocuments { .. } => Mistake::Several,
                _ => Mistake::Syntax(error.to_string()),
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

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_unit<E: Error>(self) -> Result<Tree, E> {
        Ok(Tree::Scalar(Json::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = access.next_element()? {
            elements.push(element);
        }
        Ok(Tree::Sequence(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut entries = Vec::new();
        while let Some((Key(key), tree)) = access.next_entry()? {
            entries.push((key, tree));
        }
        Ok(Tree::Mapping(entries))
    }
}

/// A key of a mapping. YAML also allows numbers and booleans as keys; these become text.
struct Key(String);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Tree::deserialize(deserializer)? {
            Tree::Scalar(Json::String(text)) => Ok(Self(text)),
            Tree::Scalar(json) => Ok(Self(json.to_string())),
            Tree::Sequence(_) | Tree::Mapping(_) => Err(D::Error::custom("a key must be text")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn repeated_keys_are_kept() {
        let tree = Tree::parse("a: 1\nb: {c: x, c: null}\na: [true, '2']\n7: z\n").unwrap();
        let Tree::Mapping(entries) = &tree else { panic!("{tree:?}") };
        let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "b", "a", "7"]);
        assert_eq!(tree.to_json(), serde_json::json!({"a": [true, "2"], "b": {"c": null}, "7": "z"}));
        assert_eq!(Tree::parse("").unwrap(), Tree::Mapping(vec![]));
        assert!(matches!(Tree::parse("a: ["), Err(Mistake::Syntax(_))));
    }

    #[test]
    fn a_text_may_have_document_markers_but_only_one_document() {
        let expected = Tree::parse("a: 1").unwrap();
        for text in ["---\na: 1\n", "# words\n---\na: 1\n...\n", "\u{feff}a: 1\r\n"] {
            assert_eq!(Tree::parse(text), Ok(expected.clone()), "{text:?}");
        }
        assert_eq!(Tree::parse("a: 1\n---\nb: 2\n"), Err(Mistake::Several));
    }
}
