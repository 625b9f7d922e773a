//! What the kernel refuses of a service, while it takes the rest.

use anyhow::{Context, Result, ensure};

use super::super::case::{Source, ask};
use super::super::changes::within;
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent, set_endpoints, tool};
use crate::testbed::manifests::{Service, Via, ready};
use crate::testbed::{Family, Testbed};

use Source::Kept;
use Via::ClusterIp;

/// The kernel takes no destination whose address is a broadcast address of the node: it is left out and told, and nothing else is disturbed, by further changes
/// neither. It is tried again, with each change of its service and by itself, and never is everything programmed anew for it.
///
/// On a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_refused_destination_disturbs_nothing(bed: &Testbed) -> Result<()> {
    const V4: &[Family] = &[Family::V4];
    let node = bed.machines().machine("node-a")?;
    let refused = crate::testbed::plan::address("a2").context("a2 has addresses")?.v4;
    let refuse = |change: &str| node.ip_batch(&format!("route {change} broadcast {refused} dev eth0 table local\n"));
    let full_syncs = || -> Result<String> {
        let page = tool(node, "curl", &["-sS", "--max-time", "10", "http://127.0.0.1:10249/metrics"])?;
        let is_full = |line: &&str| line.starts_with("headgate_agent_apply_duration_seconds_count{kind=\"full\"}");
        Ok(page.lines().find(is_full).context("no such metric")?.to_owned())
    };
    let expect_told = |expected: bool| {
        within(CHANGED_BY_HAND, || {
            let told = format!("{:?}", agent(bed, "node-a")?.rejections);
            let is_told = told.contains("testbed/bad") && told.contains(&refused.to_string());
            ensure!(is_told == expected && (expected || told == "[]"), "the agent tells {told}");
            Ok(())
        })
    };
    let all = || ask("a3", "bad", ClusterIp).ports(&["tcp", "udp"]);
    let full_syncs_before = full_syncs()?;
    refuse("add")?;
    bed.update(|manifests| {
        manifests.add(Service::new("bad", &["a1", "a2"]))?;
        manifests.add(Service::new("good", &["b1"]))
    })?;
    expect_told(true)?;
    run(
        bed,
        &[
            ask("a3", "good", ClusterIp).ports(&["tcp", "udp"]).answered(&["b1"], Kept),
            all().over(V4).answered(&["a1"], Kept),
            all().over(&[Family::V6]).answered(&["a1", "a2"], Kept),
        ],
    )?;
    set_endpoints(bed, &["a1"])?;
    run(bed, &[ask("a3", "steady", ClusterIp).answered(&["a1"], Kept)])?;
    ensure!(agent(bed, "node-a")?.objects_written < 20, "a change of one service: {:?}", agent(bed, "node-a")?);

    // Once the kernel takes it, nothing has to change for it to be tried.
    refuse("del")?;
    expect_told(false)?;
    run(bed, &[all().answered(&["a1", "a2"], Kept)])?;

    // What comes with a change of the service is refused for itself as well, and tried with the next change.
    refuse("add")?;
    let set_endpoints_of_bad = |endpoints: &[&str]| {
        bed.update(|manifests| {
            manifests.service_mut("bad")?.endpoints = ready(endpoints);
            Ok(())
        })
    };
    set_endpoints_of_bad(&["a1"])?;
    set_endpoints_of_bad(&["a1", "a2"])?;
    expect_told(true)?;
    refuse("del")?;
    set_endpoints_of_bad(&["a1", "a2", "b1"])?;
    run(bed, &[all().answered(&["a1", "a2", "b1"], Kept)])?;
    expect_told(false)?;
    let full_syncs_after = full_syncs()?;
    ensure!(full_syncs_after == full_syncs_before, "{full_syncs_before}, then {full_syncs_after}");
    Ok(())
}
