//! Renders the page.

use std::fmt::Write as _;

use super::rows::{Column, Row, SECTIONS};
use super::scan::Evidence;

const HEAD: &str = "<!-- Written by `make behaviours` from the tests. Do not edit. -->
# Behaviours

This page lists the behaviours that users of a Kubernetes service proxy rely on, and the tests that show each of them.
The tests of [`packets.rs`](../tests/tests/kernel/packets.rs) send real packets through the real kernel, over IPv4 and
IPv6, for seven backends: the legacy and the nft variant of iptables, each in the classic and the compact layout, IPVS,
nftables, and userspace. IPVS runs inside User-Mode Linux, with its own kernel.

`make behaviours` writes this page after `make test`. It writes the page only if all tests on the page have passed. A
test lists its rows in a comment `// rows: 31, 36` above its attributes, or in `// rows of ipvs: 102` for one backend
alone. Cases of the packet table (`the_table`) and scenarios that share a cluster list their rows in `tests/src/cases`.
Their tests stand here with the group of the case or the name of the scenario. A failure names each case and scenario.
";

/// Renders the page from the tests of each row, for each backend.
///
/// # Errors
/// Some rows have neither a test nor a reason. The error lists them, one per line.
pub fn render(columns: &[(Column, Evidence)]) -> Result<String, String> {
    let mut page = HEAD.to_owned();
    let mut bare = String::new();
    for (column, evidence) in columns {
        let _ = write!(page, "\n## {}\n", column.name());
        for section in SECTIONS.iter() {
            let _ = write!(
                page,
                "\n### {}\n\n| row | behaviour | tests | result |\n| --- | --- | --- | --- |\n",
                section.title
            );
            for row in &section.rows {
                match cells(row, *column, evidence) {
                    Some((tests, result)) => {
                        let _ = writeln!(page, "| {} | {} | {tests} | {result} |", row.number, row.behaviour);
                    }
                    None => {
                        let (backend, number, behaviour) = (column.name(), row.number, &row.behaviour);
                        let _ =
                            writeln!(bare, "row {number} has neither a test nor a reason for {backend}: {behaviour}");
                    }
                }
            }
        }
    }
    if bare.is_empty() { Ok(page) } else { Err(bare) }
}

fn cells(row: &Row, column: Column, evidence: &Evidence) -> Option<(String, &'static str)> {
    let tests = evidence.get(&row.number).map(Vec::as_slice).unwrap_or_default();
    let link = |test: &super::ProvingTest| {
        let part = test.part.map(|part| format!(" ({part})")).unwrap_or_default();
        format!("[`{}`{part}](../{})", test.name, test.file.display())
    };
    let links: Vec<String> = tests.iter().map(link).collect();
    match (links.is_empty(), row.reason(column)) {
        (true, None) => None,
        (true, Some(reason)) => Some((format!("none: {reason}"), "–")),
        (false, None) => Some((links.join(", "), "passes")),
        (false, Some(reason)) => Some((format!("{}; {reason}", links.join(", ")), "passes")),
    }
}
