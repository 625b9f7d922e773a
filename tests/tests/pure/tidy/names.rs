//! Names of types in the products.

use std::collections::BTreeMap;

use super::{product_code, products};

/// Within a crate, a name stands for one type, so that the name alone tells a reader which type is
/// meant. Associated types and types inside functions, which are indented, may share names.
#[test]
fn no_two_types_of_a_crate_have_the_same_name() {
    let mut definitions = BTreeMap::<_, Vec<_>>::new();
    let products = products();
    for (path, text) in &products {
        let Some((folder, _)) = path.split_once("/src/") else { continue };
        for name in product_code(text).lines().filter_map(defined_type) {
            definitions.entry((folder, name)).or_default().push(path);
        }
    }
    assert!(definitions.len() > 500, "only {} types found", definitions.len());
    definitions.retain(|_, paths| paths.len() > 1);
    assert!(definitions.is_empty(), "types of one crate with the same name: {definitions:#?}");
}

/// The name of the type or trait that a line without indentation begins to define.
fn defined_type(line: &str) -> Option<&str> {
    let item = match line.strip_prefix("pub(") {
        Some(limited) => limited.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let name = ["struct ", "enum ", "type ", "trait "].iter().find_map(|keyword| item.strip_prefix(keyword))?;
    name.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
}
