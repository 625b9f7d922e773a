//! What the kernel refuses of a service, while it takes the rest.

use anyhow::{Context, Result, ensure};

use super::super::case::{Source, ask};
use super::super::changes::eventually;
use super::super::run::run;
use super::{agent, set_endpoints};
use crate::testbed::manifests::{Service, Via, ready};
use crate::testbed::{Family, Testbed};

use Source::Kept;
use Via::ClusterIp;

/// The kernel takes no destination whose address is a broadcast address of the node: it is left out and told, and nothing else is disturbed.
///
/// On a running cluster with [`super::super::lifecycle::some_services`].
pub fn a_refused_destination_disturbs_nothing(bed: &Testbed) -> Result<()> {
    const V4: &[Family] = &[Family::V4];
    let node = bed.machines().machine("node-a")?;
    let refused = crate::testbed::plan::address("a2").context("a2 has addresses")?.v4;
    node.ip_batch(&format!("route add broadcast {refused} dev eth0 table local\n"))?;
    bed.update(|manifests| {
        manifests.add(Service::new("bad", &["a1", "a2"]))?;
        manifests.add(Service::new("good", &["b1"]))
    })?;
    let told = || -> Result<String> { Ok(format!("{:?}", agent(bed, "node-a")?.rejections)) };
    eventually(|| {
        let told = told()?;
        ensure!(told.contains("testbed/bad") && told.contains(&refused.to_string()), "what the agent tells is {told}");
        Ok(())
    })?;
    run(
        bed,
        &[
            ask("a3", "good", ClusterIp).ports(&["tcp", "udp"]).answered(&["b1"], Kept),
            ask("a3", "bad", ClusterIp).ports(&["tcp", "udp"]).over(V4).answered(&["a1"], Kept),
            ask("a3", "bad", ClusterIp).over(&[Family::V6]).answered(&["a1", "a2"], Kept),
        ],
    )?;
    set_endpoints(bed, &["a1"])?;
    run(bed, &[ask("a3", "steady", ClusterIp).answered(&["a1"], Kept)])?;
    // Once the kernel takes it, a change of the service has it tried again.
    node.ip_batch(&format!("route del broadcast {refused} dev eth0 table local\n"))?;
    bed.update(|manifests| {
        manifests.service_mut("bad")?.endpoints = ready(&["a1", "a2", "b1"]);
        Ok(())
    })?;
    eventually(|| {
        let told = told()?;
        ensure!(told == "[]", "the agent still tells {told}");
        Ok(())
    })?;
    run(bed, &[ask("a3", "bad", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "a2", "b1"], Kept)])
}
