//! Each mechanism has a budget of lines of product code, in the table under "Budgets" in
//! ARCHITECTURE.md. Blank lines, comments and tests are not counted.
//!
//! With `HEADGATE_WRITE_DOCS=1`, the test lowers the budgets to what the mechanisms need, and
//! removes folders that are gone.

use std::{collections::BTreeMap, fs, path::Path};

const PAGE: &str = "ARCHITECTURE.md";
/// ARCHITECTURE.md has at most this number of lines, without the table of budgets.
const MAX_LINES_OF_THE_MAP: usize = 200;

/// The number of lines of code.
fn count(text: &str) -> usize {
    let lines = super::product_code(text).lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// The paths of a row. The columns are mechanism, what users get, paths and budget.
fn paths(row: &str) -> impl Iterator<Item = &str> {
    row.split('|').nth(3).unwrap().split(',').map(|path| path.trim().trim_matches('`'))
}

#[test]
fn every_mechanism_keeps_its_budget() {
    let page = super::text(Path::new(PAGE)).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with("Budgets\n")).unwrap();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    for path in rows.iter().flat_map(|row| paths(row)) {
        assert!(sizes.insert(path, 0).is_none(), "{PAGE}: two mechanisms have {path}");
    }
    let mut faults = Vec::new();
    for (file, text) in super::products() {
        let is_in = |path: &&&str| Path::new(&file).starts_with(path);
        // A path in a folder of another mechanism takes its files from this folder.
        match sizes.keys().filter(is_in).max_by_key(|path| path.len()).copied() {
            Some(path) => *sizes.get_mut(path).unwrap() += count(&text),
            None => faults.push(format!("{file} belongs to no mechanism")),
        }
    }
    let mut lowered = page.clone();
    for row in &rows {
        let (name, budget) = (row.split('|').nth(1).unwrap().trim(), row.split('|').nth(4).unwrap().trim());
        let gone: Vec<&str> = paths(row).filter(|path| sizes[path] == 0).collect();
        let size: usize = paths(row).map(|path| sizes[path]).sum();
        let (most, fitting) = (budget.parse().unwrap(), size + size.div_ceil(50));
        if size > most {
            faults.push(format!(
                "{name} has {size} lines, more than {most}: shorten it, or say in the commit why it needs more"
            ));
        } else if size * 10 < most * 9 {
            faults.push(format!("lower the budget of {name} from {most} to {fitting}"));
        }
        faults.extend(gone.iter().map(|path| format!("{name}: {path} has no code")));
        let kept: Vec<String> =
            paths(row).filter(|path| !gone.contains(path)).map(|path| format!("`{path}`")).collect();
        let cells: Vec<&str> = row.split('|').collect();
        let new = format!("|{}|{}| {} | {} |", cells[1], cells[2], kept.join(", "), fitting.min(most));
        lowered = lowered.replace(row, &new);
    }
    if std::env::var_os("HEADGATE_WRITE_DOCS").is_some() {
        fs::write(super::root().join(PAGE), lowered).unwrap();
        return;
    }
    let total: usize = sizes.values().sum();
    let advice = "`make budgets` lowers budgets and removes paths without code";
    assert!(faults.is_empty(), "{}\n{advice}; the products have {total} lines", faults.join("\n"));
    let lines = page.lines().count() - section.lines().count();
    assert!(lines <= MAX_LINES_OF_THE_MAP, "{PAGE} has {lines} lines, more than {MAX_LINES_OF_THE_MAP}");
}
