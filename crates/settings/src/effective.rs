//! The checked settings: combines all given values and reports every problem.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use headgate_core::{Family, ipvs::Scheduler};
use ipnet::IpNet;
use serde_json::Value as Json;

use super::{
    fields::{FIELDS, Field},
    raw::{Origin, Raw},
    remark::Remark,
};

/// The longest name of an interface in Linux, in bytes (`IFNAMSIZ` minus the final zero).
const INTERFACE_NAME_MAX: usize = 15;

/// The value of `nodePortAddresses` that means the node's own addresses.
const PRIMARY: &str = "primary";

headgate_core::named! {
    /// How the kernel is programmed. Named as in the option `--proxy-mode`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ProxyMode {
        /// The agent chooses nftables or iptables, without a difference for Services.
        #[default]
        Auto = "auto",
        /// The agent writes iptables rules.
        Iptables = "iptables",
        /// The agent uses virtual servers of IPVS.
        Ipvs = "ipvs",
        /// The agent uses maps of nftables.
        Nftables = "nftables",
        /// The agent carries connections itself, behind rules of nftables or iptables.
        Userspace = "userspace",
    }
}

/// Settings of mode ipvs. A timeout of zero keeps the kernel's value.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IpvsSettings {
    /// The scheduler of services that do not choose a scheduler.
    pub scheduler: Scheduler,
    /// Virtual servers with addresses in these ranges belong to other software.
    pub exclude_cidrs: Vec<IpNet>,
    /// True if the agent sets kernel parameters make others ignore ARP for services' addresses.
    pub strict_arp: bool,
    /// Idle time-out of established TCP connections.
    pub tcp_timeout: Duration,
    /// Idle time-out of TCP connections after a FIN.
    pub tcp_fin_timeout: Duration,
    /// Idle time-out of UDP flows.
    pub udp_timeout: Duration,
}

/// How rules distinguish local pods from other clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocal {
    /// Local pods have addresses in these ranges. There is at most one range per family.
    ClusterCidr(Vec<IpNet>),
    /// Local pods have addresses in the Node's `podCIDRs`.
    NodeCidr,
    /// Local pods are connected to the bridge with this name.
    BridgeInterface(String),
    /// The names of local pods' interfaces begin with this prefix.
    InterfaceNamePrefix(String),
}

impl Default for DetectLocal {
    fn default() -> Self {
        Self::ClusterCidr(Vec::new())
    }
}

/// The addresses of the node on which NodePorts answer. A family with none has all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePortSelector {
    /// Selects the node's own addresses of both families, from `bindAddress` or from the Node.
    pub primary: bool,
    /// Selects the addresses in these ranges.
    pub cidrs: Vec<IpNet>,
}

impl NodePortSelector {
    /// True if a range names `::1`. No NodePort answers there, because no kernel parameter lets
    /// packets from `::1` leave the loopback interface.
    pub fn names_ipv6_loopback(&self) -> bool {
        let is_named = |cidr: &IpNet| cidr.prefix_len() > 0 && cidr.contains(&IpAddr::from(Ipv6Addr::LOCALHOST));
        self.cidrs.iter().any(is_named)
    }
}

/// Sizes and timeouts of connection tracking. Zero keeps the kernel's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conntrack {
    /// Connections to track per CPU.
    pub max_per_core: u64,
    /// Minimum number of connections to track.
    pub min: u64,
    /// Idle time-out of established TCP connections.
    pub tcp_established_timeout: Duration,
    /// Idle time-out of TCP connections in CLOSE_WAIT.
    pub tcp_close_wait_timeout: Duration,
    /// True if conntrack does not mark TCP packets outside of the window as INVALID, except resets
    /// (`nf_conntrack_tcp_be_liberal`).
    pub tcp_be_liberal: bool,
    /// Idle time-out of UDP flows with packets in one direction.
    pub udp_timeout: Duration,
    /// Idle time-out of UDP flows with packets in both directions.
    pub udp_stream_timeout: Duration,
}

