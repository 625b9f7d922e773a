//! The page.

use std::fmt::Write as _;

use super::rows::{Row, SECTIONS};
use super::scan::Evidence;

const HEAD: &str = "<!-- Written by `make behaviours` from the tests. Do not edit. -->
# Behaviours

What users of a Kubernetes service proxy rely on, row by row, and the tests that prove it. The tests of
[`packets.rs`](../tests/tests/packets.rs) send real packets through the real kernel, over IPv4 and IPv6, once for each column of the suite:
the legacy and the nft variant of iptables, each laid out classically and compactly.

This page is made from a run in which all the tests that it names passed: `make test`, then `make behaviours`. A test says in a comment
`// rows: 31, 36` above its attributes which rows it proves; cases of the packet table say so in the table.

## iptables
";

const TAIL: &str = "
## ipvs, nftables, userspace

Not built yet. Every row applies to them as well, but for those that say whose they are.
";

/// The page, given the tests of each row.
///
/// # Errors
/// Rows without a test or a stated reason, one a line.
pub fn render(evidence: &Evidence) -> Result<String, String> {
    let mut page = HEAD.to_owned();
    let mut bare = String::new();
    for section in SECTIONS {
        let _ = write!(
            page,
            "\n### {}\n\n| row | behaviour | tests | result |\n| --- | --- | --- | --- |\n",
            section.title
        );
        for row in section.rows {
            match cells(row, evidence) {
                Some((tests, result)) => {
                    let _ = writeln!(page, "| {} | {} | {tests} | {result} |", row.number, row.behaviour);
                }
                None => {
                    let _ =
                        writeln!(bare, "row {} has neither a test nor a stated reason: {}", row.number, row.behaviour);
                }
            }
        }
    }
    page.push_str(TAIL);
    if bare.is_empty() { Ok(page) } else { Err(bare) }
}

fn cells(row: &Row, evidence: &Evidence) -> Option<(String, &'static str)> {
    let tests = evidence.get(&row.number).map(Vec::as_slice).unwrap_or_default();
    let link = |test: &super::ProvingTest| format!("[`{}`](../{})", test.name, test.file.display());
    let links: Vec<String> = tests.iter().map(link).collect();
    match (links.is_empty(), row.iptables_reason) {
        (true, None) => None,
        (true, Some(reason)) => Some((format!("none: {reason}"), "–")),
        (false, None) => Some((links.join(", "), "passes")),
        (false, Some(reason)) => Some((format!("{}; {reason}", links.join(", ")), "passes")),
    }
}
