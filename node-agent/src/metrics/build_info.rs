//! `kubernetes_build_info`, with the labels that every Kubernetes component has. The values
//! describe Headgate's build.

use std::env::consts::{ARCH, OS};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

use crate::metric_registry::MetricRegistry;

/// Labels about the time and the commit of the build are empty, because builds are reproducible and
/// may be made from an archive without a Git repository.
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

/// Registers the metric.
pub(super) fn register(registry: &mut MetricRegistry) {
    // Go's names of architectures.
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
    let help = "Always 1. The labels describe Headgate's build. A label without a meaning for this build is empty";
    registry.adder("kubernetes").gauge("build_info", names, help, info);
}
