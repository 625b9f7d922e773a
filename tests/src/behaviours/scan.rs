//! Finds the tests that list rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::rows::{Column, SECTIONS};
use crate::cases::{Case, shared, table};

/// The folders of the crates, and the package names that nextest uses in binary ids.
const CRATES: [(&str, &str); 7] = [
    ("crates/core", "headgate-core"),
    ("proto", "headgate-proto"),
    ("control-plane", "headgate-control-plane"),
    ("node-agent", "headgate-node-agent"),
    ("crates/settings", "headgate-settings"),
    ("cli", "headgatectl"),
    ("tests", "headgate-tests"),
];
/// The file that runs the packet table and the shared scenarios.
const PACKETS: &str = "tests/tests/kernel/packets.rs";
/// The test that runs the packet table.
const TABLE: &str = "the_table";

/// Why a scan fails.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// A file cannot be read.
    #[error("reading {path}: {error}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// A comment is invalid, or no test follows the comment.
    #[error("{path}:{line}: {message}")]
    Comment {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem and its remedy.
        message: String,
    },
    /// The packet table or shared scenarios have no test.
    #[error("{PACKETS}: no test is called {0}, so its groups or scenarios in headgate_tests::cases do not run")]
    Unrun(String),
}

/// A test that shows behaviours.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProvingTest {
    /// The file, relative to the top level of the repository.
    pub file: PathBuf,
    /// The name of the test function.
    pub name: String,
    /// The part of the test that shows the behaviour, if the test has several parts.
    pub part: Option<&'static str>,
}

impl ProvingTest {
    /// The nextest id of the test's binary: the package, and for integration tests also the file or
    /// folder.
    #[must_use]
    pub fn binary_id(&self) -> String {
        let (package, below) = self.in_crate();
        let Some(target) = below.strip_prefix("tests").ok().and_then(|below| below.iter().next()) else {
            return package.to_owned();
        };
        format!("{package}::{}", target.to_string_lossy().trim_end_matches(".rs"))
    }

    /// The package of the file, and the file's path below the folder of the crate.
    fn in_crate(&self) -> (&'static str, &Path) {
        let found = CRATES.iter().find_map(|(folder, package)| Some((*package, self.file.strip_prefix(folder).ok()?)));
        found.unwrap_or(("", &self.file))
    }

    /// The path of the test's module. The full name of the test begins with this path. The path is
    /// empty if the file is not a module of an integration test.
    #[must_use]
    pub fn module(&self) -> String {
        let parts = self.in_crate().1.iter().map(|part| part.to_string_lossy());
        let is_integration = self.in_crate().1.starts_with("tests");
        let modules = parts.skip(if is_integration { 2 } else { usize::MAX });
        let modules = modules.map(|part| part.trim_end_matches(".rs").to_owned());
        modules.filter(|part| part != "mod" && part != "main").map(|part| part + "::").collect()
    }
}

/// The tests of each row.
pub type Evidence = BTreeMap<u8, Vec<ProvingTest>>;

/// Collects the tests of a backend's rows from all sources under `root`.
///
/// # Errors
/// A comment lists a row that does not exist, no test follows a comment, a group or a scenario has
/// no test, or a file cannot be read.
pub fn scan(root: &Path, column: Column) -> Result<Evidence, ScanError> {
    let mut evidence = Evidence::new();
    for (folder, _) in CRATES {
        for file in sources(root, &Path::new(folder).join("src"))?
            .into_iter()
            .chain(sources(root, &Path::new(folder).join("tests"))?)
        {
            let text = read(root, &file)?;
            for (name, rows) in comments(&file, &text, column)? {
                enter(&mut evidence, &ProvingTest { file: file.clone(), name, part: None }, &rows);
            }
        }
    }
    let packets = read(root, Path::new(PACKETS))?;
    let mut of_part = |test: &str, part: &'static str, rows: &[u8]| {
        if !packets.contains(&format!("fn {test}()")) {
            return Err(ScanError::Unrun(test.to_owned()));
        }
        enter(&mut evidence, &ProvingTest { file: PACKETS.into(), name: test.to_owned(), part: Some(part) }, rows);
        Ok(())
    };
    for (group, cases) in table::GROUPS {
        let is_run = |case: &Case| !case.excluded.iter().any(|(backend, _)| *backend == column.backend());
        let rows: Vec<u8> = cases().into_iter().filter(is_run).flat_map(|case| case.rows.to_vec()).collect();
        of_part(TABLE, group, &rows)?;
    }
    for (test, scenarios) in shared::TESTS {
        for (scenario, rows, _) in scenarios {
            of_part(test, scenario, rows)?;
        }
    }
    for tests in evidence.values_mut() {
        tests.sort();
        tests.dedup();
    }
    Ok(evidence)
}

