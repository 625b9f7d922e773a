//! The rules of the project that neither the compiler nor clippy holds: what may depend on what, under which licences, how
//! long a file may be, that documents do not point at nothing, and that the protocol keeps its promises.

mod behaviours;
mod dependencies;
mod documents;
mod files;
mod licences;
mod metadata;
mod protocol;
mod real_servers;

use std::path::{Path, PathBuf};

/// Top level of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Every file of the project, by its path from the top level: no build output, nothing of version control.
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

/// Content of a file, given by its path from the top level; none when it is not text.
fn text(path: &Path) -> Option<String> {
    String::from_utf8(std::fs::read(root().join(path)).unwrap()).ok()
}