/// The checked settings. The address of a server is `None` if the server is turned off.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// How the kernel is programmed.
    pub mode: ProxyMode,
    /// `hostnameOverride`: the node's name, if the operator sets it.
    pub hostname_override: Option<String>,
    /// `bindAddress`: the node's address, if the operator sets it.
    pub bind_address: Option<IpAddr>,
    /// The address that serves `/healthz` and `/livez`.
    pub healthz_bind_address: Option<SocketAddr>,
    /// The address that serves `/metrics` and other pages.
    pub metrics_bind_address: Option<SocketAddr>,
    /// True if the agent ends when an address cannot be bound.
    pub bind_address_hard_fail: bool,
    /// How rules recognise local pods.
    pub detect_local: DetectLocal,
    /// Which addresses answer NodePorts.
    pub node_ports: NodePortSelector,
    /// True if NodePorts also answer on 127.0.0.0/8.
    pub localhost_node_ports: bool,
    /// True if every connection to a ClusterIP is masqueraded.
    pub masquerade_all: bool,
    /// Bit of the packet mark that requests masquerading, 0 to 31.
    pub masquerade_bit: u8,
    /// Time between two checks of the rules.
    pub sync_period: Duration,
    /// Shortest time between two syncs.
    pub min_sync_period: Duration,
    /// Settings of mode ipvs.
    pub ipvs: IpvsSettings,
    /// Sizes and timeouts of connection tracking.
    pub conntrack: Conntrack,
    /// The value to write to `/proc/self/oom_score_adj`.
    pub oom_score_adj: i64,
    /// Feature gate `AllowServiceExternalIPs`: rules include externalIPs.
    pub allow_external_ips: bool,
    /// Feature gate `ComponentFlagz`: `/flagz` is served.
    pub serves_flagz: bool,
    /// Feature gate `ComponentStatusz`: `/statusz` is served.
    pub serves_statusz: bool,
    /// Given settings that have no effect, each with the reason.
    pub notes: Vec<Remark>,
    /// All settings as a `KubeProxyConfiguration`, for `/configz`.
    pub document: Json,
}

struct Checker<'a> {
    raw: &'a Raw,
    problems: Vec<Remark>,
    notes: Vec<Remark>,
}

impl Settings {
    /// Checks the given values. Errors: values are invalid. Returns every problem, with the name of
    /// the setting and the remedy.
    pub fn check(raw: &Raw) -> Result<Self, Vec<Remark>> {
        let (settings, problems) = Self::of(raw);
        if problems.is_empty() { Ok(settings) } else { Err(problems) }
    }

    /// Returns the settings and every problem. A setting with a problem has its default.
    pub(super) fn of(raw: &Raw) -> (Self, Vec<Remark>) {
        let mut checker = Checker { raw, problems: Vec::new(), notes: raw.without_effect() };
        let settings = checker.settings();
        (settings, checker.problems)
    }
}

/// The settings of the time between two checks and of the shortest time between two syncs. As in
/// kube-proxy, each mode has its own fields in a file. The flags for mode iptables apply to each
/// mode except ipvs.
pub(super) const fn periods(mode: ProxyMode, origin: Origin) -> [&'static str; 2] {
    match (mode, origin) {
        (ProxyMode::Ipvs, _) => ["ipvs.syncPeriod", "ipvs.minSyncPeriod"],
        (ProxyMode::Nftables | ProxyMode::Userspace, Origin::File) => ["nftables.syncPeriod", "nftables.minSyncPeriod"],
        _ => ["iptables.syncPeriod", "iptables.minSyncPeriod"],
    }
}

const fn uses_nftables(mode: ProxyMode) -> bool {
    matches!(mode, ProxyMode::Nftables | ProxyMode::Userspace)
}

