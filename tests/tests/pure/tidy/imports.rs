//! Imports between the modules of a crate, read from its source.
//!
//! An import is a `use` or a path in code. The imported module is the module that defines the item,
//! so re-exports are followed. Modules under `#[cfg(test)]` are left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module as the list of names from the crate's root. The root is the empty list.
pub(super) type Module = Vec<String>;

/// An import of one module by another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Import {
    pub(super) from: Module,
    pub(super) to: Module,
    /// A file and a line, such as `src/run.rs:12`.
    pub(super) place: String,
    /// The imported path, such as `crate::store::Store`.
    pub(super) path: String,
}

/// The modules of a crate and their imports.
#[derive(Debug, Default)]
pub(super) struct Crate {
    modules: BTreeSet<Module>,
    /// The names that `use` brings into a module, each with its path.
    names: BTreeMap<(Module, String), Vec<String>>,
    imports: Vec<Import>,
}

/// A path as written in the source, before it is resolved.
struct Written {
    module: Module,
    segments: Vec<String>,
    place: String,
}

/// Reads the tokens of one file.
struct Reader<'a> {
    krate: &'a mut Crate,
    file: String,
    test_modules: &'a mut BTreeSet<Module>,
    written: &'a mut Vec<Written>,
}

impl Crate {
    /// Reads `folder/src`. Panics when a file cannot be read or is not valid Rust.
    pub(super) fn read(folder: &Path) -> Self {
        let (mut krate, mut written, mut test_modules) = (Self::default(), Vec::new(), BTreeSet::new());
        let files = source_files(&folder.join("src"));
        krate.modules = files.keys().cloned().collect();
        for (module, file) in &files {
            let text = std::fs::read_to_string(file).unwrap();
            let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            let file = file.strip_prefix(folder).unwrap().display().to_string();
            let mut reader = Reader { krate: &mut krate, file, test_modules: &mut test_modules, written: &mut written };
            reader.read(module, tokens);
        }
        let is_test = |module: &Module| (1..=module.len()).any(|length| test_modules.contains(&module[..length]));
        krate.modules.retain(|module| !is_test(module));
        for Written { module, segments, place } in written {
            if is_test(&module) {
                continue;
            }
            let Some(path) = krate.absolute(&module, &segments) else {
                continue;
            };
            let to = krate.definition(path);
            krate.imports.push(Import { from: module, to, place, path: segments.join("::") });
        }
        krate
    }

    /// Every module that is not only for tests, including the root.
    pub(super) fn modules(&self) -> impl Iterator<Item = &Module> {
        self.modules.iter()
    }

    /// Every import, in the order of the files.
    pub(super) fn imports(&self) -> &[Import] {
        &self.imports
    }

    /// Turns a path into the path from the crate's root. Returns `None` when the path names another
    /// crate or a local name.
    fn absolute(&self, module: &[String], segments: &[String]) -> Option<Vec<String>> {
        let mut base = module.to_vec();
        let mut rest = segments;
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
                return self.modules.contains(&base).then(|| [base, rest[1..].to_vec()].concat());
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
            let next = path.get(known).and_then(|name| self.names.get(&(path[..known].to_vec(), name.clone())));
            match next {
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
        let depth = folder.len();
        let mut edges: BTreeMap<&str, BTreeMap<&str, &Import>> = BTreeMap::new();
        for import in &self.imports {
            let both_inside = import.from.starts_with(folder) && import.to.starts_with(folder);
            let (Some(from), Some(to)) = (import.from.get(depth), import.to.get(depth)) else {
                continue;
            };
            if both_inside && from != to {
                edges.entry(from).or_default().entry(to).or_insert(import);
            }
        }
        let mut done = BTreeSet::new();
        let starts: Vec<&str> = edges.keys().copied().collect();
        let circle = starts.into_iter().find_map(|start| find_circle(&edges, start, &mut Vec::new(), &mut done))?;
        let mut sentence = format!("modules of crate::{} import each other in a circle:", folder.join("::"));
        for (index, from) in circle.iter().enumerate() {
            let to = circle[(index + 1) % circle.len()];
            let import = edges[from][to];
            write!(sentence, "\n  {from} -> {to}: {} imports {}", import.place, import.path).unwrap();
        }
        Some(sentence)
    }
}

/// The modules of the first circle that can be reached from `at`, in order.
fn find_circle<'a>(
    edges: &BTreeMap<&'a str, BTreeMap<&'a str, &Import>>,
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
    let next = edges.get(at).into_iter().flatten();
    let circle = next.map(|(to, _)| *to).find_map(|to| find_circle(edges, to, path, done));
    path.pop();
    circle
}

