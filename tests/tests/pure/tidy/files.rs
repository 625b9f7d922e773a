//! Rules for every file.

use std::ffi::OsStr;

/// The maximum number of lines of a source file.
const MAX_LINES: usize = 700;

/// The maximum number of lines of ARCHITECTURE.md.
const MAX_LINES_OF_THE_MAP: usize = 200;

#[test]
fn source_files_are_short() {
    for path in super::files() {
        if path.extension() == Some(OsStr::new("rs")) {
            let lines = super::text(&path).unwrap().lines().count();
            assert!(lines <= MAX_LINES, "{} has {lines} lines, more than {MAX_LINES}: split it", path.display());
        }
    }
}

#[test]
fn the_map_of_the_code_is_short() {
    let lines = super::text(std::path::Path::new("ARCHITECTURE.md")).unwrap().lines().count();
    assert!(lines <= MAX_LINES_OF_THE_MAP, "ARCHITECTURE.md has {lines} lines, more than {MAX_LINES_OF_THE_MAP}");
}

#[test]
fn no_file_contains_a_path_of_its_authors_machine() {
    // The words are split, so that this file itself passes the test.
    let words = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"], ["/Us", "ers/"]].map(|parts| parts.concat());
    for path in super::files() {
        let Some(text) = super::text(&path) else { continue };
        for (number, line) in text.lines().enumerate() {
            for word in &words {
                assert!(!line.contains(word), "{}:{}: contains {word}", path.display(), number + 1);
            }
        }
    }
}

#[test]
fn text_files_end_with_one_newline_and_no_line_ends_with_spaces() {
    for path in super::files() {
        let Some(text) = super::text(&path) else { continue };
        if text.is_empty() || path.extension().is_some_and(|extension| extension == "lock") {
            continue;
        }
        let shown = path.display();
        assert!(text.ends_with('\n') && !text.ends_with("\n\n"), "{shown} does not end with one newline");
        for (number, line) in text.lines().enumerate() {
            assert!(line.trim_end() == line, "{shown}:{}: spaces at the end of the line", number + 1);
        }
    }
}

#[test]
fn every_ignored_test_has_a_reason() {
    for path in super::files() {
        if path.extension() == Some(OsStr::new("rs")) {
            let text = super::text(&path).unwrap();
            let bare = ["#[ign", "ore]"].concat();
            assert!(!text.contains(&bare), "{}: a test is ignored without a reason", path.display());
        }
    }
}
