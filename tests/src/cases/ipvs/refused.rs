//! What the kernel refuses of a service, while it takes the rest.

use anyhow::{Context, Result, ensure};

use super::super::case::{SourceAddress, ask};
use super::super::changes::within;
use super::super::run::run;
use super::{CHANGED_BY_HAND, agent, set_endpoints, tool};
use crate::testbed::manifests::{Service, Via, ready};
use crate::testbed::{Family, Testbed, plan};

use SourceAddress::Kept;
use Via::ClusterIp;

/// The kernel takes no destination whose address is a broadcast address of the node: it is left out
/// and told, and nothing else is disturbed, by further changes neither. It is tried again, with
/// each change of its service and by itself, and never is everything programmed anew for it.
///
/// On a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_refused_destination_disturbs_nothing(bed: &Testbed) -> Result<()> {
    const V4: &[Family] = &[Family::V4];
    let node = bed.machines().machine("node-a")?;
    let refuse = |change: &str, pod: &str| -> Result<()> {
        let address = plan::address(pod).with_context(|| format!("{pod} has addresses"))?.v4;
        node.ip_batch(&format!("route {change} broadcast {address} dev eth0 table local\n"))
    };
    let full_syncs = || -> Result<String> {
        let page = tool(node, "curl", &["-sS", "--max-time", "10", "http://127.0.0.1:10249/metrics"])?;
        let is_full = |line: &&str| line.starts_with("headgate_agent_apply_duration_seconds_count{kind=\"full\"}");
        Ok(page.lines().find(is_full).context("no such metric")?.to_owned())
    };
    let expect_told = |refused: Option<&str>| {
        within(CHANGED_BY_HAND, || {
            let told = format!("{:?}", agent(bed, "node-a")?.rejections);
            let Some(pod) = refused else {
                ensure!(told == "[]", "the agent still tells {told}");
                return Ok(());
            };
            let address = plan::address(pod).with_context(|| format!("{pod} has addresses"))?.v4;
            let parts =
                ["testbed/bad", &format!("{address}:"), "no unicast", "all of the service is programmed but this"];
            ensure!(parts.iter().all(|part| told.contains(part)), "the agent tells {told}");
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
    expect_told(Some("a2"))?;
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

    // Once the kernel takes it, nothing has to change for it to be tried.
    refuse("del", "a2")?;
    expect_told(None)?;
    run(bed, &[all().answered(&["a1", "a2"], Kept)])?;

    // What comes to a service that is there is refused for itself as well, and tried with its next
    // change. (A destination that had connections is not looked at anew by the kernel.)
    let set_endpoints_of_bad = |endpoints: &[&str]| {
        bed.update(|manifests| {
            manifests.service_mut("bad")?.endpoints = ready(endpoints);
            Ok(())
        })
    };
    refuse("add", "b2")?;
    set_endpoints_of_bad(&["a1", "a2", "b2"])?;
    expect_told(Some("b2"))?;
    run(bed, &[all().over(V4).answered(&["a1", "a2"], Kept)])?;
    refuse("del", "b2")?;
    set_endpoints_of_bad(&["a1", "a2", "b1", "b2"])?;
    run(bed, &[all().answered(&["a1", "a2", "b1", "b2"], Kept)])?;
    expect_told(None)?;
    let full_syncs_after = full_syncs()?;
    ensure!(full_syncs_after == full_syncs_before, "{full_syncs_before}, then {full_syncs_after}");
    Ok(())
}
