//! Creates links, addresses and routes over rtnetlink. A start of the program `ip` for each
//! namespace would take a sixth of the time of a typical test inside User-Mode Linux.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use headgate_netlink::route::{Prefix, Routing};
use headgate_netlink::{Connection, Refusal, Request};
use nix::libc;

/// `NLM_F_CREATE` and `NLM_F_EXCL`: an object that exists already is an error.
const CREATE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
/// Attributes of links (`linux/if_link.h`).
const LINK_NAME: u16 = 3;
const LINK_MASTER: u16 = 10;
const LINK_INFO: u16 = 18;
const LINK_NAMESPACE: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const BRIDGE_SNOOPING: u16 = 23;
/// Attributes of addresses (`linux/if_addr.h`).
const ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;
const ADDRESS_FLAGS: u16 = 8;
/// Attributes of routes (`linux/rtnetlink.h`).
const ROUTE_DESTINATION: u16 = libc::RTA_DST;
const ROUTE_DEVICE: u16 = libc::RTA_OIF;
const ROUTE_GATEWAY: u16 = libc::RTA_GATEWAY;
const ROUTE_SOURCE: u16 = libc::RTA_PREFSRC;
/// `RTPROT_BOOT`, as for routes of the program `ip`.
const PROTOCOL_BOOT: u8 = 3;

