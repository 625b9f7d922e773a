//! The redirects of datagrams in mode userspace. The proxy writes these maps, because it knows the
//! ports of its listeners. Without an element, datagrams go straight to endpoints.

use std::net::SocketAddr;

use headgate_core::{Family, nftables::Lookup};
use nftables_netlink::{Element, Transaction, Value};

use super::{
    super::DataplaneError,
    Connection,
    elements::{REPLY_ADDRESSES, REPLY_PORTS, datagram_maps, listener_map},
    failure,
    layout::table_name,
};

/// Sends the datagrams for an address of a Service to a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Redirect {
    /// The map of frontends that has the address.
    pub lookup: Lookup,
    /// The address and port of the Service.
    pub frontend: SocketAddr,
    /// The port of the listener.
    pub listener_port: u16,
}

impl Redirect {
    /// The elements, each with its map.
    fn elements(self) -> impl Iterator<Item = (&'static str, Element)> {
        let (address, port) = (Value::from(self.frontend.ip()), Value::port(self.frontend.port()));
        let key = Value::concatenation(&[address.clone(), port.clone()]);
        let listener = Value::port(self.listener_port);
        let request = listener_map(self.lookup).map(|map| (map, Element::new(key).with_value(listener.clone())));
        let replies = [
            (REPLY_ADDRESSES, Element::new(listener.clone()).with_value(address)),
            (REPLY_PORTS, Element::new(listener).with_value(port)),
        ];
        request.into_iter().chain(replies)
    }
}

/// Whether the datagrams for the frontends of a map can be redirected.
pub(in super::super) fn can_redirect(lookup: Lookup) -> bool {
    listener_map(lookup).is_some()
}

/// Removes and adds redirects in one transaction. With `replaces_all`, the kernel then has only the
/// added redirects.
/// Errors: the kernel refuses the transaction, or does not answer. A full sync repairs the maps.
pub(in super::super) fn change_redirects(
    kernel: &mut Connection,
    family: Family,
    replaces_all: bool,
    removed: &[Redirect],
    added: &[Redirect],
) -> Result<(), DataplaneError> {
    let (table, mut transaction) = (table_name(family), Transaction::new());
    if replaces_all {
        datagram_maps().for_each(|map| transaction.flush_set(&table, map));
    } else {
        for (map, element) in removed.iter().flat_map(|redirect| redirect.elements()) {
            transaction.delete_elements(&table, map, [Element::new(element.key)]);
        }
    }
    for (map, element) in added.iter().flat_map(|redirect| redirect.elements()) {
        transaction.add_elements(&table, map, [element]);
    }
    if transaction.is_empty() {
        return Ok(());
    }
    kernel.commit(family, &transaction).map_err(|error| failure("writing the redirects of datagrams", &error))
}
