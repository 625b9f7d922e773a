//! Notices when another program flushes tables of iptables, so that the agent repairs the rules at
//! once. For the nft variant, the kernel announces deletions. For the legacy variant, a thread
//! compares the sizes of the built-in chains, from which the agent deletes nothing. New jumps and
//! lost notifications do not count while its full sync runs.

use std::{
    any::Any,
    io,
    os::fd::AsRawFd as _,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use headgate_core::{
    Family,
    iptables::{RulesTable, names::CANARY},
};
use nftables_netlink::{Changed, Presence};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{
    super::{
        DataplaneError, ErrorKind, KernelHandle, WakeLoop,
        metrics::DataplaneMetrics,
        nftables::{Syncs, Watch},
    },
    programs::{Programs, Variant},
};

/// How often the thread looks at the tables of the legacy variant.
const PERIOD: Duration = Duration::from_millis(500);

const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// The kernel handle of dataplanes with rules of iptables. What it started ends when it is dropped.
#[derive(Debug, Default)]
pub struct Flushes {
    variant: Variant,
    syncs: Syncs,
    _started: Option<Box<dyn Any + Send>>,
}

impl Flushes {
    /// For a variant, which must not be `Auto`.
    pub(in crate::dataplane) fn of(variant: Variant) -> Self {
        Self { variant, ..Self::default() }
    }
}

impl KernelHandle for Flushes {
    /// Counts nothing, because the metrics count changes of the tables of mode nftables.
    fn follow(&mut self, wake: WakeLoop, _metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        let failed = |error: io::Error| DataplaneError::new(ErrorKind::Retry, format!("following iptables: {error}"));
        let (syncs, metrics) = (self.syncs.clone(), DataplaneMetrics::default());
        let started: Box<dyn Any + Send> = match self.variant {
            Variant::Legacy => Box::new(follow_sizes(wake, syncs).map_err(failed)?),
            _ => Box::new(Watch::start(None, syncs, flush, wake, metrics).map_err(failed)?),
        };
        self._started = Some(started);
        Ok(())
    }

    fn note_sync(&self) {
        self.syncs.note();
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
fn follow_sizes(wake: WakeLoop, syncs: Syncs) -> io::Result<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    thread::Builder::new().name("iptables".into()).spawn(move || {
        let look = || (syncs.count(), sizes());
        let (mut count, mut before) = look();
        while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let (count_now, now) = look();
            // A program that reloads may load more rules than it flushed.
            let is_loaded = now != before && syncs.are_none_since(count);
            if is_loaded || before.iter().zip(&now).any(|(before, now)| now < before) {
                wake();
            }
            (count, before) = (count_now, now);
        }
    })?;
    Ok(stop)
}

/// The sizes of the built-in chains of the tables with Services, for both families.
fn sizes() -> Vec<Option<u32>> {
    let tables = |family| {
        [RulesTable::Nat, RulesTable::Filter].map(|table| size(&Programs::new(family, Variant::Legacy), table))
    };
    Family::BOTH.into_iter().flat_map(tables).collect()
}

/// The size of the rules in the built-in chains. `None` if the table does not exist.
#[allow(unsafe_code)]
fn size(programs: &Programs, table: RulesTable) -> Option<u32> {
    /// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`.
    const GET_INFO: libc::c_int = 64;
    if !programs.may_have(table) {
        return None;
    }
    let (domain, level) = match programs.family() {
        Family::V4 => (AddressFamily::INET, libc::SOL_IP),
        Family::V6 => (AddressFamily::INET6, libc::SOL_IPV6),
    };
    let socket = socket_with(domain, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
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
