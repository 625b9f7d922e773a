//! Texts of other parties on terminals and in logs.

use std::borrow::Cow;

/// Escapes what a terminal would interpret or hide: control characters, and characters that change
/// the direction or the shape of a text, such as U+202E.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_printable) {
        return text.into();
    }
    let mut plain = String::with_capacity(text.len());
    for character in text.chars() {
        if is_printable(character) { plain.push(character) } else { plain.extend(character.escape_default()) }
    }
    plain.into()
}

/// True for characters that a terminal shows as they are.
#[must_use]
pub fn is_printable(character: char) -> bool {
    matches!(character, ' '..='~') || character.escape_debug().len() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_interpret_or_hide_is_escaped() {
        for plain in ["", "it's \"fine\" \\ so", "Zürich 東京 → …"] {
            assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain), "{plain}");
        }
        for (hostile, escaped) in [
            ("a\u{1b}[31m", "a\\u{1b}[31m"),
            ("a\nb\r", "a\\nb\\r"),
            ("\u{9b}2J", "\\u{9b}2J"),
            ("\u{202e}drained", "\\u{202e}drained"),
            ("a\u{200b}\u{2066}\u{feff}\u{ad}", "a\\u{200b}\\u{2066}\\u{feff}\\u{ad}"),
            ("\u{2028}\u{e0001}", "\\u{2028}\\u{e0001}"),
        ] {
            assert_eq!(printable(hostile), escaped);
        }
    }
}