impl Checker<'_> {
    fn problem(&mut self, id: &str, what: &str) {
        let name = self.raw.name(id);
        self.problems.push(Remark::new(name, what));
    }

    fn settings(&mut self) -> Settings {
        let raw = self.raw;
        let bind_address = self.bind_address();
        let is_v6 = bind_address.is_ipv6();
        let any = if is_v6 { "[::]:10256" } else { "0.0.0.0:10256" };
        let loopback = if is_v6 { "[::1]:10249" } else { "127.0.0.1:10249" };
        let hostname_override = Some(raw.text("hostnameOverride")).filter(|name| !name.is_empty());
        // The raw value is a choice of the table of settings, or empty.
        let mode = ProxyMode::parse(&raw.text("mode")).unwrap_or_default();
        let [sync_period, min_sync_period] = periods(mode, raw.origin);
        self.periods(sync_period, min_sync_period);
        self.note_unused_modes(mode);
        let [allow_external_ips, serves_flagz, serves_statusz] = self.gates();
        let mut settings = Settings {
            mode,
            hostname_override,
            bind_address: Some(bind_address).filter(|address| !address.is_unspecified()),
            healthz_bind_address: self.server("healthzBindAddress", any, "healthz-port"),
            metrics_bind_address: self.server("metricsBindAddress", loopback, "metrics-port"),
            bind_address_hard_fail: raw.bool("bindAddressHardFail"),
            detect_local: self.detect_local(),
            node_ports: self.node_ports(mode),
            localhost_node_ports: raw.bool("iptables.localhostNodePorts"),
            masquerade_all: self.masquerade_all(mode),
            masquerade_bit: u8::try_from(raw.int("iptables.masqueradeBit")).unwrap_or(14),
            sync_period: raw.duration(sync_period),
            min_sync_period: raw.duration(min_sync_period),
            ipvs: self.ipvs(),
            conntrack: self.conntrack(),
            oom_score_adj: raw.int("oomScoreAdj"),
            allow_external_ips,
            serves_flagz,
            serves_statusz,
            notes: Vec::new(),
            document: raw.to_json(),
        };
        settings.notes = std::mem::take(&mut self.notes);
        let shown = |address: Option<SocketAddr>| address.map(|a| a.to_string()).unwrap_or_default();
        settings.document["healthzBindAddress"] = shown(settings.healthz_bind_address).into();
        settings.document["metricsBindAddress"] = shown(settings.metrics_bind_address).into();
        if settings.node_ports.primary && raw.list("nodePortAddresses").is_empty() {
            settings.document["nodePortAddresses"] = [PRIMARY].into();
        }
        if uses_nftables(mode) && raw.origin == Origin::Flags {
            for key in ["syncPeriod", "minSyncPeriod", "masqueradeAll"] {
                settings.document["nftables"][key] = settings.document["iptables"][key].clone();
            }
        }
        settings
    }

    /// Adds a note for each given setting of a mode that is not in use.
    fn note_unused_modes(&mut self, mode: ProxyMode) {
        let (raw, periods) = (self.raw, periods(mode, self.raw.origin));
        let is_unused = |id: &str| match id {
            "iptables.masqueradeAll" => mode == ProxyMode::Nftables && raw.origin == Origin::File,
            "iptables.syncPeriod" | "iptables.minSyncPeriod" => !periods.contains(&id),
            _ => match id.split_once('.') {
                Some(("ipvs", _)) => mode != ProxyMode::Ipvs,
                Some(("nftables", _)) => !uses_nftables(mode),
                _ => false,
            },
        };
        for id in FIELDS.iter().map(Field::id).filter(|id| is_unused(id) && raw.is_changed(id)) {
            self.note_unused(id, "mode", mode.as_str());
        }
    }

    /// As in kube-proxy, the flag `--masquerade-all` applies to each mode. In a file, mode nftables
    /// has its own field. Mode userspace is in no kube-proxy of today, and uses both fields.
    fn masquerade_all(&self, mode: ProxyMode) -> bool {
        let [iptables, nftables] = ["iptables", "nftables"].map(|mode| self.raw.bool(&format!("{mode}.masqueradeAll")));
        match (self.raw.origin, mode) {
            (Origin::File, ProxyMode::Nftables) => nftables,
            (Origin::File, ProxyMode::Userspace) => iptables || nftables,
            _ => iptables,
        }
    }

    fn bind_address(&mut self) -> IpAddr {
        let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let text = self.raw.text("bindAddress");
        if text.is_empty() {
            return any;
        }
        text.parse().unwrap_or_else(|_| {
            self.problem("bindAddress", &format!("{text:?} is not an IP address; write one such as 0.0.0.0"));
            any
        })
    }

    /// The address of a server. `None` if the server is turned off. As in kube-proxy, an address
    /// without a port gets the port of the deprecated flag `port_flag`, or the default of that
    /// flag.
    fn server(&mut self, id: &str, default: &str, port_flag: &str) -> Option<SocketAddr> {
        let text = self.raw.text(id);
        let port = u16::try_from(self.raw.int(port_flag)).unwrap_or(0);
        let is_given = self.raw.given(id).is_some();
        let is_off = text.is_empty() && is_given && self.raw.origin == Origin::Flags;
        if is_off || port == 0 {
            return None;
        }
        let text = if is_given && !text.is_empty() { text } else { default.to_owned() };
        let any_v6 =
            || text.strip_prefix(':')?.parse().ok().map(|port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)));
        let alone = || text.trim_matches(['[', ']']).parse::<IpAddr>().ok().map(|address| (address, port).into());
        let address = text.parse().ok().or_else(alone).or_else(any_v6);
        if address.is_none() {
            let what = format!("{text:?} is not an address with a port; write one such as {default}");
            self.problem(id, &what);
        }
        address
    }

    fn periods(&mut self, sync: &str, min_sync: &str) {
        let (period, min_period) = (self.raw.duration(sync), self.raw.duration(min_sync));
        if period.is_zero() {
            self.problem(sync, "must be more than zero, such as 30s");
        } else if min_period > period {
            let sync = self.raw.name(sync);
            self.problem(min_sync, &format!("must not be more than {sync}; write a shorter time"));
        }
    }

    fn ipvs(&mut self) -> IpvsSettings {
        const SCHEDULER: &str = "ipvs.scheduler";
        const EXCLUDED: &str = "ipvs.excludeCIDRs";
        let name = self.raw.text(SCHEDULER);
        let scheduler = if name.is_empty() { Some(Scheduler::default()) } else { Scheduler::parse(&name) };
        if scheduler.is_none() {
            let known: Vec<&str> = Scheduler::ALL.iter().map(|scheduler| scheduler.as_str()).collect();
            self.problem(SCHEDULER, &format!("{name:?} is not a scheduler of IPVS; write one of {}", known.join(", ")));
        }
        let excluded = self.raw.list(EXCLUDED);
        IpvsSettings {
            scheduler: scheduler.unwrap_or_default(),
            exclude_cidrs: excluded.iter().filter_map(|part| self.cidr(EXCLUDED, part)).collect(),
            strict_arp: self.raw.bool("ipvs.strictARP"),
            tcp_timeout: self.raw.duration("ipvs.tcpTimeout"),
            tcp_fin_timeout: self.raw.duration("ipvs.tcpFinTimeout"),
            udp_timeout: self.raw.duration("ipvs.udpTimeout"),
        }
    }

    /// Parses `text`, a part of the setting `id`, as a CIDR. As in kube-proxy and the kernel's
    /// rules, the bits after the prefix are cleared: `10.244.1.5/16` becomes `10.244.0.0/16`.
    fn cidr(&mut self, id: &str, text: &str) -> Option<IpNet> {
        let cidr = text.trim().parse::<IpNet>();
        if cidr.is_err() {
            self.problem(id, &format!("{:?} is not a CIDR; write one such as 10.0.0.0/8", text.trim()));
        }
        cidr.ok().map(|cidr| cidr.trunc())
    }

    /// Parses CIDRs separated by commas. Two CIDRs of one family are recorded as a problem.
    fn one_per_family(&mut self, id: &str) -> Vec<IpNet> {
        let text = self.raw.text(id);
        let mut cidrs: Vec<IpNet> = Vec::new();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let Some(cidr) = self.cidr(id, part) else { continue };
            let family = Family::of(cidr.addr());
            if let Some(other) = cidrs.iter().find(|other| Family::of(other.addr()) == family) {
                let what = format!(
                    "{other} and {cidr} are both {family}; pass one CIDR per family, such as 10.0.0.0/8,fd00::/48"
                );
                self.problem(id, &what);
            }
            cidrs.push(cidr);
        }
        cidrs
    }

    fn detect_local(&mut self) -> DetectLocal {
        const BRIDGE: &str = "detectLocal.bridgeInterface";
        const PREFIX: &str = "detectLocal.interfaceNamePrefix";
        let cidrs = self.one_per_family("clusterCIDR");
        let mode = self.raw.text("detectLocalMode");
        let (used, setting) = match mode.as_str() {
            "NodeCIDR" => (DetectLocal::NodeCidr, ""),
            "BridgeInterface" => (DetectLocal::BridgeInterface(self.interface(BRIDGE, &mode)), BRIDGE),
            "InterfaceNamePrefix" => (DetectLocal::InterfaceNamePrefix(self.interface(PREFIX, &mode)), PREFIX),
            _ => (DetectLocal::ClusterCidr(cidrs), "clusterCIDR"),
        };
        for id in ["clusterCIDR", BRIDGE, PREFIX] {
            if id != setting && !self.raw.text(id).is_empty() {
                self.note_unused(id, "detectLocalMode", if mode.is_empty() { "ClusterCIDR" } else { &mode });
            }
        }
        used
    }

    /// Notes that a setting has no effect while `by` has its value.
    fn note_unused(&mut self, id: &str, by: &str, value: &str) {
        let why = format!("not used while {} is {value}", self.raw.name(by));
        self.notes.push(Remark::new(self.raw.name(id), why));
    }

    fn interface(&mut self, id: &str, mode: &str) -> String {
        let name = self.raw.text(id);
        if name.is_empty() {
            let setting = self.raw.name("detectLocalMode");
            self.problem(id, &format!("is needed while {setting} is {mode}; write the name of an interface"));
        } else if name.len() > INTERFACE_NAME_MAX || name.contains(|c: char| c == '/' || c == '+' || c.is_whitespace())
        {
            let what = format!(
                "{name:?} is not the name of an interface; write at most {INTERFACE_NAME_MAX} characters, without spaces, / or +"
            );
            self.problem(id, &what);
        }
        name
    }

    /// As in kube-proxy, an empty list means the node's own addresses if the operator asks for mode
    /// nftables. In mode auto, it means all addresses, whichever mode the agent then chooses.
    fn node_ports(&mut self, mode: ProxyMode) -> NodePortSelector {
        const ID: &str = "nodePortAddresses";
        let list = self.raw.list(ID);
        let mut selected =
            NodePortSelector { primary: list.is_empty() && mode == ProxyMode::Nftables, cidrs: Vec::new() };
        for part in list.iter().map(|part| part.trim()) {
            let ranges = match part {
                PRIMARY => {
                    selected.primary = true;
                    continue;
                }
                "all" => &["0.0.0.0/0", "::/0"],
                "localhost" => &["127.0.0.0/8", "::1/128"],
                _ => std::slice::from_ref(&part),
            };
            selected.cidrs.extend(ranges.iter().filter_map(|range| self.cidr(ID, range)));
        }
        selected
    }

    fn conntrack(&mut self) -> Conntrack {
        let raw = self.raw;
        let number = |id| u64::try_from(raw.int(id)).unwrap_or(0);
        Conntrack {
            max_per_core: number("conntrack.maxPerCore"),
            min: number("conntrack.min"),
            tcp_established_timeout: raw.duration("conntrack.tcpEstablishedTimeout"),
            tcp_close_wait_timeout: raw.duration("conntrack.tcpCloseWaitTimeout"),
            tcp_be_liberal: raw.bool("conntrack.tcpBeLiberal"),
            udp_timeout: raw.duration("conntrack.udpTimeout"),
            udp_stream_timeout: raw.duration("conntrack.udpStreamTimeout"),
        }
    }

    /// The feature gates that the agent uses. As in kube-proxy 1.36, each is on by default.
    fn gates(&mut self) -> [bool; 3] {
        const GATES: [&str; 3] = ["AllowServiceExternalIPs", "ComponentFlagz", "ComponentStatusz"];
        let gates = self.raw.gates("featureGates");
        let name = self.raw.name("featureGates");
        let others = gates.keys().filter(|gate| !GATES.contains(&gate.as_str()));
        self.notes.extend(others.map(|gate| Remark::new(format!("{name} {gate}"), "Headgate does not use this gate")));
        GATES.map(|gate| gates.get(gate).copied().unwrap_or(true))
    }
}
