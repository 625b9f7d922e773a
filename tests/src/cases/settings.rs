//! What an agent's settings do to packets.

use anyhow::{Result, ensure};

use super::case::{Source, ask};
use super::run::run;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Manifests, Testbed, iptables};

use Source::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};

/// Services of the scenario here.
pub fn services() -> Result<Manifests> {
    let mut manifests = Manifests::default();
    manifests.add(Service::new("web", &["a1", "b1", "c1"]))?;
    manifests.add(Service::new("of-b", &["b1", "b2"]))?;
    manifests.add(Service { external_local: true, ..Service::new("local-of-b", &["b1", "c1"]) })?;
    manifests.add(Service { external_local: true, ..Service::new("local-elsewhere", &["a1", "c1"]) })?;
    Ok(manifests)
}

/// Three nodes, set up in three ways: node-a masquerades everything, node-b cannot tell pods from others, node-c marks packets by
/// another bit.
///
/// On machines with [`services`] on which nothing runs yet.
pub fn masquerading(bed: &Testbed) -> Result<()> {
    const WEB: &[&str] = &["a1", "b1", "c1"];
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &AgentSetup::with(&["--masquerade-all"]))?;
    bed.start_agent_with("node-b", &AgentSetup { cannot_tell_pods: true, ..AgentSetup::default() })?;
    bed.start_agent_with("node-c", &AgentSetup::with(&["--iptables-masquerade-bit", "7"]))?;
    bed.wait_programmed()?;
    const PORTS: &[&str] = &["tcp", "udp"];
    run(
        bed,
        &[
            // node-a: all that goes to cluster addresses, and nothing more than usual of the rest.
            ask("a3", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("node-a", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("outside-1", "web", ClusterIp).answered(WEB, Masqueraded("node-a")),
            ask("a3", "local-of-b", ClusterIp).answered(&["b1", "c1"], Masqueraded("node-a")),
            ask("a3", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
            // node-b: nothing that goes to cluster addresses...
            ask("b3", "web", ClusterIp).ports(PORTS).answered(WEB, Kept),
            ask("outside-2", "of-b", ClusterIp).ports(PORTS).answered(&["b1", "b2"], Kept),
            ask("node-b", "of-b", ClusterIp).answered(&["b1", "b2"], Kept),
            // ...but what goes to other addresses.
            ask("outside-2", "of-b", NodePort("node-b")).answered(&["b1", "b2"], Masqueraded("node-b")),
            // Its pods are as good as outside: no short cut for them, though there is one for the node.
            ask("b3", "local-of-b", ExternalIp).answered(&["b1"], Kept),
            ask("b3", "local-elsewhere", ExternalIp).dropped(),
            ask("node-b", "local-elsewhere", ExternalIp).answered(&["a1", "c1"], Masqueraded("node-b")),
            // node-c: as usual.
            ask("c2", "web", ClusterIp).answered(WEB, Kept),
            ask("c2", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
            ask("node-c", "web", ClusterIp).answered(WEB, Masqueraded("node-c")),
            ask("outside-1", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
        ],
    )?;
    let lock = bed.machines().xtables_lock("node-c");
    for family in Family::BOTH {
        let rules = iptables::save(bed.machines().machine("node-c")?, bed.backend().variant(), family, &lock)?;
        // Set, cleared before the packet leaves, and the default bit is nobody's.
        for expected in ["--set-xmark 0x80/0x80", "-A KUBE-POSTROUTING -j MARK --set-xmark 0x80/0x0"] {
            ensure!(rules.contains(expected), "{expected} is not among the rules:\n{rules}");
        }
        ensure!(!rules.contains("0x4000"), "the default bit is used as well:\n{rules}");
    }
    Ok(())
}
