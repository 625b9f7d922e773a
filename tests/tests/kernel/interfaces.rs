//! Follows the addresses of interfaces on a real kernel.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use anyhow::Result;
use headgate_netlink::route::{Change, Prefix, Routing};
use headgate_node_agent::interfaces::{self, InterfaceMetrics, Interfaces};
use headgate_tests::testbed::Namespace;
use tokio::{runtime::Runtime, time::timeout};

/// A follower of interface addresses, in a namespace with the links `lo`, `eth0` and `kube-ipvs0`.
struct World {
    namespace: Namespace,
    metrics: InterfaceMetrics,
    interfaces: Interfaces,
    runtime: Runtime,
}

impl World {
    fn new(name: &str, receive_buffer_bytes: u32) -> Result<Self> {
        let namespace = Namespace::for_test(&format!("if-{name}"))?;
        namespace.ip_batch(
            "link set lo up\n\
             link add eth0 type veth peer name far0\n\
             link set eth0 up\n\
             link add kube-ipvs0 type veth peer name far1\n\
             addr add 10.96.0.1/32 dev kube-ipvs0\n",
        )?;
        let metrics = InterfaceMetrics::default();
        let interfaces = namespace.run(|| Ok(interfaces::follow(metrics.clone(), receive_buffer_bytes)?))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        Ok(Self { namespace, metrics, interfaces, runtime })
    }

    /// Waits until exactly these addresses are published, in addition to the addresses of `lo`.
    fn expect(&mut self, expected: impl IntoIterator<Item = IpAddr>) {
        let mut expected: Vec<IpAddr> = expected.into_iter().chain(["127.0.0.1", "::1"].map(address)).collect();
        expected.sort_unstable();
        let found = self.interfaces.wait_for(|now| now.as_deref() == Some(&expected));
        let is_found = self.runtime.block_on(async { timeout(Duration::from_secs(60), found).await.is_ok() });
        assert!(is_found, "{expected:?} expected, {:?} found", self.interfaces.borrow());
    }

    fn ip(&self, command: &str) -> Result<()> {
        self.namespace.ip_batch(&format!("{command}\n"))
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn addresses_that_are_added_and_removed_are_published() -> Result<()> {
    let mut world = World::new("follow", interfaces::RECEIVE_BUFFER_BYTES)?;
    assert!(world.interfaces.borrow().is_some(), "the follower has started without the first list");
    world.expect([]);
    world.ip("addr add 192.0.2.1/32 dev eth0")?;
    world.expect([address("192.0.2.1")]);
    world.ip("addr add 2001:db8::1/64 dev eth0 nodad")?;
    world.expect(["192.0.2.1", "2001:db8::1"].map(address));
    world.ip("addr add 192.0.2.1 peer 192.0.2.9 dev eth0")?;
    world.ip("addr del 192.0.2.1/32 dev eth0")?;
    world.ip("addr del 2001:db8::1/64 dev eth0")?;
    world.expect([address("192.0.2.1")]);
    world.ip("addr del 192.0.2.1 peer 192.0.2.9 dev eth0")?;
    world.expect([]);
    world.ip("addr add 192.0.2.2/32 dev eth0")?;
    world.expect([address("192.0.2.2")]);
    world.ip("link del eth0")?;
    world.expect([]);
    assert_eq!(world.metrics.lists.get(), 1, "the addresses were listed again");
    Ok(())
}

#[test]
fn addresses_of_the_ipvs_device_are_published_only_under_another_name() -> Result<()> {
    let mut world = World::new("device", interfaces::RECEIVE_BUFFER_BYTES)?;
    world.ip("addr add 10.96.0.2/32 dev kube-ipvs0")?;
    world.ip("link del kube-ipvs0")?;
    world.ip("link add kube-ipvs0 type veth peer name far1")?;
    world.ip("addr add 10.96.0.3/32 dev kube-ipvs0")?;
    // When a port leaves a bridge, the kernel sends a message of the type for a deleted link,
    // although the link still exists.
    world.ip("link add br0 type bridge")?;
    world.ip("link set kube-ipvs0 master br0")?;
    world.ip("link set kube-ipvs0 nomaster")?;
    world.ip("addr add 10.96.0.4/32 dev kube-ipvs0")?;
    world.ip("addr add 192.0.2.1/32 dev eth0")?;
    world.expect([address("192.0.2.1")]);
    assert_eq!(world.metrics.lists.get(), 1);
    world.ip("link set kube-ipvs0 name eth1")?;
    world.expect(["10.96.0.3", "10.96.0.4", "192.0.2.1"].map(address));
    Ok(())
}

#[test]
fn addresses_are_listed_again_when_notifications_are_lost() -> Result<()> {
    // The kernel raises the buffer size to its minimum, which is enough for a few notifications.
    let mut world = World::new("lost", 1)?;
    let link = world.namespace.run(|| Ok(Routing::open()?.link("eth0")?))?.unwrap().index;
    let all: Vec<IpAddr> = (1..=500_u16).map(|i| Ipv4Addr::from(0xc612_0000 + u32::from(i)).into()).collect();
    let change = |namespace: &Namespace, change: fn(u32, Prefix) -> Change| {
        let changes: Vec<Change> = all.iter().map(|address| change(link, Prefix::host(*address))).collect();
        namespace.run(|| Ok(Routing::open()?.change(&changes, |index, refusal| panic!("{index}: {refusal}"))?))
    };
    // A thread that reads fast enough loses no notification, so the test tries several times.
    for _ in 0..50 {
        change(&world.namespace, |link, address| Change::AddAddress { link, address })?;
        world.expect(all.clone());
        change(&world.namespace, |link, address| Change::RemoveAddress { link, address })?;
        world.expect([]);
        if world.metrics.lists.get() > 1 {
            return Ok(());
        }
    }
    panic!("no notification was lost in 50 rounds")
}
