//! Imports between the modules of a crate, read from its source.
//!
//! An import is a `use` or a path in code. The imported module is the module that defines the item,
//! so re-exports are followed. Modules under `#[cfg(test)]` are left out.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module as the list of names from the crate's root. The root is the empty list.
pub(super) type Module = Vec<String>;

/// An import of one module by another.
#[derive(Debug, Clone)]
pub(super) struct Import {
    pub(super) from: Module,
    pub(super) to: Module,
    /// Where the import is and what it names, such as `run.rs:12 imports crate::store::Store`.
    pub(super) shown: String,
}

/// The modules of a crate and their imports.
#[derive(Debug, Default)]
pub(super) struct Crate {
    pub(super) modules: BTreeSet<Module>,
    pub(super) imports: Vec<Import>,
    /// The paths of names that `use` brings into a module, and what they stand for.
    names: BTreeMap<Module, Module>,
}

/// Reads the tokens of one file.
struct Reader<'a> {
    file: &'a str,
    test_modules: BTreeSet<Module>,
    /// Each path, before it is resolved: the module that contains it, the path, and its line.
    paths: Vec<(Module, Vec<String>, usize)>,
    /// Each name that `use` brings into a module, with its path.
    uses: Vec<(Module, String, Vec<String>)>,
}

impl Crate {
    /// Reads a crate from its files: the path below `src`, and the text. Panics when a text is not
    /// valid Rust.
    pub(super) fn read(files: &[(String, String)]) -> Self {
        let (mut krate, mut test_modules) = (Self::default(), BTreeSet::new());
        let mut readers = Vec::new();
        for (file, text) in files.iter().filter(|(file, _)| file != "main.rs") {
            let mut module: Module = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
            module.pop_if(|last| last == "mod" || last == "lib");
            let mut reader = Reader { file, test_modules: BTreeSet::new(), paths: Vec::new(), uses: Vec::new() };
            reader.read(&module, text.parse().unwrap_or_else(|error| panic!("{file}: {error}")));
            krate.modules.insert(module);
            test_modules.append(&mut reader.test_modules);
            readers.push(reader);
        }
        let is_test = |module: &Module| (1..=module.len()).any(|length| test_modules.contains(&module[..length]));
        krate.modules.retain(|module| !is_test(module));
        for (module, name, path) in readers.iter().flat_map(|reader| &reader.uses) {
            if let Some(target) = krate.absolute(module, path) {
                krate.names.insert([module.as_slice(), std::slice::from_ref(name)].concat(), target);
            }
        }
        for Reader { file, paths, .. } in readers {
            for (from, path, line) in paths.into_iter().filter(|(module, ..)| !is_test(module)) {
                let Some(to) = krate.absolute(&from, &path) else { continue };
                let shown = format!("{file}:{line} imports {}", path.join("::"));
                krate.imports.push(Import { from, to: krate.definition(to), shown });
            }
        }
        krate
    }

    /// Turns a path into the path from the crate's root. Returns `None` when the path names another
    /// crate or a local name.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut base = module.to_vec();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => base.clear(),
            "self" => {}
            "super" => {
                base.pop()?;
                while rest.get(1).is_some_and(|segment| segment == "super") {
                    base.pop()?;
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.to_owned());
                self.modules.get(&base)?;
            }
        }
        base.extend_from_slice(&rest[1..]);
        Some(base)
    }

    /// The module that defines the item of `path`, which begins at the crate's root.
    fn definition(&self, mut path: Vec<String>) -> Module {
        // In a crate that compiles, chains of re-exports end. The bound guards against endless
        // loops.
        for _ in 0..16 {
            let known = (0..=path.len()).rev().find(|length| self.modules.contains(&path[..*length])).unwrap_or(0);
            match path.get(..=known).and_then(|name| self.names.get(name)) {
                Some(target) => path = [target.as_slice(), &path[known + 1..]].concat(),
                None => {
                    path.truncate(known);
                    break;
                }
            }
        }
        path
    }

    /// For each folder, the first circle of imports between its modules, with one import for each
    /// step. Skips folders that are deeper in the crate than `depth`.
    pub(super) fn cycles(&self, depth: usize) -> Vec<String> {
        let folders: BTreeSet<&[String]> =
            self.modules.iter().filter_map(|module| module.split_last()).map(|(_, folder)| folder).collect();
        folders.into_iter().filter(|folder| folder.len() <= depth).filter_map(|folder| self.cycle_in(folder)).collect()
    }

    fn cycle_in(&self, folder: &[String]) -> Option<String> {
        let mut edges: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        for Import { from, to, shown } in &self.imports {
            let both_inside = from.starts_with(folder) && to.starts_with(folder);
            if let (true, Some(from), Some(to)) = (both_inside, from.get(folder.len()), to.get(folder.len()))
                && from != to
            {
                edges.entry(from).or_default().entry(to).or_insert(shown);
            }
        }
        let mut done = BTreeSet::new();
        let circle = edges.keys().find_map(|start| find_circle(&edges, start, &mut Vec::new(), &mut done))?;
        let next = circle.iter().cycle().skip(1);
        let steps: Vec<String> =
            circle.iter().zip(next).map(|(from, to)| format!("\n  {from} -> {to}: {}", edges[from][to])).collect();
        Some(format!("modules of crate::{} import each other in a circle:{}", folder.join("::"), steps.concat()))
    }
}

