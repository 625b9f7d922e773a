//! Finds another service proxy on the node, and decides whether the agent programs the node or
//! stands by.
//!
//! There are three kinds of signs: pages ([`pages`]), processes ([`processes`]) and rules that
//! somebody has written since the last look ([`rules`]). Any sign says that the other proxy works.
//! Only the absence of all kinds for some time says that it has gone: in a crash loop, pages and
//! processes come and go, and a proxy at other addresses has no known page. What cannot be read
//! counts as a sign.

mod decision;
mod pages;
mod processes;
mod rules;
mod watch;

use std::{fmt, fs, net::SocketAddr, path::Path, time::Duration};

use headgate_settings::Settings;
use tracing::warn;

use self::decision::Decision;
pub(crate) use self::watch::OtherProxyWatch;
use crate::{
    dataplane_choice::OTHER_PROGRAM,
    options::{Options, Standby},
    persist::ROLE_FILE,
};

/// The kernel has this file if it has IPv6.
const IPV6: &str = "/proc/net/if_inet6";

/// Another service proxy, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Other {
    /// Such as "kube-proxy".
    pub(crate) program: String,
    /// Its mode, such as "iptables".
    pub(crate) mode: Option<String>,
}

impl Other {
    /// The program whose rules have the names of kube-proxy's.
    pub(crate) const KUBE_PROXY: &str = "kube-proxy";

    /// A program at kube-proxy's addresses that does not tell its mode.
    const UNKNOWN: &str = "another service proxy";

    /// Stands for no proxy, with `--standby=always`.
    const NONE: &str = "no service proxy";

    fn of(program: &str, mode: Option<&str>) -> Self {
        Self { program: program.to_owned(), mode: mode.map(str::to_owned) }
    }

    /// True if this is another proxy than `known`, or the same one with its mode.
    fn says_more_than(&self, known: &Self) -> bool {
        let is_other = self.program != known.program && self.program != Self::UNKNOWN;
        is_other || self.mode.is_some() && self.mode != known.mode
    }

    /// The mode for [`crate::dataplane_choice::leftovers`], if it is known what this proxy uses.
    pub(crate) fn uses(&self) -> Option<&str> {
        match &*self.program {
            Self::KUBE_PROXY | Self::UNKNOWN => self.mode.as_deref(),
            _ => Some(OTHER_PROGRAM),
        }
    }
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mode {
            Some(mode) => write!(f, "{} ({mode})", self.program),
            None => f.write_str(&self.program),
        }
    }
}

/// Of which IP families of the kernel a proxy has written its rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Synced {
    None,
    Some,
    All,
}

impl Synced {
    /// If rules of only some families are there for this time, the proxy programs no others.
    pub(crate) const NO_MORE_AFTER: Duration = Duration::from_secs(300);
}

/// What one look has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// The other proxy, if there is any sign of it.
    pub(crate) other: Option<Other>,
    /// Of which IP families it has written its rules, if it says so.
    pub(crate) synced: Option<Synced>,
    /// False if rules were not read that might be a sign.
    pub(crate) is_whole: bool,
    /// True if there are rules of kube-proxy, whoever wrote them. False if they were not read.
    pub(crate) has_rules: bool,
}

/// Whether a look reads rules, which costs most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadRules {
    No,
    /// All rules, unless there is another sign.
    All,
    /// If there is another sign: only rules that this agent does not write itself, with or without
    /// kube-proxy's chains of iptables.
    Beside {
        chains: bool,
    },
}

/// Looks for the other proxy. Looks write nothing, and make the kernel load no module.
#[derive(Debug)]
pub(crate) struct Looker {
    metrics: Vec<SocketAddr>,
    health: Vec<SocketAddr>,
    /// The rules at the last look that read them.
    last: Option<rules::KubeProxyRules>,
}

impl Looker {
    /// Looks at the addresses of the settings, and at those where kube-proxy listens by default.
    pub(crate) fn new(settings: &Settings) -> Self {
        let with_default = |address: Option<SocketAddr>, port: u16| {
            let mut all: Vec<SocketAddr> = address.into_iter().chain([([127, 0, 0, 1], port).into()]).collect();
            all.dedup();
            all
        };
        Self {
            metrics: with_default(settings.metrics_bind_address, 10249),
            health: with_default(settings.healthz_bind_address, 10256),
            last: None,
        }
    }

    /// Looks once. Blocks for some seconds if a page does not answer.
    pub(crate) fn look(&mut self, read: ReadRules) -> Look {
        let mode = self.metrics.iter().find_map(|address| pages::mode(*address));
        let serves_health = self.health.iter().any(|address| pages::is_serving_health(*address));
        let seen = match (processes::find(), mode) {
            (Some(program), mode) => Some(Other { program, mode: mode.flatten() }),
            (None, Some(Some(mode))) => Some(Other::of(Other::KUBE_PROXY, Some(&mode))),
            (None, mode) => (mode.is_some() || serves_health).then(|| Other::of(Other::UNKNOWN, None)),
        };
        let is_whole = read != ReadRules::No || seen.is_some();
        // kube-proxy programs each family that the kernel has, and of which its tools work.
        let families = if Path::new(IPV6).exists() { &["IPv4", "IPv6"][..] } else { &["IPv4"] };
        let synced = |at: &SocketAddr| pages::synced(*at, families);
        let synced = seen.as_ref().and_then(|_| self.metrics.iter().find_map(synced));
        let mut look = Look { other: seen, synced, is_whole, has_rules: false };
        let read = match read {
            ReadRules::All if look.other.is_none() => rules::read(true, true),
            ReadRules::Beside { chains } if look.other.is_some() => rules::read(chains, false),
            _ => {
                self.last.take_if(|_| look.other.is_some());
                return look;
            }
        };
        match read {
            Ok(found) => {
                look.has_rules = !found.is_empty();
                if let Some(mode) = self.last.as_ref().and_then(|last| found.fresh(last)) {
                    let other = look.other.get_or_insert_with(|| Other::of(Other::KUBE_PROXY, None));
                    other.mode.get_or_insert_with(|| mode.to_owned());
                }
                self.last = Some(found);
            }
            Err(error) => {
                warn!(%error, "cannot read whether another service proxy writes rules; the agent counts this as a sign of one");
                look.other.get_or_insert_with(|| Other::of(Other::KUBE_PROXY, None));
            }
        }
        look
    }
}

/// Whether the last run of an agent programmed this node, as its folder remembers; `None` if it
/// remembers nothing.
fn has_programmed(folder: &Path) -> Option<bool> {
    match fs::read_to_string(folder.join(ROLE_FILE)).ok()?.trim() {
        PROGRAMMED => Some(true),
        STOOD_BY => Some(false),
        _ => None,
    }
}

const PROGRAMMED: &str = "programmed";
const STOOD_BY: &str = "stood by";

/// The other proxy, if pages or processes show one, so that `--init-only` sets nothing. Old rules
/// are no sign: an earlier run of Headgate may have written them.
pub(crate) fn that_works(options: &Options, settings: &Settings) -> Option<Other> {
    match options.standby {
        Standby::Never => None,
        Standby::Always => Some(Other::of(Other::NONE, None)),
        Standby::Auto => Looker::new(settings).look(ReadRules::No).other,
    }
}
