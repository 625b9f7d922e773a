//! Compiles the protocol in Rust without `protoc`, and writes the descriptor set that reflection
//! serves.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

/// The answers of Inspect, and the messages in them. `headgatectl` writes them as JSON.
const SHOWN_AS_JSON: [&str; 27] = [
    "AgentInfo",
    "AgentVersion",
    "AgentsChange",
    "ChangeTime",
    "ChangeTimes",
    "Connections",
    "Drift",
    "EndpointInfo",
    "ExplainedEndpoint",
    "Explanation",
    "FleetInfo",
    "GetStatusResponse",
    "Laggard",
    "NodeStatus",
    "NodeVerification",
    "OpenConnection",
    "Problem",
    "Rejection",
    "ReplicaInfo",
    "ServiceCounters",
    "ServiceInfo",
    "ServicePortInfo",
    "Shadow",
    "SourceAge",
    "SourcePosition",
    "WaitAnswer",
    "WatchEvent",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let files = ["headgate/v1/discovery.proto", "headgate/v1/inspect.proto"].map(|file| root.join(file));
    for file in &files {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let descriptors = protox::compile(&files, [&root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("headgate.v1.binpb"), descriptors.encode_to_vec())?;
    let mut build = tonic_prost_build::configure().bytes(".");
    for message in SHOWN_AS_JSON {
        build = build.message_attribute(format!(".headgate.v1.{message}"), "#[derive(serde::Serialize)]");
    }
    // Messages with lists of messages have no `Eq` of their own, and the agent compares these.
    for message in ["AgentStatus", "Verified"] {
        build = build.message_attribute(format!(".headgate.v1.{message}"), "#[derive(Eq)]");
    }
    build
        .field_attribute(".headgate.v1.SourcePosition.kind", "#[serde(serialize_with = \"crate::kind_name\")]")
        .compile_fds(descriptors)?;
    Ok(())
}
