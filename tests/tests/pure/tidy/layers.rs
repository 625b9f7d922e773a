//! A module imports only modules of its own layer and of lower layers. Modules do not import each
//! other in a circle.
//!
//! The table under "Layers" in ARCHITECTURE.md defines the layers of each crate, from the bottom
//! up.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
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
            assert!(
                layers.insert(module, (row, cells[2].to_owned())).is_none(),
                "a module is listed twice in the table: {line}"
            );
        }
    }
    crates
}

/// The layer of a module: the layer of the longest listed path that the module begins with.
fn layer_of<'a>(layers: &'a Layers, module: &[String]) -> Option<&'a (usize, String)> {
    (1..=module.len()).rev().find_map(|length| layers.get(&module[..length]))
}

/// One sentence for each import of a higher layer, for each module that the table does not list,
/// and for each listed module that does not exist.
fn faults(krate: &Crate, layers: &Layers) -> Vec<String> {
    let mut faults = Vec::new();
    let is_missing = |listed: &&Module| !krate.modules().any(|module| module == *listed);
    faults.extend(layers.keys().filter(is_missing).map(|module| format!("no such module: {}", module.join("/"))));
    let top = krate.modules().filter(|module| module.len() == 1 && layer_of(layers, module).is_none());
    faults.extend(top.map(|module| format!("no layer in the table: {}", module.join("/"))));
    for Import { from, to, place, path } in krate.imports() {
        if from.is_empty() {
            continue;
        }
        if to.is_empty() {
            faults.push(format!("{place} imports {path} from the crate's root, which is above all layers"));
            continue;
        }
        if let (Some(lower), Some(higher)) = (layer_of(layers, from), layer_of(layers, to))
            && lower.0 < higher.0
        {
            faults.push(format!(
                "{place} in layer \"{}\" imports {path} from the higher layer \"{}\"",
                lower.1, higher.1
            ));
        }
    }
    faults
}

/// Crates with layers. The modules of a folder must not import each other in a circle.
const LAYERED: [&str; 3] = ["core", "control-plane", "node-agent"];
/// Crates without layers. The top modules of these crates must not import each other in a circle.
const OTHERS: [&str; 10] =
    ["proto", "tls", "settings", "netlink", "ipvs", "ipset", "nftables", "userspace", "cli", "all-in-one"];

fn architecture() -> BTreeMap<String, Layers> {
    table(&super::text(Path::new("ARCHITECTURE.md")).unwrap())
}

#[test]
fn modules_import_only_their_own_and_lower_layers() {
    let crates = architecture();
    assert_eq!(crates.keys().map(String::as_str).collect::<BTreeSet<_>>(), BTreeSet::from(LAYERED));
    for (name, layers) in crates {
        let faults = faults(&Crate::read(&super::root().join(&name)), &layers);
        assert!(faults.is_empty(), "{name}:\n{}", faults.join("\n"));
    }
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    for name in LAYERED {
        let cycles = Crate::read(&super::root().join(name)).cycles(usize::MAX);
        assert!(cycles.is_empty(), "{name}: {}", cycles.join("\n"));
    }
    for name in OTHERS {
        let cycles = Crate::read(&super::root().join(name)).cycles(0);
        assert!(cycles.is_empty(), "{name}: {}", cycles.join("\n"));
    }
}

/// Writes a crate with these files.
fn sample(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join("src").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

const SAMPLE_TABLE: &str = "# A\n\n## Layers\n\n| crate | layer | modules |\n| --- | --- | --- |\n\
    | `sample` | bottom | `low` |\n| `sample` | top | `high`, `high/inner` |\n\n## B\n";

#[test]
fn a_reversed_import_is_found() {
    let lib = ("lib.rs", "pub mod high;\nmod low;\npub use high::Top;\n");
    let high = ("high/mod.rs", "mod inner;\nuse crate::low::Low;\npub struct Top(Low);\n");
    let inner = ("high/inner.rs", "fn x() -> super::super::low::Low { crate::low::Low }\n");
    let low = ("low.rs", "pub struct Low;\n#[cfg(test)]\nmod tests { use crate::high::Top; }\n");
    let layers = &table(SAMPLE_TABLE)["sample"];
    let good = Crate::read(sample(&[lib, high, inner, low]).path());
    assert_eq!((faults(&good, layers), good.cycles(usize::MAX)), (vec![], vec![]));

    // The import is inside a macro, and names a re-export at the crate's root.
    let reversed = ("low.rs", "pub struct Low;\nfn x() { println!(\"{:?}\", crate::Top) }\n");
    let bad = Crate::read(sample(&[lib, high, inner, reversed]).path());
    let found = faults(&bad, layers);
    let sentence = "src/low.rs:2 in layer \"bottom\" imports crate::Top from the higher layer \"top\"";
    assert_eq!(found, [sentence]);
    let cycles = bad.cycles(usize::MAX);
    assert!(cycles.len() == 1 && cycles[0].contains("low -> high: src/low.rs:2"), "{cycles:?}");
}

#[test]
fn missing_modules_and_modules_without_a_layer_are_found() {
    let folder = sample(&[("lib.rs", "mod low;\nmod extra;\n"), ("low.rs", ""), ("extra.rs", "use crate::own;\n")]);
    let found = faults(&Crate::read(folder.path()), &table(SAMPLE_TABLE)["sample"]);
    let expected = [
        "no such module: high",
        "no such module: high/inner",
        "no layer in the table: extra",
        "src/extra.rs:1 imports crate::own from the crate's root, which is above all layers",
    ];
    assert_eq!(found, expected);
}