/// The source files below a folder by module, without a program's `main.rs`.
fn source_files(source: &Path) -> BTreeMap<Module, PathBuf> {
    let (mut files, mut folders) = (BTreeMap::new(), vec![source.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") || path == source.join("main.rs") {
                continue;
            }
            let inside = path.strip_prefix(source).unwrap().with_extension("");
            let mut module: Module = inside.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            module.pop_if(|last| last == "mod" || last == "lib");
            files.insert(module, path);
        }
    }
    files
}

impl Reader<'_> {
    fn read(&mut self, module: &[String], tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        let mut is_for_tests = false;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Punct(mark) if mark.as_char() == '#' => {
                    if let Some(TokenTree::Group(attribute)) = tokens.get(at + 1) {
                        is_for_tests |= attribute.to_string().replace(' ', "") == "[cfg(test)]";
                        at += 1;
                    }
                }
                TokenTree::Ident(word) if word == "mod" => {
                    at += self.read_module(module, &tokens[at..], is_for_tests);
                    is_for_tests = false;
                }
                TokenTree::Ident(word) if word == "use" && is_use(&tokens, at) => {
                    let length = tokens[at..].iter().position(|token| is_mark(token, ';')).unwrap();
                    if !is_for_tests {
                        self.read_use(module, &[], &tokens[at + 1..at + length]);
                    }
                    at += length;
                    is_for_tests = false;
                }
                // `pub(in crate::…)` limits visibility, and is not an import.
                TokenTree::Ident(word) if word == "pub" && is_restriction(tokens.get(at + 1)) => at += 1,
                TokenTree::Ident(_) => at += self.read_path(module, &tokens[at..], is_for_tests),
                TokenTree::Group(group) => {
                    if !is_for_tests {
                        self.read(module, group.stream());
                    }
                    if group.delimiter() == Delimiter::Brace {
                        is_for_tests = false;
                    }
                }
                token if is_mark(token, ';') => is_for_tests = false,
                _ => {}
            }
            at += 1;
        }
    }

    /// Reads `mod name;` or `mod name { … }`. Returns the number of tokens that follow `mod`.
    fn read_module(&mut self, module: &[String], tokens: &[TokenTree], is_for_tests: bool) -> usize {
        let Some(TokenTree::Ident(name)) = tokens.get(1) else {
            return 0;
        };
        let inner = [module, &[name.to_string()]].concat();
        if is_for_tests {
            self.test_modules.insert(inner);
        } else if let Some(TokenTree::Group(body)) = tokens.get(2) {
            self.krate.modules.insert(inner.clone());
            self.read(&inner, body.stream());
        }
        2
    }

    /// Reads a `use` tree after a prefix.
    fn read_use(&mut self, module: &[String], prefix: &[String], tree: &[TokenTree]) {
        let mut segments = prefix.to_vec();
        let mut tokens = tree.iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    let Some(TokenTree::Ident(name)) = tokens.next() else {
                        continue;
                    };
                    return self.note_use(module, segments, &name.to_string(), token);
                }
                TokenTree::Ident(word) => segments.push(word.to_string()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for part in inner.split(|token| is_mark(token, ',')).filter(|part| !part.is_empty()) {
                        self.read_use(module, &segments, part);
                    }
                    return;
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
        segments.pop_if(|last| last == "self" && !prefix.is_empty());
        let (Some(name), Some(last)) = (segments.last().cloned(), tree.last()) else {
            return;
        };
        self.note_use(module, segments, &name, last);
    }

    fn note_use(&mut self, module: &[String], segments: Vec<String>, name: &str, at: &TokenTree) {
        if let Some(target) = self.krate.absolute(module, &segments) {
            self.krate.names.insert((module.to_vec(), name.to_owned()), target);
        }
        self.note(module, segments, at);
    }

    /// Reads a path in code that begins with `crate`, `self`, `super` or a child module. Returns
    /// the number of its tokens after the first.
    fn read_path(&mut self, module: &[String], tokens: &[TokenTree], is_for_tests: bool) -> usize {
        let mut segments = vec![tokens[0].to_string()];
        let mut length = 0;
        while let [colon, other, TokenTree::Ident(next), ..] = &tokens[length + 1..]
            && is_mark(colon, ':')
            && is_mark(other, ':')
        {
            segments.push(next.to_string());
            length += 3;
        }
        if length > 0 && !is_for_tests {
            self.note(module, segments, &tokens[0]);
        }
        length
    }

    fn note(&mut self, module: &[String], segments: Vec<String>, at: &TokenTree) {
        let place = format!("{}:{}", self.file, at.span().start().line);
        self.written.push(Written { module: module.to_vec(), segments, place });
    }
}

fn is_mark(token: &TokenTree, mark: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == mark)
}

/// Whether the `use` at `at` begins an import. The `use` in `impl Trait + use<'a>` does not begin
/// an import.
fn is_use(tokens: &[TokenTree], at: usize) -> bool {
    !tokens.get(at + 1).is_none_or(|next| is_mark(next, '<'))
}

/// Whether the token is the parentheses of `pub(…)`.
fn is_restriction(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis)
}
