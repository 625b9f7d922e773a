//! The page.

use std::fmt::Write as _;

use super::rows::{Column, Row, SECTIONS};
use super::scan::Evidence;

const HEAD: &str = "<!-- Written by `make behaviours` from the tests. Do not edit. -->
# Behaviours

What users of a Kubernetes service proxy rely on, row by row, and the tests that prove it. The tests of
[`packets.rs`](../tests/tests/kernel/packets.rs) send real packets through the real kernel, over IPv4 and IPv6, for the
legacy and the nft variant of iptables, each laid out classically and compactly, and for IPVS, which runs on a kernel of its own (User-Mode Linux).

This page is made from a run in which all the tests that it names passed: `make test`, then `make behaviours`. A test says in a comment
`// rows: 31, 36` above its attributes which rows it proves, `// rows of ipvs: 102` if for one backend alone; cases of the packet table say so in the table.
";

const TAIL: &str = "
## nftables, userspace

Not built yet. Every row applies to them as well, but for those that say whose they are.
";

/// The page, given the tests of each row, by backend.
///
/// # Errors
/// Rows without a test or a stated reason, one a line.
pub fn render(columns: &[(Column, Evidence)]) -> Result<String, String> {
    let mut page = HEAD.to_owned();
    let mut bare = String::new();
    for (column, evidence) in columns {
        let _ = write!(page, "\n## {}\n", column.name());
        for section in SECTIONS {
            let _ = write!(
                page,
                "\n### {}\n\n| row | behaviour | tests | result |\n| --- | --- | --- | --- |\n",
                section.title
            );
            for row in section.rows {
                match cells(row, *column, evidence) {
                    Some((tests, result)) => {
                        let _ = writeln!(page, "| {} | {} | {tests} | {result} |", row.number, row.behaviour);
                    }
                    None => {
                        let (backend, number, behaviour) = (column.name(), row.number, row.behaviour);
                        let _ = writeln!(
                            bare,
                            "row {number} has neither a test nor a stated reason for {backend}: {behaviour}"
                        );
                    }
                }
            }
        }
    }
    page.push_str(TAIL);
    if bare.is_empty() { Ok(page) } else { Err(bare) }
}

fn cells(row: &Row, column: Column, evidence: &Evidence) -> Option<(String, &'static str)> {
    let tests = evidence.get(&row.number).map(Vec::as_slice).unwrap_or_default();
    let link = |test: &super::ProvingTest| format!("[`{}`](../{})", test.name, test.file.display());
    let links: Vec<String> = tests.iter().map(link).collect();
    match (links.is_empty(), row.reason(column)) {
        (true, None) => None,
        (true, Some(reason)) => Some((format!("none: {reason}"), "–")),
        (false, None) => Some((links.join(", "), "passes")),
        (false, Some(reason)) => Some((format!("{}; {reason}", links.join(", ")), "passes")),
    }
}
