//! Writes `docs/behaviours.md` from the tests and the report of their last run.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use headgate_tests::behaviours::{self, Report, scan};

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the top level of the repository")?;
    let evidence = scan::scan(root)?;
    let page = behaviours::render(&evidence).map_err(|bare| anyhow!("{bare}"))?;
    let report = Report::newest(root)?;
    let mut objections: Vec<String> = evidence
        .values()
        .flatten()
        .filter_map(|test| Some(format!("{} {} {}", test.file.display(), test.name, report.objection(test)?)))
        .collect();
    objections.sort();
    objections.dedup();
    if !objections.is_empty() {
        bail!(
            "the page shows tests that pass, and in the last run these did not:\n  {}\nrun `make test`, then this again",
            objections.join("\n  ")
        );
    }
    let path = root.join("docs/behaviours.md");
    std::fs::write(&path, page).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}
