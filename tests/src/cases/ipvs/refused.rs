//! Destinations that the kernel rejects, while the kernel accepts all other destinations of the
//! service.

use anyhow::{Context, Result, ensure};

use super::super::case::{SourceAddress, ask};
use super::super::changes::within;
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{Family, Testbed, page, plan};

use SourceAddress::Kept;
use Via::ClusterIp;

/// The kernel rejects a destination whose address is a broadcast address of the node. The agent
/// leaves the destination out, reports it, and programs everything else, including later changes.
/// The agent tries the destination again with each change of its service and from time to time. The
/// agent does no full sync because of the rejected destination.
///
/// Needs a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_rejected_destination_affects_no_other(bed: &Testbed) -> Result<()> {
    const V4: &[Family] = &[Family::V4];
    let node = bed.machines().machine("node-a")?;
    let refuse = |change: &str, pod: &str| -> Result<()> {
        let address = plan::address(pod).with_context(|| format!("the plan has no address for {pod}"))?.v4;
        node.ip_batch(&format!("route {change} broadcast {address} dev eth0 table local\n"))
    };
    let full_syncs = || -> Result<String> {
        let page = page::of_agent(node, "/metrics")?;
        let is_full = |line: &&str| line.starts_with("headgate_agent_apply_duration_seconds_count{kind=\"full\"}");
        Ok(page.lines().find(is_full).context("the page has no count of full syncs")?.to_owned())
    };
    let expect_reported = |refused: Option<&str>| {
        within(CHANGED_BY_HAND, || {
            let reported = format!("{:?}", agent(bed, "node-a")?.rejections);
            let Some(pod) = refused else {
                ensure!(reported == "[]", "the agent still reports {reported}");
                return Ok(());
            };
            let address = plan::address(pod).with_context(|| format!("the plan has no address for {pod}"))?.v4;
            let parts =
                ["testbed/bad", &format!("{address}:"), "unicast address", "all of the service is programmed but this"];
            ensure!(parts.iter().all(|part| reported.contains(part)), "the agent reports {reported}");
            Ok(())
        })
    };
    let all = || ask("a3", "bad", ClusterIp).ports(&["tcp", "udp"]);
    let full_syncs_before = full_syncs()?;
    refuse("add", "a2")?;
    bed.update(|manifests| {
        manifests.add(Service::new("bad", &["a1", "a2"]))?;
        manifests.add(Service::new("good", &["b1"]))
    })?;
    expect_reported(Some("a2"))?;
    run(
        bed,
        &[
            ask("a3", "good", ClusterIp).ports(&["tcp", "udp"]).answered(&["b1"], Kept),
            all().over(V4).answered(&["a1"], Kept),
            all().over(&[Family::V6]).answered(&["a1", "a2"], Kept),
        ],
    )?;
    bed.set_endpoints("steady", &["a1"])?;
    run(bed, &[ask("a3", "steady", ClusterIp).answered(&["a1"], Kept)])?;

    // The agent also tries the destination again without a change of its service.
    refuse("del", "a2")?;
    expect_reported(None)?;
    run(bed, &[all().answered(&["a1", "a2"], Kept)])?;

    // The kernel rejects a destination that is added to an existing service, and the other
    // destinations of the service still work. The agent tries the destination again with the next
    // change of the service. The test uses new destinations, because the kernel does not check the
    // address of a destination again if the destination had connections.
    let set_endpoints_of_bad = |endpoints: &[&str]| bed.set_endpoints("bad", endpoints);
    refuse("add", "b2")?;
    set_endpoints_of_bad(&["a1", "a2", "b2"])?;
    expect_reported(Some("b2"))?;
    run(bed, &[all().over(V4).answered(&["a1", "a2"], Kept)])?;
    refuse("del", "b2")?;
    set_endpoints_of_bad(&["a1", "a2", "b1", "b2"])?;
    run(bed, &[all().answered(&["a1", "a2", "b1", "b2"], Kept)])?;
    expect_reported(None)?;
    let full_syncs_after = full_syncs()?;
    ensure!(full_syncs_after == full_syncs_before, "full syncs: first {full_syncs_before}, then {full_syncs_after}");
    Ok(())
}
