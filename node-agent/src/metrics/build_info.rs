//! `kubernetes_build_info`, with the labels of Kubernetes' components, about Headgate's build.

use std::env::consts::{ARCH, OS};

use prometheus_client::metrics::{family::Family, gauge::Gauge};

use crate::metric_registry::MetricRegistry;

pub(super) fn register(registry: &mut MetricRegistry) {
    // Go's names of architectures.
    let architecture = match ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let platform = format!("{OS}/{architecture}");
    // Labels about the time and the commit of the build are empty, because builds are reproducible
    // and may be made from an archive without a Git repository.
    let labels = [
        ("build_date", ""),
        ("compiler", "rustc"),
        ("git_commit", ""),
        ("git_tree_state", ""),
        ("git_version", concat!("v", env!("CARGO_PKG_VERSION"))),
        ("go_version", ""),
        ("major", env!("CARGO_PKG_VERSION_MAJOR")),
        ("minor", env!("CARGO_PKG_VERSION_MINOR")),
        ("platform", &platform),
    ];
    let info = Family::<[(&'static str, String); 9], Gauge>::default();
    info.get_or_create(&labels.map(|(name, value)| (name, value.to_owned()))).set(1);
    let help = "Always 1. The labels describe Headgate's build. A label without a meaning for this build is empty";
    registry.adder("kubernetes").add("build_info", &labels.map(|(name, _)| name).join(", "), help, info);
}
