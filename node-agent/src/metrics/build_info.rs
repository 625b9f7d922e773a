//! `kubernetes_build_info`, with the labels that every component of Kubernetes has. The build that
//! it tells of is Headgate's.

use std::env::consts::{ARCH, OS};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

use crate::metric_registry::MetricRegistry;

/// What cannot be known of the build is empty: the program is compiled from an archive as well as
/// from a repository, and the same each time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    build_date: &'static str,
    compiler: &'static str,
    git_commit: &'static str,
    git_tree_state: &'static str,
    git_version: &'static str,
    go_version: &'static str,
    major: &'static str,
    minor: &'static str,
    platform: String,
}

/// Registers it.
pub(super) fn register(registry: &mut MetricRegistry) {
    // As Go calls it.
    let architecture = match ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let labels = Labels {
        build_date: "",
        compiler: "rustc",
        git_commit: "",
        git_tree_state: "",
        git_version: concat!("v", env!("CARGO_PKG_VERSION")),
        go_version: "",
        major: env!("CARGO_PKG_VERSION_MAJOR"),
        minor: env!("CARGO_PKG_VERSION_MINOR"),
        platform: format!("{OS}/{architecture}"),
    };
    let info = Family::<Labels, Gauge>::default();
    info.get_or_create(&labels).set(1);
    let names = "build_date, compiler, git_commit, git_tree_state, git_version, go_version, major, minor, platform";
    let help = "Always 1; the labels tell of Headgate's own build, and are empty where it has no such thing";
    registry.adder("kubernetes").gauge("build_info", names, help, info);
}