fn enter(evidence: &mut Evidence, test: &ProvingTest, rows: &[u8]) {
    for row in rows {
        evidence.entry(*row).or_default().push(test.clone());
    }
}

fn read(root: &Path, file: &Path) -> Result<String, ScanError> {
    std::fs::read_to_string(root.join(file)).map_err(|error| ScanError::Read { path: file.to_owned(), error })
}

/// The Rust files below a folder. The list is empty if the folder does not exist.
fn sources(root: &Path, folder: &Path) -> Result<Vec<PathBuf>, ScanError> {
    let failed = |error| ScanError::Read { path: folder.to_owned(), error };
    if !root.join(folder).exists() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root.join(folder)).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = folder.join(entry.file_name());
        if entry.file_type().map_err(failed)?.is_dir() {
            found.extend(sources(root, &path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The names of the tests in a file that have a comment for the backend, each with the rows in the
/// comment.
fn comments(file: &Path, text: &str, column: Column) -> Result<Vec<(String, Vec<u8>)>, ScanError> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("// rows") else { continue };
        let Some((of, list)) = rest.split_once(':') else { continue };
        let failed = |message: String| ScanError::Comment { path: file.to_owned(), line: index + 1, message };
        let is_known = of.is_empty() || Column::ALL.iter().any(|column| of == format!(" of {}", column.name()));
        if !is_known {
            return Err(failed(format!("\"rows{of}\" names no known backend: write \"rows\" or \"rows of ipvs\"")));
        }
        let rows = list.split(',').map(|number| known_row(number.trim())).collect::<Result<Vec<u8>, String>>();
        let name = test_below(&lines[index + 1..]).ok_or("no test follows: put the comment directly above #[test]");
        let (name, rows) = (name.map_err(|message| failed(message.to_owned()))?, rows.map_err(failed)?);
        if of.is_empty() || of == format!(" of {}", column.name()) {
            found.push((name, rows));
        }
    }
    Ok(found)
}

fn known_row(text: &str) -> Result<u8, String> {
    let row: u8 = text.parse().map_err(|_| format!("{text:?} is not a row: write numbers separated by commas"))?;
    let is_known = SECTIONS.iter().flat_map(|section| &section.rows).any(|known| known.number == row);
    is_known.then_some(row).ok_or_else(|| format!("the checklist has no row {row}: see behaviours::rows"))
}

/// The name of the test with which `lines` begin: of a function with attributes, or of a line in a
/// table of tests, such as `name: …` or `module::name: …`.
fn test_below(lines: &[&str]) -> Option<String> {
    let mut is_test = false;
    for line in lines {
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        } else if !line.starts_with("///") && !line.starts_with("//") {
            if is_test {
                let (_, signature) = line.split_once("fn ")?;
                return Some(signature.split(['(', '<']).next()?.to_owned());
            }
            let (entry, _) = line.split_once(": ")?;
            let name = entry.rsplit("::").next()?;
            let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
            return is_name.then(|| name.to_owned());
        }
    }
    None
}
