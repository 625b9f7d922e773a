//! Creates and lists entries of the connection tracking table over netlink, in the namespace of the
//! calling thread.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result};
use headgate_core::Family;
use headgate_netlink::{BATCH_REQUESTS, Connection, Request, attributes};
use headgate_node_agent::observers::conntrack::wire::{
    self, DESTINATION_PORT, MESSAGE_NEW, PROTOCOL_NUMBER, SOURCE_PORT, TUPLE_IP, TUPLE_ORIGINAL, TUPLE_PROTOCOL,
    TUPLE_REPLY,
};

/// `NLM_F_CREATE | NLM_F_EXCL`.
const CREATE: u16 = 0x400 | 0x200;
const TIMEOUT: u16 = 7;
const STATUS: u16 = 3;
/// `IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED | IPS_SRC_NAT_DONE | IPS_DST_NAT_DONE`.
const ESTABLISHED: u32 = 0x18e;
/// A time-out that is long enough for all entries to outlive a test.
const TIMEOUT_SECONDS: u32 = 3600;

/// An entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Flow {
    /// The IP protocol number.
    pub(crate) protocol: u8,
    /// The client.
    pub(crate) client: SocketAddr,
    /// The client's destination.
    pub(crate) to: SocketAddr,
    /// The server that answers, which is the destination after translation.
    pub(crate) answered_by: SocketAddr,
}

impl Flow {
    fn insertion(self) -> Request {
        let family = Family::of(self.to.ip());
        let tuple = move |from: SocketAddr, to: SocketAddr| {
            move |tuple: Request| {
                let ip = move |ip: Request| {
                    let kinds = if family == Family::V4 { [1, 2] } else { [3, 4] };
                    kinds.into_iter().zip([from.ip(), to.ip()]).fold(ip, |ip, (kind, address)| match address {
                        IpAddr::V4(address) => ip.attribute(kind, &address.octets()),
                        IpAddr::V6(address) => ip.attribute(kind, &address.octets()),
                    })
                };
                tuple.nested(TUPLE_IP, ip).nested(TUPLE_PROTOCOL, move |part| {
                    part.attribute(PROTOCOL_NUMBER, &[self.protocol])
                        .attribute(SOURCE_PORT, &from.port().to_be_bytes())
                        .attribute(DESTINATION_PORT, &to.port().to_be_bytes())
                })
            }
        };
        Request::new(MESSAGE_NEW, CREATE, &wire::header(family))
            .nested(TUPLE_ORIGINAL, tuple(self.client, self.to))
            .nested(TUPLE_REPLY, tuple(self.answered_by, self.client))
            .attribute(TIMEOUT, &TIMEOUT_SECONDS.to_be_bytes())
            .attribute(STATUS, &ESTABLISHED.to_be_bytes())
    }
}

/// Creates entries in the namespace of the calling thread.
///
/// # Errors
/// The kernel refuses an entry.
pub(crate) fn insert(flows: impl IntoIterator<Item = Flow>) -> Result<()> {
    let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
    let mut flows = flows.into_iter().peekable();
    while flows.peek().is_some() {
        let batch: Vec<Request> = flows.by_ref().take(BATCH_REQUESTS).map(Flow::insertion).collect();
        let mut refusal = None;
        connection.execute(batch, |_, error| refusal = Some(error))?;
        if let Some(error) = refusal {
            return Err(error).context("creating an entry of the connection tracking table");
        }
    }
    Ok(())
}

/// All TCP, UDP and SCTP entries of a family in the namespace of the calling thread.
///
/// # Errors
/// The kernel does not list the entries.
pub(crate) fn entries(family: Family) -> Result<BTreeSet<Flow>> {
    let request = Request::new(MESSAGE_NEW | 1, 0x300, &wire::header(family));
    let mut found = BTreeSet::new();
    Connection::open(libc::NETLINK_NETFILTER)?.dump(request, |_, payload| found.extend(parse(payload)))?;
    Ok(found)
}

fn parse(payload: &[u8]) -> Option<Flow> {
    let part = |kind: u16| attributes(payload.get(4..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    let (protocol, client, to) = tuple(part(TUPLE_ORIGINAL)?)?;
    let (_, answered_by, _) = tuple(part(TUPLE_REPLY)?)?;
    Some(Flow { protocol, client, to, answered_by })
}

fn tuple(bytes: &[u8]) -> Option<(u8, SocketAddr, SocketAddr)> {
    let of = |part: u16, kinds: &[u16]| {
        let (_, nested) = attributes(bytes).find(|(found, _)| *found == part)?;
        attributes(nested).find(|(found, _)| kinds.contains(found)).map(|(_, value)| value)
    };
    let address = |kinds: &[u16]| {
        let value = of(TUPLE_IP, kinds)?;
        let v4 = <[u8; 4]>::try_from(value).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
    };
    let port = |kind: u16| Some(u16::from_be_bytes(of(TUPLE_PROTOCOL, &[kind])?.try_into().ok()?));
    let source = SocketAddr::new(address(&[1, 3])?, port(SOURCE_PORT)?);
    let destination = SocketAddr::new(address(&[2, 4])?, port(DESTINATION_PORT)?);
    Some((*of(TUPLE_PROTOCOL, &[PROTOCOL_NUMBER])?.first()?, source, destination))
}
