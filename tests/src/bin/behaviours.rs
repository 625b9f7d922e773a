//! `make behaviours`: writes `docs/behaviours.md` from the tests and the report of their last run.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use headgate_tests::behaviours::{self, Column, Report, scan};

fn main() -> Result<()> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the folder of the tests has no parent folder")?;
    let columns = Column::ALL.map(|column| scan::scan(root, column).map(|evidence| (column, evidence)));
    let columns = columns.into_iter().collect::<Result<Vec<_>, _>>()?;
    let page = behaviours::render(&columns).map_err(|bare| anyhow!("{bare}"))?;
    let report = Report::newest(root)?;
    let mut objections: Vec<String> = columns
        .iter()
        .flat_map(|(_, evidence)| evidence.values().flatten())
        .filter_map(|test| Some(format!("{} {} {}", test.file.display(), test.name, report.objection(test)?)))
        .collect();
    objections.sort();
    objections.dedup();
    if !objections.is_empty() {
        bail!(
            "these tests on the page did not pass in the last run:\n  {}\nrun `make test`, then `make behaviours` again",
            objections.join("\n  ")
        );
    }
    let path = root.join("docs/behaviours.md");
    std::fs::write(&path, page).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}
