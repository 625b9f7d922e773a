//! Rules of the project that the compiler and clippy do not check: dependencies of crates, layers
//! of modules, licences, the length of files, the width of comments, links in documents, and
//! compatibility of the protocol.

mod behaviours;
mod dependencies;
mod documents;
mod files;
mod imports;
mod layers;
mod licences;
mod logs;
mod metadata;
mod monitoring;
mod protocol;
mod real_servers;
mod width;

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

/// The content of a file, by its path from the top folder. None if it is not UTF-8 text.
fn text(path: &Path) -> Option<String> {
    String::from_utf8(std::fs::read(root().join(path)).unwrap()).ok()
}
