//! Checks the licences, bans and sources of `deny.toml` without cargo-deny.

use std::collections::BTreeSet;

use super::metadata::Metadata;

/// The strings of `key = [...]` in a section of deny.toml, without comments.
fn list(section: &str, key: &str) -> BTreeSet<String> {
    let text = super::text("deny.toml".as_ref()).unwrap();
    let after =
        text.split_once(&format!("\n[{section}]\n")).unwrap_or_else(|| panic!("deny.toml has no [{section}]")).1;
    let section = after.split("\n[").next().unwrap();
    let content = section.split_once(&format!("\n{key} = [\n")).unwrap_or_else(|| panic!("no {key} in {section}")).1;
    let lines = content.lines().take_while(|line| *line != "]").filter(|line| !line.trim_start().starts_with('#'));
    lines.flat_map(|line| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Whether the allowed licences satisfy a licence expression. `/` is an old form of OR.
fn is_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced =
        expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ").replace(" WITH ", "\u{a0}WITH\u{a0}");
    let mut words = spaced.split([' ']).filter(|word| !word.is_empty()).peekable();
    let met = alternatives(&mut words, allowed);
    assert!(words.peek().is_none(), "licence expression {expression:?} cannot be read");
    met
}

fn alternatives<'b>(
    words: &mut std::iter::Peekable<impl Iterator<Item = &'b str>>,
    allowed: &BTreeSet<String>,
) -> bool {
    let mut met = conjunction(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= conjunction(words, allowed);
    }
    met
}

fn conjunction<'b>(words: &mut std::iter::Peekable<impl Iterator<Item = &'b str>>, allowed: &BTreeSet<String>) -> bool {
    let mut met = single(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= single(words, allowed);
    }
    met
}

fn single<'b>(words: &mut std::iter::Peekable<impl Iterator<Item = &'b str>>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let met = alternatives(words, allowed);
            assert_eq!(words.next(), Some(")"), "a licence expression without its closing parenthesis");
            met
        }
        Some(name) => allowed.contains(&name.replace('\u{a0}', " ")),
        None => panic!("a licence expression ends too early"),
    }
}

#[test]
fn licence_expressions_are_evaluated() {
    let allowed = BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned));
    for met in [
        "MIT",
        "MIT/GPL-3.0",
        "GPL-3.0 OR MIT",
        "MIT AND ISC",
        "(GPL-3.0 OR ISC) AND MIT",
        "Apache-2.0 WITH LLVM-exception",
    ] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for unmet in ["GPL-3.0", "MIT AND GPL-3.0", "Apache-2.0", "(MIT OR ISC) AND GPL-3.0", "GPL-3.0 OR MIT AND GPL-2.0"]
    {
        assert!(!is_met(unmet, &allowed), "{unmet}");
    }
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let allowed = list("licenses", "allow");
    assert!(allowed.contains("MIT") && allowed.contains("Apache-2.0"), "{allowed:?}");
    for word in ["GPL", "MPL", "SSPL", "BUSL", "CDDL", "EPL"] {
        assert!(
            !allowed.iter().any(|licence| licence.contains(word)),
            "deny.toml allows {word}, which is not permissive"
        );
    }
    let text = super::text("deny.toml".as_ref()).unwrap();
    let excepted =
        |name: &str, licence: &str| text.contains(&format!("{{ crate = \"{name}\", allow = [\"{licence}\"] }}"));
    for package in Metadata::read().used() {
        let licence = package.license.as_deref().unwrap_or_default();
        assert!(!licence.is_empty(), "{} {} states no licence", package.name, package.version);
        assert!(
            is_met(licence, &allowed) || excepted(&package.name, licence),
            "{} {} is under {licence}, which deny.toml does not allow",
            package.name,
            package.version
        );
    }
}

#[test]
fn no_dependency_is_banned_or_from_outside_the_registry() {
    let banned = list("bans", "deny");
    assert!(banned.contains("aws-lc-rs"), "{banned:?}");
    let metadata = Metadata::read();
    let members = metadata.members();
    for package in metadata.used() {
        assert!(!banned.contains(&package.name), "{} is banned by deny.toml", package.name);
        match package.source.as_deref() {
            None => {
                assert!(members.contains(package.name.as_str()), "{} is not a package of the workspace", package.name);
            }
            Some(source) => assert!(source.starts_with("registry+"), "{} comes from {source}", package.name),
        }
    }
}
