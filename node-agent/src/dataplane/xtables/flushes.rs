//! Notices when another program flushes tables of iptables, as a firewall does that reloads, so
//! that the agent repairs the rules at once.
//!
//! For the nft variant, the kernel announces what is deleted. For the legacy variant, a thread
//! compares the sizes of the built-in chains, which hold the jumps to the chains of the agent. The
//! agent itself makes no such change, so its own syncs wake nobody.

use std::{
    io,
    os::fd::AsRawFd as _,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use headgate_core::{
    Family,
    iptables::{Table, names::CANARY},
};
use nftables_netlink::{Changed, Presence};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{
    super::{DataplaneError, ErrorKind, KernelHandle, Wake, metrics::DataplaneMetrics, nftables::Watch},
    programs::{Programs, Variant},
};

/// How often the thread looks at the tables of the legacy variant.
const PERIOD: Duration = Duration::from_millis(500);

const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// The kernel handle of dataplanes with rules of iptables. What it started ends when it is dropped.
#[derive(Debug, Default)]
pub struct Flushes {
    variant: Variant,
    _watch: Option<Watch>,
    _stop: Option<mpsc::Sender<()>>,
}

impl Flushes {
    /// For a variant, which must not be `Auto`.
    pub(in crate::dataplane) fn of(variant: Variant) -> Self {
        Self { variant, ..Self::default() }
    }
}

impl KernelHandle for Flushes {
    /// Counts nothing, because the metrics count changes of the tables of mode nftables.
    fn follow(&mut self, wake: Wake, _metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        let started = match self.variant {
            Variant::Legacy => follow_sizes(wake).map(|stop| self._stop = Some(stop)),
            _ => Watch::follow(None, flush, wake, DataplaneMetrics::default()).map(|watch| self._watch = Some(watch)),
        };
        started.map_err(|error| DataplaneError::new(ErrorKind::Retry, format!("following iptables: {error}")))
    }
}

/// Whether a flush makes this change. The family and the sentence do not matter, because a check
/// looks for the rules themselves.
fn flush(change: &Changed) -> Option<(Family, String)> {
    let is_part = match change {
        Changed::Table(Presence::Absent, _) => true,
        Changed::Chain(Presence::Absent, chain) => chain.name == CANARY,
        Changed::Rule { presence: Presence::Absent, chain, .. } => BUILT_IN.contains(&chain.as_str()),
        _ => false,
    };
    is_part.then(|| (Family::V4, String::new()))
}

/// Starts the thread, which ends when the sender is dropped.
fn follow_sizes(wake: Wake) -> io::Result<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    thread::Builder::new().name("iptables".into()).spawn(move || {
        let mut before = sizes();
        while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let now = sizes();
            if before.iter().zip(&now).any(|(before, now)| now < before) {
                wake();
            }
            before = now;
        }
    })?;
    Ok(stop)
}

/// The sizes of the built-in chains of the tables with Services, for both families.
fn sizes() -> Vec<Option<u32>> {
    let tables = |family| [Table::Nat, Table::Filter].map(|table| size(&Programs::new(family, Variant::Legacy), table));
    Family::BOTH.into_iter().flat_map(tables).collect()
}

/// The size of the rules in the built-in chains. `None` if the table does not exist.
#[allow(unsafe_code)]
fn size(programs: &Programs, table: Table) -> Option<u32> {
    /// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`.
    const GET_INFO: libc::c_int = 64;
    if !programs.may_have(table) {
        return None;
    }
    let (domain, level) = match programs.family() {
        Family::V4 => (AddressFamily::Inet, libc::SOL_IP),
        Family::V6 => (AddressFamily::Inet6, libc::SOL_IPV6),
    };
    let socket = socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).ok()?;
    // `struct ipt_getinfo`, which `struct ip6t_getinfo` equals: the name of the table in 32 bytes,
    // a mask, five offsets at which the built-in chains begin, five at which they end, and two
    // counts. The offsets of a chain that the table lacks are equal.
    let mut info = [0_u8; 84];
    info[..table.as_str().len()].copy_from_slice(table.as_str().as_bytes());
    let mut length = libc::socklen_t::try_from(info.len()).ok()?;
    // SAFETY: the kernel writes at most `length` bytes, and `info` has so many.
    let answer =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, GET_INFO, info.as_mut_ptr().cast(), &raw mut length) };
    let offsets = |at: usize| info[at..at + 20].chunks_exact(4).flat_map(<[u8; 4]>::try_from).map(u32::from_ne_bytes);
    (answer == 0).then(|| offsets(56).zip(offsets(36)).map(|(end, begin)| end.saturating_sub(begin)).sum())
}
