//! Follows the addresses of the node's interfaces over rtnetlink (`linux/rtnetlink.h`): a thread
//! lists them, applies each change, and publishes them over a watch channel. After an error or lost
//! notifications, it lists them again.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
};

use headgate_core::ipvs;
use headgate_netlink::{
    Heard, Listener, NetlinkError,
    route::{self, Event, LinkAddress, Routing},
};
use prometheus_client::metrics::counter::Counter;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    metric_registry::{AGENT, metrics},
};

/// The addresses of the node's interfaces, sorted and without duplicates. `None` before the thread
/// has listed the addresses for the first time. The list omits:
///
/// - addresses of the devices of mode ipvs, which are addresses of Services;
/// - link-local addresses of IPv6, which mean nothing without their interface.
pub type Interfaces = watch::Receiver<Option<Arc<[IpAddr]>>>;

/// A receive buffer for about 10,000 notifications. The kernel cannot restrict them to some links,
/// so a first sync of mode ipvs causes tens of thousands within seconds. After an overflow, the
/// thread lists all addresses. The memory is used only while notifications wait.
pub const RECEIVE_BUFFER_BYTES: u32 = 4 << 20;

const IPVS_DEVICES: [&str; 2] = [ipvs::DEVICE, ipvs::PROBE_DEVICE];

metrics! {
    /// The counters of the thread that follows the addresses.
    pub struct InterfaceMetrics {}
    AGENT {
        pub lists: Counter = "interface_lists",
            "Times that the agent listed the addresses of the node's interfaces: at the start, and again after an error or after the kernel dropped notifications";
        errors: Counter = "interface_errors",
            "Times that the agent could not list or follow the addresses of the node's interfaces, and continued with the last known addresses";
    }
}

/// Lists the addresses of the interfaces once: see [`Interfaces`] for what the list contains.
/// Errors: the kernel does not list the addresses. A retry may succeed.
pub fn list() -> Result<Vec<IpAddr>, NetlinkError> {
    Ok(Addresses::list()?.distinct())
}

/// Lists the addresses, and starts a thread that follows their changes in the network namespace of
/// the caller. If the addresses cannot be listed, the thread tries again. The thread ends when all
/// receivers are dropped. Errors: the system cannot start the thread.
pub fn follow(metrics: InterfaceMetrics, receive_buffer_bytes: u32) -> io::Result<Interfaces> {
    let (published, receiver) = watch::channel(None);
    let follower = AddressFollower { metrics, receive_buffer_bytes, published };
    let subscribed = follower.subscribe();
    // The thread has its own runtime, so that a long list does not delay the agent's other tasks.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("interfaces".into()).spawn(move || runtime.block_on(follower.run(subscribed)))?;
    Ok(receiver)
}

/// A subscription, and the addresses that were listed after the subscription began.
type Subscribed = Result<(Listener, Addresses), NetlinkError>;

struct AddressFollower {
    metrics: InterfaceMetrics,
    receive_buffer_bytes: u32,
    published: watch::Sender<Option<Arc<[IpAddr]>>>,
}

impl AddressFollower {
    /// Subscribes to changes, lists the addresses, and publishes them. A second time has no effect.
    fn subscribe(&self) -> Subscribed {
        let listener = Listener::open(libc::NETLINK_ROUTE, &route::GROUPS, self.receive_buffer_bytes)?;
        let addresses = Addresses::list()?;
        self.metrics.lists.inc();
        self.publish(&addresses);
        Ok((listener, addresses))
    }

    async fn run(self, subscribed: Subscribed) {
        tokio::select! {
            () = self.published.closed() => {}
            () = self.follow(subscribed) => {}
        }
    }

