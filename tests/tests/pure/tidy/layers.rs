//! A module imports only modules of its own layer and of lower layers. Modules do not import each
//! other in a circle.
//!
//! The table under "Layers" in ARCHITECTURE.md defines the layers of each crate, from the bottom
//! up.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::imports::{Crate, Import, Module};

/// The layer of each listed module: its row in the table, and its name.
type Layers = BTreeMap<Module, (usize, String)>;

/// Reads the table, whose columns are crate, layer, modules and a description.
fn table(text: &str) -> BTreeMap<String, Layers> {
    let section = text.split("\n## ").find(|section| section.starts_with("Layers\n")).unwrap();
    let mut crates: BTreeMap<String, Layers> = BTreeMap::new();
    for (row, line) in section.lines().filter(|line| line.starts_with("| `")).enumerate() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let layers = crates.entry(cells[1].trim_matches('`').to_owned()).or_default();
        for module in cells[3].split(", ") {
            let module = module.trim_matches('`').split('/').map(str::to_owned).collect();
            let listed = layers.insert(module, (row, cells[2].to_owned()));
            assert!(listed.is_none(), "a module is listed twice in the table: {line}");
        }
    }
    crates
}

/// One sentence for each import of a higher layer, for each module that the table does not list,
/// and for each listed module that does not exist.
fn faults(krate: &Crate, layers: &Layers) -> Vec<String> {
    // The layer of the longest listed path that the module begins with.
    let layer_of = |module: &Module| (1..=module.len()).rev().find_map(|length| layers.get(&module[..length]));
    let missing = layers.keys().filter(|module| !krate.modules.contains(*module));
    let mut faults: Vec<String> = missing.map(|module| format!("no such module: {}", module.join("/"))).collect();
    let unlisted = krate.modules.iter().filter(|module| module.len() == 1 && layer_of(module).is_none());
    faults.extend(unlisted.map(|module| format!("no layer in the table: {}", module.join("/"))));
    for Import { from, to, shown } in krate.imports.iter().filter(|import| !import.from.is_empty()) {
        match (layer_of(from), layer_of(to)) {
            _ if to.is_empty() => faults.push(format!("{shown} from the crate's root, which is above all layers")),
            (Some((lower, name)), Some((higher, other))) if lower < higher => {
                faults.push(format!("layer \"{name}\": {shown} from the higher layer \"{other}\""));
            }
            _ => {}
        }
    }
    faults
}

/// The crates of the products by folder. The files have their paths below `src`.
fn crates() -> BTreeMap<String, Crate> {
    let mut files: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (path, text) in super::texts(&[".rs"]) {
        if let Some((folder, file)) = path.split_once("/src/").filter(|(folder, _)| *folder != "tests") {
            files.entry(folder.to_owned()).or_default().push((file.to_owned(), text));
        }
    }
    files.into_iter().map(|(folder, files)| (folder, Crate::read(&files))).collect()
}

#[test]
fn modules_import_lower_layers_and_never_in_a_circle() {
    let layered = table(&super::text(Path::new("ARCHITECTURE.md")).unwrap());
    let crates = crates();
    let unknown: BTreeSet<_> = layered.keys().filter(|name| !crates.contains_key(*name)).collect();
    assert!(layered.len() >= 3 && unknown.is_empty(), "no such crates: {unknown:?}");
    for (name, krate) in crates {
        // In crates without layers, only the top modules are checked.
        let (mut found, depth) = layered.get(&name).map_or((vec![], 0), |layers| (faults(&krate, layers), usize::MAX));
        found.extend(krate.cycles(depth));
        assert!(found.is_empty(), "{name}:\n{}", found.join("\n"));
    }
}
