//! The output of `cargo metadata` about the packages, for Linux. The command reads only packages
//! that are already downloaded.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    pub(crate) source: Option<String>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// None for a normal dependency, or else "dev" or "build".
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Output {
    packages: Vec<Package>,
    resolve: Resolve,
    workspace_members: BTreeSet<String>,
}

pub(crate) struct Metadata {
    packages: BTreeMap<String, Package>,
    nodes: BTreeMap<String, Node>,
    members: BTreeSet<String>,
}

impl Metadata {
    pub(crate) fn read() -> Self {
        let output = Command::new(env!("CARGO"))
            .args(["metadata", "--format-version=1", "--locked", "--offline"])
            .args(["--filter-platform=x86_64-unknown-linux-gnu", "--manifest-path"])
            .arg(super::root().join("Cargo.toml"))
            .output()
            .unwrap();
        assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        let output: Output = serde_json::from_slice(&output.stdout).unwrap();
        Self {
            packages: output.packages.into_iter().map(|package| (package.id.clone(), package)).collect(),
            nodes: output.resolve.nodes.into_iter().map(|node| (node.id.clone(), node)).collect(),
            members: output.workspace_members,
        }
    }

    /// The packages that are built for this platform, including the workspace's.
    pub(crate) fn used(&self) -> impl Iterator<Item = &Package> {
        self.nodes.keys().map(|id| &self.packages[id])
    }

    /// The names of the workspace's packages.
    pub(crate) fn members(&self) -> BTreeSet<&str> {
        self.members.iter().map(|id| self.packages[id].name.as_str()).collect()
    }

    /// The normal dependencies of a package of the workspace. Dependencies of its tests and of its
    /// build script are left out.
    pub(crate) fn direct(&self, name: &str) -> BTreeSet<&str> {
        self.normal(self.member(name)).map(|id| self.packages[id].name.as_str()).collect()
    }

    /// All direct and indirect normal dependencies of a package of the workspace.
    pub(crate) fn transitive(&self, name: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut waiting = vec![self.member(name)];
        while let Some(id) = waiting.pop() {
            waiting.extend(self.normal(id).filter(|dependency| found.insert(*dependency)));
        }
        found.into_iter().map(|id| self.packages[id].name.as_str()).collect()
    }

    fn member(&self, name: &str) -> &str {
        let found = self.members.iter().find(|id| self.packages[*id].name == name);
        found.unwrap_or_else(|| panic!("the workspace has no package {name}"))
    }

    fn normal<'a>(&'a self, id: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let normal = |dependency: &&Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
        self.nodes[id].deps.iter().filter(normal).map(|dependency| dependency.pkg.as_str())
    }
}