    /// Follows the changes. Subscribes again after an error, and for a new list.
    async fn follow(&self, mut subscribed: Subscribed) {
        let mut backoff = Backoff::default();
        loop {
            match self.apply_changes(subscribed).await {
                Ok(()) => info!("listing the addresses of the node's interfaces again"),
                Err(error) => {
                    self.metrics.errors.inc();
                    let pause = backoff.next_pause();
                    let (attempts, pause_ms) = (backoff.attempts(), pause.as_millis());
                    warn!(
                        %error, attempts, pause_ms,
                        "cannot follow the addresses of the node's interfaces; NodePorts stay on the last known addresses. If this repeats, check that the agent may open sockets of NETLINK_ROUTE (seccomp, limit of open files)"
                    );
                    tokio::time::sleep(pause).await;
                }
            }
            subscribed = self.subscribe();
            if subscribed.is_ok() {
                backoff.reset();
            }
        }
    }

    /// Applies notifications as they arrive, and publishes the addresses after each burst. Returns
    /// when the addresses have to be listed again.
    async fn apply_changes(&self, subscribed: Subscribed) -> Result<(), NetlinkError> {
        let (mut listener, mut addresses) = subscribed?;
        let readable = readiness(&listener).map_err(NetlinkError::Open)?;
        while !addresses.needs_list {
            readable.readable().await.map_err(NetlinkError::Receive)?.clear_ready();
            addresses.read(&mut listener)?;
            if std::mem::take(&mut addresses.is_changed) && !addresses.needs_list {
                self.publish(&addresses);
            }
        }
        Ok(())
    }

    fn publish(&self, addresses: &Addresses) {
        let now: Arc<[IpAddr]> = addresses.distinct().into();
        self.published.send_if_modified(|last| {
            let is_new = last.as_ref() != Some(&now);
            if is_new {
                *last = Some(now);
            }
            is_new
        });
    }
}

