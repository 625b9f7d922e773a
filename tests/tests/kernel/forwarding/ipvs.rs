//! Virtual servers, sets and rules of mode IPVS, on the kernel of User-Mode Linux.

use headgate_core::explain::Mode;
use headgate_node_agent::dataplane::{
    iptables::Variant,
    ipvs::{IpvsDataplane, IpvsOptions},
};
use headgate_tests::uml;

use super::{Rig, masquerade, namespace};

#[test]
fn virtual_servers_are_verified() {
    uml::inside(|| {
        let verified = || {
            let config = IpvsOptions { variant: Variant::Legacy, masquerade: masquerade(), ..IpvsOptions::default() };
            Rig::new(Mode::Ipvs, Box::new(IpvsDataplane::new(config)?))?.ensure_equal()
        };
        namespace("ipvs").run(verified).unwrap();
    });
}
