//! Every behaviour has a test or a stated reason, and docs/behaviours.md is up to date.

use headgate_tests::behaviours::{self, Column, rows::SECTIONS, scan};

/// Renders the expected docs/behaviours.md. Panics with the first error in the rows or the tests.
fn page() -> String {
    let of = |column| (column, scan::scan(super::root(), column).unwrap_or_else(|error| panic!("{error}")));
    behaviours::render(&Column::ALL.map(of)).unwrap_or_else(|bare| panic!("{bare}"))
}

#[test]
fn every_behaviour_has_a_test_or_a_reason_and_the_page_shows_it() {
    let committed = std::fs::read_to_string(super::root().join("docs/behaviours.md")).unwrap_or_default();
    assert!(page() == committed, "docs/behaviours.md is stale: run `make test`, then `make behaviours`, and commit it");
}

#[test]
fn every_number_has_one_row() {
    let mut numbers: Vec<u8> = SECTIONS.iter().flat_map(|section| &section.rows).map(|row| row.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=115).collect::<Vec<u8>>());
}