/// Returns an object that becomes readable when notifications arrive.
/// Errors: the system cannot duplicate or watch the descriptor.
#[allow(unsafe_code)]
pub(crate) fn readiness(listener: &impl AsFd) -> io::Result<AsyncFd<OwnedFd>> {
    let descriptor = listener.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is open. The `AsyncFd` owns the descriptor, and nothing closes or
    // replaces the descriptor before the `AsyncFd` is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

/// The addresses by link. The cost of a change does not grow with the number of Services.
#[derive(Debug, Default)]
struct Addresses {
    held: BTreeSet<LinkAddress>,
    /// The indexes of the devices of mode ipvs. `held` does not contain their addresses.
    ipvs_devices: BTreeSet<u32>,
    /// True if an address was added or removed after the addresses were last published.
    is_changed: bool,
    /// True if the addresses have to be listed again.
    needs_list: bool,
}

impl Addresses {
    fn list() -> Result<Self, NetlinkError> {
        let mut routing = Routing::open()?;
        let mut addresses = Self::default();
        for name in IPVS_DEVICES {
            addresses.ipvs_devices.extend(routing.link(name)?.map(|link| link.index));
        }
        addresses.held = routing.all_addresses(|address| addresses.is_wanted(address))?.into_iter().collect();
        Ok(addresses)
    }

    /// The addresses as they are published.
    fn distinct(&self) -> Vec<IpAddr> {
        let distinct: BTreeSet<IpAddr> = self.held.iter().map(|held| held.address.address).collect();
        distinct.into_iter().collect()
    }

    fn is_wanted(&self, of: &LinkAddress) -> bool {
        let is_link_local = matches!(of.address.address, IpAddr::V6(address) if address.is_unicast_link_local());
        !is_link_local && !self.ipvs_devices.contains(&of.link)
    }

    /// Applies all notifications that have arrived.
    fn read(&mut self, listener: &mut Listener) -> Result<(), NetlinkError> {
        loop {
            let mut result = Ok(());
            let heard = listener.receive(|notification| match route::event(&notification) {
                Ok(event) => event.into_iter().for_each(|event| self.apply(event)),
                Err(error) => result = Err(error),
            })?;
            result?;
            match heard {
                Heard::Notifications => {}
                Heard::Nothing => return Ok(()),
                Heard::Lost => {
                    self.needs_list = true;
                    return Ok(());
                }
            }
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Address(address) if self.is_wanted(&address) => self.is_changed |= self.held.insert(address),
            Event::Address(_) => {}
            Event::RemovedAddress(address) => self.is_changed |= self.held.remove(&address),
            Event::Link { index, name } if IPVS_DEVICES.contains(&name.as_str()) => {
                if self.ipvs_devices.insert(index) {
                    // A link was renamed to the name of a device of mode ipvs, or listed before the
                    // device was created: `held` may contain its addresses.
                    self.held.retain(|held| held.link != index);
                    self.is_changed = true;
                }
            }
            // A device of mode ipvs was renamed. The device now counts as an interface of the node.
            Event::Link { index, .. } => self.needs_list |= self.ipvs_devices.contains(&index),
            Event::RemovedLink(index) => drop(self.ipvs_devices.remove(&index)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_netlink::route::Prefix;

    use super::*;

    fn on(link: u32, address: &str) -> LinkAddress {
        let (address, length) = address.split_once('/').unwrap();
        let address: IpAddr = address.parse().unwrap();
        let peer = if let IpAddr::V4(peer) = address { Some(peer) } else { None };
        LinkAddress { link, address: Prefix { address, length: length.parse().unwrap() }, peer }
    }

    fn named(index: u32, name: &str) -> Event {
        Event::Link { index, name: name.into() }
    }

    /// Applies the events. Returns the addresses as text, and true if they have to be listed again.
    fn after(events: impl IntoIterator<Item = Event>) -> (String, bool) {
        let mut addresses = Addresses::default();
        events.into_iter().for_each(|event| addresses.apply(event));
        let text: Vec<_> = addresses.distinct().iter().map(IpAddr::to_string).collect();
        (text.join(" "), addresses.needs_list)
    }

    fn add(address: LinkAddress) -> Event {
        Event::Address(address)
    }

    fn remove(address: LinkAddress) -> Event {
        Event::RemovedAddress(address)
    }

    #[test]
    fn an_address_stays_while_any_link_has_it() {
        let added = [add(on(2, "192.0.2.2/24")), add(on(1, "192.0.2.1/24")), add(on(2, "192.0.2.1/32"))];
        assert_eq!(after(added.clone()), ("192.0.2.1 192.0.2.2".into(), false));
        let after_removal = |removed| after(added.clone().into_iter().chain(removed));
        let first = remove(on(1, "192.0.2.1/24"));
        assert_eq!(after_removal(vec![first.clone()]), ("192.0.2.1 192.0.2.2".into(), false));
        assert_eq!(after_removal(vec![first, remove(on(2, "192.0.2.1/32"))]), ("192.0.2.2".into(), false));
    }

    #[test]
    fn addresses_with_different_peers_are_removed_separately() {
        let near = on(3, "192.0.2.1/32");
        let far = LinkAddress { peer: Some([192, 0, 2, 9].into()), ..near };
        assert_eq!(after([add(near), add(far), remove(far)]).0, "192.0.2.1");
        assert_eq!(after([add(near), add(far), remove(far), remove(near)]).0, "");
    }

    #[test]
    fn unchanged_and_unwanted_addresses_are_not_reported_as_changes() {
        let mut addresses = Addresses::default();
        addresses.apply(named(7, ipvs::DEVICE));
        addresses.apply(add(on(2, "2001:db8::1/64")));
        assert!(std::mem::take(&mut addresses.is_changed));
        addresses.apply(add(on(2, "2001:db8::1/64")));
        addresses.apply(add(on(2, "fe80::1/64")));
        addresses.apply(add(on(7, "10.96.0.1/32")));
        addresses.apply(remove(on(7, "10.96.0.1/32")));
        addresses.apply(named(2, "eth0"));
        assert!(!addresses.is_changed && addresses.held.len() == 1);
    }
}