/// Where a route leads.
#[derive(Debug, Clone, Copy)]
pub(super) enum Route<'a> {
    /// Packets are dropped.
    Blackhole,
    /// To this gateway.
    Via(IpAddr),
    /// To this gateway on a device.
    ViaOn(IpAddr, &'a str),
    /// To the device itself, with this preferred source address.
    To(&'a str, Option<IpAddr>),
}

/// Changes links, addresses and routes of one namespace. The methods collect requests, and
/// [`Wiring::apply`] sends them.
#[derive(Debug)]
pub(super) struct Wiring {
    connection: Connection,
    names: Routing,
    requests: Vec<Request>,
    indexes: BTreeMap<String, u32>,
}

impl Wiring {
    /// Opens connections in the namespace of the calling thread.
    pub(super) fn open() -> Result<Self> {
        let connection = Connection::open(libc::NETLINK_ROUTE).context("opening rtnetlink")?;
        let names = Routing::open().context("opening rtnetlink")?;
        Ok(Self { connection, names, requests: Vec::new(), indexes: BTreeMap::new() })
    }

    /// Brings a link up.
    pub(super) fn up(&mut self, name: &str) {
        self.requests.push(link(0, libc::IFF_UP.cast_unsigned()).text(LINK_NAME, name));
    }

    /// Creates a bridge without multicast snooping.
    pub(super) fn bridge(&mut self, name: &str) {
        let data = |data: Request| data.attribute(BRIDGE_SNOOPING, &[0]);
        self.requests.push(new_link(name, "bridge", data));
    }

    /// Creates a veth pair. One side is called `name`. The other side is the `eth0` of another
    /// namespace.
    pub(super) fn veth(&mut self, name: &str, other: &File) {
        let peer = link(0, 0).text(LINK_NAME, "eth0");
        let peer = peer.attribute(LINK_NAMESPACE, &other.as_raw_fd().to_ne_bytes());
        self.requests.push(new_link(name, "veth", |data| data.attribute(VETH_PEER, peer.payload())));
    }

    /// Makes a link a port of a bridge.
    pub(super) fn join(&mut self, name: &str, bridge: &str) -> Result<()> {
        let bridge = self.index(bridge)?;
        self.requests.push(link(0, 0).text(LINK_NAME, name).attribute(LINK_MASTER, &bridge.to_ne_bytes()));
        Ok(())
    }

    /// Adds an address to a link. Duplicate address detection is omitted.
    pub(super) fn address(&mut self, device: &str, address: IpAddr, length: u8, scope: u8) -> Result<()> {
        let [a, b, c, d] = self.index(device)?.to_ne_bytes();
        let request = Request::new(libc::RTM_NEWADDR, CREATE, &[family(address), length, 0, scope, a, b, c, d]);
        let request = put_ip(put_ip(request, ADDRESS_LOCAL, address), ADDRESS, address);
        let no_detection = if address.is_ipv6() { libc::IFA_F_NODAD } else { 0 };
        self.requests.push(request.attribute(ADDRESS_FLAGS, &no_detection.to_ne_bytes()));
        Ok(())
    }

    /// Adds a route to the main table.
    pub(super) fn route(&mut self, to: Prefix, route: Route<'_>) -> Result<()> {
        let (kind, scope) = match route {
            Route::Blackhole => (libc::RTN_BLACKHOLE, libc::RT_SCOPE_UNIVERSE),
            Route::Via(_) | Route::ViaOn(..) => (libc::RTN_UNICAST, libc::RT_SCOPE_UNIVERSE),
            Route::To(..) => (libc::RTN_UNICAST, libc::RT_SCOPE_LINK),
        };
        let header = [family(to.address), to.length, 0, 0, libc::RT_TABLE_MAIN, PROTOCOL_BOOT, scope, kind, 0, 0, 0, 0];
        let mut request = Request::new(libc::RTM_NEWROUTE, CREATE, &header);
        if to.length > 0 {
            request = put_ip(request, ROUTE_DESTINATION, to.address);
        }
        let device = match route {
            Route::ViaOn(_, device) | Route::To(device, _) => Some(device),
            Route::Blackhole | Route::Via(_) => None,
        };
        if let Some(device) = device {
            request = request.attribute(ROUTE_DEVICE, &self.index(device)?.to_ne_bytes());
        }
        match route {
            Route::Via(gateway) | Route::ViaOn(gateway, _) => request = put_ip(request, ROUTE_GATEWAY, gateway),
            Route::To(_, Some(source)) => request = put_ip(request, ROUTE_SOURCE, source),
            Route::To(_, None) | Route::Blackhole => {}
        }
        self.requests.push(request);
        Ok(())
    }

    /// Sends the collected requests.
    ///
    /// # Errors
    /// The kernel rejects a request.
    pub(super) fn apply(&mut self) -> Result<()> {
        let mut refusals: Vec<(usize, Refusal)> = Vec::new();
        let requests = std::mem::take(&mut self.requests);
        self.connection.execute(requests.iter().cloned(), |index, refusal| refusals.push((index, refusal)))?;
        let named: Vec<_> = refusals.iter().map(|(index, refusal)| (refusal, requests.get(*index))).collect();
        ensure!(named.is_empty(), "the kernel rejects {named:?}");
        Ok(())
    }

    /// The index of a link. Sends the collected requests first, because they may create the link.
    fn index(&mut self, name: &str) -> Result<u32> {
        if let Some(index) = self.indexes.get(name) {
            return Ok(*index);
        }
        self.apply()?;
        let link = self.names.link(name).with_context(|| format!("looking up the link {name}"))?;
        let index = link.with_context(|| format!("no link called {name}"))?.index;
        self.indexes.insert(name.to_owned(), index);
        Ok(index)
    }
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    u8::try_from(family).unwrap_or_default()
}

fn put_ip(request: Request, kind: u16, address: IpAddr) -> Request {
    match address {
        IpAddr::V4(address) => request.attribute(kind, &address.octets()),
        IpAddr::V6(address) => request.attribute(kind, &address.octets()),
    }
}

/// Begins a request about a link. The request sets the flags `link_flags`.
fn link(flags: u16, link_flags: u32) -> Request {
    let mut header = [0; 16];
    header[8..12].copy_from_slice(&link_flags.to_ne_bytes());
    header[12..16].copy_from_slice(&link_flags.to_ne_bytes());
    Request::new(libc::RTM_NEWLINK, flags, &header)
}

fn new_link(name: &str, kind: &str, data: impl FnOnce(Request) -> Request) -> Request {
    let info = |info: Request| info.text(INFO_KIND, kind).nested(INFO_DATA, data);
    link(CREATE, 0).text(LINK_NAME, name).nested(LINK_INFO, info)
}
