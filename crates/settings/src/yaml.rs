//! Parses YAML.

use serde_json::{Map, Value as Json};
use serde_saphyr::{DuplicateKeyPolicy, Error};

use super::{ConfigError, remark::Remark};

/// Parses a text with one document. An empty text is an empty mapping. Errors name `path`. If keys
/// are repeated, the last value is used, and the remark names the first such key.
pub(super) fn parse(path: &str, text: &str) -> Result<(Json, Option<Remark>), ConfigError> {
    let read = |duplicate_keys| {
        let options = serde_saphyr::options! { duplicate_keys: duplicate_keys };
        serde_saphyr::from_str_with_options::<Option<Json>>(text, options)
    };
    let (mut document, mut repeated) = (read(DuplicateKeyPolicy::Error), None);
    if let Err(error) = &document
        && let Error::DuplicateMappingKey { key, .. } = error.without_snippet()
    {
        let key = key.clone().unwrap_or_else(|| "a key".to_owned());
        repeated = Some(Remark::new(key, "appears more than once; the last value is used"));
        document = read(DuplicateKeyPolicy::LastWins);
    }
    let document = document.map_err(|error| match error.without_snippet() {
        Error::MultipleDocuments { .. } => ConfigError::Several(path.to_owned()),
        _ => ConfigError::Syntax { path: path.to_owned(), error: error.to_string() },
    })?;
    Ok((document.unwrap_or_else(|| Json::Object(Map::new())), repeated))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parsed(text: &str) -> Result<(Json, Option<String>), String> {
        let parsed = parse("f", text).map_err(|error| error.to_string());
        parsed.map(|(json, repeated)| (json, repeated.map(|remark| remark.setting)))
    }

    #[test]
    fn the_last_value_of_a_repeated_key_is_used_and_the_first_such_key_is_named() {
        let (json, repeated) = parsed("a: 1\nb: {c: x, c: null}\na: [true, '2']\n7: z\n").unwrap();
        assert_eq!(json, serde_json::json!({"a": [true, "2"], "b": {"c": null}, "7": "z"}));
        assert_eq!(repeated.as_deref(), Some("c"));
        assert_eq!(parsed(""), Ok((serde_json::json!({}), None)));
        assert!(parsed("a: [").unwrap_err().starts_with("f is not YAML"));
        assert!(parsed("a: {[b]: 1}").unwrap_err().starts_with("f is not YAML"));
    }

    #[test]
    fn a_text_may_have_document_markers_but_only_one_document() {
        let expected = parsed("a: 1");
        for text in ["---\na: 1\n", "# words\n---\na: 1\n...\n", "\u{feff}a: 1\r\n"] {
            assert_eq!(parsed(text), expected, "{text:?}");
        }
        assert!(parsed("a: 1\n---\nb: 2\n").unwrap_err().starts_with("f holds several YAML documents"));
    }
}
