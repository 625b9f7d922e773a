//! Rules of the project that the compiler, clippy and rustfmt do not check: dependencies of crates,
//! layers of modules, budgets of lines, names of types, the form of text, links in documents, and
//! compatibility of the protocol.

mod behaviours;
mod budgets;
mod dependencies;
mod documents;
mod imports;
mod layers;
mod logs;
mod monitoring;
mod names;
mod protocol;
mod real_servers;
mod text;

use std::path::{Path, PathBuf};

/// The top folder of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The paths of all files of the project from the top folder, without build output and version
/// control.
fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            if path == Path::new("target") || path == Path::new(".git") {
                continue;
            }
            if entry.file_type().unwrap().is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

/// The files of text whose names end with one of `endings`: path from the top folder, and content.
fn texts(endings: &[&str]) -> Vec<(String, String)> {
    let paths = files().into_iter().map(|path| path.to_str().unwrap().to_owned());
    let chosen = paths.filter(|path| endings.iter().any(|ending| path.ends_with(ending)));
    chosen.filter_map(|path| Some((path.clone(), text(Path::new(&path))?))).collect()
}

/// The files of Rust of the products, without tests.
fn products() -> Vec<(String, String)> {
    let is_test = |path: &str| {
        let folders = ["/tests/", "/benches/"];
        path.starts_with("tests/") || folders.iter().any(|folder| path.contains(folder))
    };
    let is_product = |path: &str| !is_test(path) && !path.ends_with("tests.rs") && !path.ends_with("_test.rs");
    texts(&[".rs"]).into_iter().filter(|(path, _)| is_product(path)).collect()
}

/// The code of a file of a product, without the tests at its end.
fn product_code(text: &str) -> &str {
    let mut tests = text.match_indices("#[cfg(test)]\nmod ").map(|(begin, _)| begin);
    let is_inline = |begin: &usize| text[*begin..].lines().nth(1).unwrap().ends_with('{');
    tests.find(is_inline).map_or(text, |begin| &text[..begin])
}

/// The content of a file, by its path from the top folder. None if it is not UTF-8 text.
fn text(path: &Path) -> Option<String> {
    String::from_utf8(std::fs::read(root().join(path)).unwrap()).ok()
}
