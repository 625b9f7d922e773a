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

use std::{fmt, fs, io, net::SocketAddr, path::Path};

use headgate_settings::Settings;
use tracing::warn;

use crate::{
    dataplane_choice::OTHER_PROGRAM,
    options::{Options, Standby},
    persist::ROLE_FILE,
};

use self::{decision::Decision, processes::are_visible};
pub(crate) use self::{rules::Kinds, watch::OtherProxyWatch};

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

    fn kube_proxy(mode: Option<&str>) -> Self {
        Self { program: Self::KUBE_PROXY.to_owned(), mode: mode.map(str::to_owned) }
    }

    /// Stands for no proxy, with `--standby=always`.
    fn none() -> Self {
        Self { program: "no service proxy".to_owned(), mode: None }
    }

    fn unknown() -> Self {
        Self { program: Self::UNKNOWN.to_owned(), mode: None }
    }

    /// True if this is another proxy than `known`, or the same one with its mode.
    fn says_more_than(&self, known: &Self) -> bool {
        let is_other = self.program != known.program && self.program != Self::UNKNOWN;
        is_other || self.mode.is_some() && self.mode != known.mode
    }

    /// The mode for [`crate::dataplane_choice::leftovers`], if it is known what this proxy uses.
    pub(crate) fn uses(&self) -> Option<&str> {
        let is_unknown = [Self::KUBE_PROXY, Self::UNKNOWN].contains(&&*self.program);
        if is_unknown { self.mode.as_deref() } else { Some(OTHER_PROGRAM) }
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

/// What one look has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// The other proxy, if there is any sign of it.
    pub(crate) other: Option<Other>,
    /// True if its health page answers with success.
    pub(crate) is_healthy: bool,
    /// True if there are such rules, whoever wrote them. False if they were not read.
    pub(crate) has_rules: bool,
}

/// When a look reads rules, which costs most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadRules {
    /// Without any other sign.
    Silent,
    /// With another sign, and only rules that this agent does not write itself.
    Seen(Kinds),
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
        let (mut look, process) = (Look::default(), processes::find());
        let mode = self.metrics.iter().find_map(|address| pages::mode(*address));
        let health = self.health.iter().find_map(|address| pages::health(*address));
        look.is_healthy = health == Some(true);
        look.other = match (process, mode) {
            (Some(program), mode) => Some(Other { program, mode: mode.flatten() }),
            (None, Some(Some(mode))) => Some(Other::kube_proxy(Some(&mode))),
            (None, Some(None)) => Some(Other::unknown()),
            (None, None) => health.map(|_| Other::unknown()),
        };
        let kinds = match read {
            ReadRules::Silent => look.other.is_none().then_some(Kinds::ALL),
            ReadRules::Seen(kinds) => look.other.is_some().then_some(kinds),
        };
        let Some(kinds) = kinds else {
            self.last = None;
            return look;
        };
        match rules::read(kinds) {
            Ok(found) => {
                look.has_rules = !found.is_empty();
                let mode = self.last.as_ref().and_then(|last| found.fresh(last));
                if let Some(mode) = mode {
                    let other = look.other.get_or_insert_with(|| Other::kube_proxy(None));
                    other.mode.get_or_insert_with(|| mode.to_owned());
                }
                self.last = Some(found);
            }
            Err(error) => {
                warn!(%error, "cannot read whether another service proxy writes rules; the agent counts this as a sign of one");
                look.other.get_or_insert_with(|| Other::kube_proxy(None));
            }
        }
        look
    }
}

/// Whether the agent of the last run programmed this node, as its folder remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastRole {
    /// It did.
    Programmed,
    /// It stood by.
    StoodBy,
}

impl LastRole {
    /// Reads the file. `None` if there is no valid one.
    pub(crate) fn read(folder: &Path) -> Option<Self> {
        match fs::read_to_string(folder.join(ROLE_FILE)).ok()?.trim() {
            "programmed" => Some(Self::Programmed),
            "stood by" => Some(Self::StoodBy),
            _ => None,
        }
    }

    /// Writes the file. Errors: the file cannot be written. The next start then waits for signs of
    /// another proxy, if there are rules of kube-proxy.
    pub(crate) fn write(self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let text = if self == Self::Programmed { "programmed\n" } else { "stood by\n" };
        fs::write(folder.join(ROLE_FILE), text)
    }
}

/// The other proxy, if an agent with these options would stand by now. Looks once, so rules without
/// any other sign count, unless the last run of an agent programmed the node.
pub(crate) fn that_works(options: &Options, settings: &Settings) -> Option<Other> {
    let last = options.state_folder().and_then(LastRole::read);
    let look = match options.standby {
        Standby::Never => return None,
        Standby::Always => return Some(Other::none()),
        Standby::Auto => Looker::new(settings).look(ReadRules::Silent),
    };
    let (_, stands_by) = Decision::begin(&look, last, std::time::Instant::now());
    stands_by.then(|| look.other.unwrap_or_else(|| Other::kube_proxy(None)))
}
