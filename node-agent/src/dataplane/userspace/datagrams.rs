//! The listeners for datagrams: one socket for each UDP address of a Service, to which rules
//! redirect (`nftables/layout/datagrams.rs`). An address without a listener goes straight to
//! endpoints.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::OwnedFd,
};

use headgate_core::{Family, nftables::Lookup};
use headgate_userspace::{ListenerId, UdpProxy};
use socket2::Type;
use tracing::warn;

use super::{
    super::{
        DataplaneError,
        nftables::{Redirect, can_redirect},
    },
    route::listener_address,
    rules::GatedRules,
    sockets::{bind, scope},
};

/// An address of a Service, and the map in which the rules find the address.
type Frontend = (Lookup, SocketAddr);

#[derive(Debug, Clone, Copy)]
struct DatagramListener {
    id: ListenerId,
    redirect: Redirect,
}

#[derive(Debug)]
pub(super) struct DatagramListeners {
    family: Family,
    /// The wanted listeners. `None` if the kernel refused the socket.
    all: BTreeMap<Frontend, Option<DatagramListener>>,
    /// Listeners that rules do not use yet.
    added: Vec<Redirect>,
    /// Listeners that rules may still use.
    removed: Vec<DatagramListener>,
    problem: Option<String>,
}

impl DatagramListeners {
    pub(super) fn new(family: Family) -> Self {
        Self { family, all: BTreeMap::new(), added: Vec::new(), removed: Vec::new(), problem: None }
    }

    /// Opens a listener for an address, unless it is open or its datagrams cannot be redirected.
    pub(super) fn add(&mut self, udp: &UdpProxy, (lookup, frontend): Frontend) {
        if !can_redirect(lookup) || self.all.get(&(lookup, frontend)).is_some_and(Option::is_some) {
            return;
        }
        let opened = open(udp, self.family, lookup, frontend);
        if let Err(error) = &opened {
            let sentence = format!("datagrams for {frontend} go straight to endpoints, because of a socket: {error}");
            if self.problem.is_none() {
                warn!("{sentence}");
            }
            self.problem = Some(sentence);
        }
        let listener = opened.ok();
        self.added.extend(listener.map(|listener| listener.redirect));
        self.all.insert((lookup, frontend), listener);
    }

    /// Closes the listener for an address at the next [`Self::write`].
    pub(super) fn remove(&mut self, frontend: Frontend) {
        let Some(listener) = self.all.remove(&frontend).flatten() else { return };
        let added = self.added.len();
        self.added.retain(|redirect| *redirect != listener.redirect);
        if self.added.len() == added {
            self.removed.push(listener);
        }
    }

    /// Writes the changes since the last call, or all redirects in a full sync. A full sync also
    /// tries again to open listeners.
    /// Errors: the kernel refuses the changes. The error says what the caller must do.
    pub(super) fn write<R: GatedRules>(
        &mut self,
        udp: &UdpProxy,
        rules: &R,
        kernel: &mut R::Kernel,
        is_full: bool,
    ) -> Result<(), DataplaneError> {
        if is_full {
            self.problem = None;
            let refused = self.all.iter().filter(|(_, listener)| listener.is_none()).map(|(frontend, _)| *frontend);
            refused.collect::<Vec<_>>().into_iter().for_each(|frontend| self.add(udp, frontend));
            self.added = self.all.values().flatten().map(|listener| listener.redirect).collect();
        }
        let removed: Vec<Redirect> = self.removed.iter().map(|listener| listener.redirect).collect();
        rules.change_redirects(kernel, is_full, &removed, &self.added)?;
        self.added.clear();
        self.removed.drain(..).for_each(|listener| udp.stop_listening(listener.id));
        Ok(())
    }

    /// Why some datagrams do not go to the proxy, as a sentence.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.clone()
    }
}

fn open(udp: &UdpProxy, family: Family, lookup: Lookup, frontend: SocketAddr) -> io::Result<DatagramListener> {
    let socket = UdpSocket::from(bind((listener_address(family), 0).into(), Type::DGRAM)?);
    let listener_port = socket.local_addr()?.port();
    let id = udp.listen(OwnedFd::from(socket), scope(lookup), frontend)?;
    Ok(DatagramListener { id, redirect: Redirect { lookup, frontend, listener_port } })
}