/// The modules of the first circle that can be reached from `at`, in order.
fn find_circle<'a>(
    edges: &BTreeMap<&'a str, BTreeMap<&'a str, &str>>,
    at: &'a str,
    path: &mut Vec<&'a str>,
    done: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a str>> {
    if let Some(begin) = path.iter().position(|module| *module == at) {
        return Some(path[begin..].to_vec());
    }
    if !done.insert(at) {
        return None;
    }
    path.push(at);
    let circle = edges.get(at).into_iter().flatten().find_map(|(to, _)| find_circle(edges, to, path, done));
    path.pop();
    circle
}

impl Reader<'_> {
    fn read(&mut self, module: &[String], tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            let rest = &tokens[at..];
            match (token, rest.first()) {
                // An item for tests ends with a semicolon or with a block.
                (TokenTree::Punct(mark), Some(TokenTree::Group(attribute)))
                    if mark.as_char() == '#' && attribute.to_string().replace(' ', "") == "[cfg(test)]" =>
                {
                    let end = rest.iter().position(|token| is_mark(token, ';') || is_block(token)).unwrap_or(0);
                    self.test_modules.extend(name_of_module(&rest[..=end]).map(|name| [module, &[name]].concat()));
                    at += end + 1;
                }
                (TokenTree::Ident(word), Some(TokenTree::Ident(name))) if word == "mod" => {
                    at += 1;
                    if let Some(TokenTree::Group(body)) = tokens.get(at) {
                        self.read(&[module, &[name.to_string()]].concat(), body.stream());
                        at += 1;
                    }
                }
                // The `use` in `impl Trait + use<'a>` is no import.
                (TokenTree::Ident(word), Some(next)) if word == "use" && !is_mark(next, '<') => {
                    let end = rest.iter().position(|token| is_mark(token, ';')).unwrap();
                    self.read_use(module, &[], &rest[..end]);
                    at += end;
                }
                // `pub(in crate::…)` limits visibility, and is no import.
                (TokenTree::Ident(word), Some(TokenTree::Group(limit)))
                    if word == "pub" && limit.delimiter() == Delimiter::Parenthesis =>
                {
                    at += 1;
                }
                (TokenTree::Ident(first), _) => {
                    let mut path = vec![first.to_string()];
                    while let [colon, other, TokenTree::Ident(next), ..] = &tokens[at..]
                        && is_mark(colon, ':')
                        && is_mark(other, ':')
                    {
                        path.push(next.to_string());
                        at += 3;
                    }
                    if path.len() > 1 {
                        self.paths.push((module.to_vec(), path, token.span().start().line));
                    }
                }
                (TokenTree::Group(group), _) => self.read(module, group.stream()),
                _ => {}
            }
        }
    }

    /// Reads a `use` tree after a prefix.
    fn read_use(&mut self, module: &[String], prefix: &[String], tree: &[TokenTree]) {
        let mut path = prefix.to_vec();
        let mut name = None;
        for token in tree {
            match token {
                TokenTree::Ident(word) if word == "as" => name = Some(String::new()),
                TokenTree::Ident(word) if name.is_some() => name = Some(word.to_string()),
                TokenTree::Ident(word) => path.push(word.to_string()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    let parts = inner.split(|token| is_mark(token, ',')).filter(|part| !part.is_empty());
                    return parts.for_each(|part| self.read_use(module, &path, part));
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
        path.pop_if(|last| last == "self" && !prefix.is_empty());
        if let Some(name) = name.or_else(|| path.last().cloned()) {
            self.paths.push((module.to_vec(), path.clone(), tree[0].span().start().line));
            self.uses.push((module.to_vec(), name, path));
        }
    }
}

/// The name of the module that the tokens of an item define, if they define one.
fn name_of_module(item: &[TokenTree]) -> Option<String> {
    let at = item.iter().position(|token| matches!(token, TokenTree::Ident(word) if word == "mod"))?;
    item.get(at + 1).map(ToString::to_string)
}

fn is_block(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

fn is_mark(token: &TokenTree, mark: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == mark)
}
