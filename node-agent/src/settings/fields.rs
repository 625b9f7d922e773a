//! Every setting of kube-proxy 1.36, in one table: where it stands in the configuration file, which
//! flag sets it, what it may hold, and what it means here. Files and flags are read by it, and
//! `docs/configuration.md` is written from it.

use super::value::Kind;

/// What a setting means to Headgate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// It does this.
    Used(&'static str),
    /// Nothing, for this reason. A value other than the default is named in a warning.
    Ignored(&'static str),
}

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Path in a `KubeProxyConfiguration`, with dots; empty where only a flag exists.
    pub path: &'static str,
    /// Name of the flag without dashes; empty where there is none.
    pub flag: &'static str,
    /// Another name of the flag.
    pub alias: &'static str,
    /// What it may hold.
    pub kind: Kind,
    /// The default, as the flag takes it; empty for unset.
    pub default: &'static str,
    /// What it does here.
    pub meaning: Meaning,
}

impl Field {
    /// What settings are filed under: the path, or the flag where there is none.
    #[must_use]
    pub fn id(&self) -> &'static str {
        if self.path.is_empty() { self.flag } else { self.path }
    }
}

const fn field(path: &'static str, flag: &'static str, kind: Kind, default: &'static str, meaning: Meaning) -> Field {
    Field { path, flag, alias: "", kind, default, meaning }
}

const fn used(path: &'static str, flag: &'static str, kind: Kind, default: &'static str, what: &'static str) -> Field {
    field(path, flag, kind, default, Meaning::Used(what))
}

const fn ignored(
    path: &'static str,
    flag: &'static str,
    kind: Kind,
    default: &'static str,
    why: &'static str,
) -> Field {
    field(path, flag, kind, default, Meaning::Ignored(why))
}

const NO_API: &str = "the agent holds no API credentials: it is served by --control-plane";
const WINDOWS: &str = "for Windows only";
const NFTABLES: &str = "only for mode nftables, which is not built yet";
const LIBRARY: &str = "kube-proxy does not use it either: a library brings it";
const LOGS: &str = "--log (or HEADGATE_LOG) sets what is logged; logs go to standard error as text";

const NATURAL: Kind = Kind::Int(0, i64::MAX);
const NUMBER: Kind = Kind::Int(i64::MIN, i64::MAX);

/// The table.
pub const FIELDS: &[Field] = &[
    used(
        "mode",
        "proxy-mode",
        Kind::Choice(&["", "auto", "iptables", "ipvs", "nftables", "userspace"]),
        "auto",
        "How the kernel is programmed: `auto` (also when empty) takes the best that the node can run, `iptables` and `ipvs` are built, others are refused until they are. Where a node lacks what `ipvs` needs, it runs `iptables`, and says so in the log, in `headgatectl agents` and in `/status` of the metrics port",
    ),
    used(
        "hostnameOverride",
        "",
        Kind::Text,
        "",
        "Name of the node, where `--node-name` (or `--hostname-override`) gives none",
    ),
    used(
        "bindAddress",
        "bind-address",
        Kind::Text,
        "0.0.0.0",
        "An address other than `0.0.0.0` and `::` is taken as the node's address of its family, before what the Node says; its family also decides on the defaults of `healthzBindAddress` and `metricsBindAddress`",
    ),
    used(
        "healthzBindAddress",
        "healthz-bind-address",
        Kind::Text,
        "0.0.0.0:10256",
        "Where `/healthz` and `/livez` are served. `0.0.0.0` and `[::]` both mean all addresses of both families, as with kube-proxy. As a flag, empty turns it off",
    ),
    used(
        "metricsBindAddress",
        "metrics-bind-address",
        Kind::Text,
        "127.0.0.1:10249",
        "Where `/metrics`, `/metrics/slis`, `/healthz`, `/proxyMode`, `/configz`, `/flagz`, `/statusz` and `/status` are served. `0.0.0.0` and `[::]` both mean all addresses of both families. As a flag, empty turns it off",
    ),
    used(
        "",
        "healthz-port",
        Kind::Int(0, 65_535),
        "10256",
        "Port of `--healthz-bind-address` where that names none. 0 turns the pages off. kube-proxy calls this flag deprecated",
    ),
    used("", "metrics-port", Kind::Int(0, 65_535), "10249", "The same for `--metrics-bind-address`"),
    used(
        "bindAddressHardFail",
        "bind-address-hard-fail",
        Kind::Bool,
        "false",
        "The agent ends when one of these addresses cannot be bound. Otherwise it logs an error and tries again",
    ),
    used(
        "clusterCIDR",
        "cluster-cidr",
        Kind::Text,
        "",
        "Range of pod addresses, one per family, separated by commas: local pods are told by it in mode `ClusterCIDR`. Without a range of a family, nothing to ClusterIPs of the family is masqueraded",
    ),
    used(
        "detectLocalMode",
        "detect-local-mode",
        Kind::Choice(&["", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"]),
        "ClusterCIDR",
        "How local pods are told from other clients. `NodeCIDR` takes the Node's `podCIDRs`; when they change, rules are written anew (kube-proxy ends)",
    ),
    used(
        "detectLocal.bridgeInterface",
        "pod-bridge-interface",
        Kind::Text,
        "",
        "The bridge that local pods are on, for mode `BridgeInterface`",
    ),
    used(
        "detectLocal.interfaceNamePrefix",
        "pod-interface-name-prefix",
        Kind::Text,
        "",
        "First letters of the names of local pods' interfaces, for mode `InterfaceNamePrefix`",
    ),
    used(
        "nodePortAddresses",
        "nodeport-addresses",
        Kind::List,
        "",
        "Addresses of the node on which NodePorts answer: CIDRs, or `primary` for the node's own addresses. Empty means all; so do CIDRs of the other family alone. Interfaces are read again every `iptables.syncPeriod`",
    ),
    used(
        "iptables.masqueradeBit",
        "iptables-masquerade-bit",
        Kind::Int(0, 31),
        "14",
        "Bit of the packet mark that asks for masquerading",
    ),
    used(
        "iptables.masqueradeAll",
        "masquerade-all",
        Kind::Bool,
        "false",
        "Masquerade everything that is sent to ClusterIPs",
    ),
    used(
        "iptables.localhostNodePorts",
        "iptables-localhost-nodeports",
        Kind::Bool,
        "true",
        "NodePorts answer on 127.0.0.0/8 too (IPv4 only), which sets `route_localnet` and guards those addresses against neighbours",
    ),
    Field {
        alias: "sync-period",
        ..used(
            "iptables.syncPeriod",
            "iptables-sync-period",
            Kind::Duration,
            "30s",
            "Time between two looks at whether somebody else removed or changed the rules; a change that waits for twice as long makes the agent unhealthy",
        )
    },
    Field {
        alias: "min-sync-period",
        ..used(
            "iptables.minSyncPeriod",
            "iptables-min-sync-period",
            Kind::Duration,
            "0s",
            "Shortest time between two syncs; changes in between are gathered. kube-proxy's default is 1s, since it writes large parts of the tables each time; here 0s means at once",
        )
    },
    used(
        "ipvs.scheduler",
        "ipvs-scheduler",
        Kind::Text,
        "",
        "Mode ipvs: how virtual servers choose endpoints: rr (also when empty), wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, fo or ovf. The annotation `headgate.io/scheduler` chooses another one for a Service",
    ),
    used(
        "ipvs.excludeCIDRs",
        "ipvs-exclude-cidrs",
        Kind::List,
        "",
        "Mode ipvs: virtual servers of these addresses are others', and never removed",
    ),
    used(
        "ipvs.strictARP",
        "ipvs-strict-arp",
        Kind::Bool,
        "false",
        "Mode ipvs: sets `arp_ignore` to 1 and `arp_announce` to 2, so that interfaces do not answer for the services' addresses",
    ),
    used(
        "ipvs.tcpTimeout",
        "ipvs-tcp-timeout",
        Kind::Duration,
        "0s",
        "Mode ipvs: idle time after which an established TCP connection is forgotten; 0s leaves it as it is",
    ),
    used("ipvs.tcpFinTimeout", "ipvs-tcpfin-timeout", Kind::Duration, "0s", "Mode ipvs: the same after a FIN"),
    used("ipvs.udpTimeout", "ipvs-udp-timeout", Kind::Duration, "0s", "Mode ipvs: the same for UDP flows"),
    used("ipvs.syncPeriod", "ipvs-sync-period", Kind::Duration, "30s", "Mode ipvs: as `iptables.syncPeriod`"),
    used("ipvs.minSyncPeriod", "ipvs-min-sync-period", Kind::Duration, "0s", "Mode ipvs: as `iptables.minSyncPeriod`"),
    used(
        "conntrack.maxPerCore",
        "conntrack-max-per-core",
        NATURAL,
        "32768",
        "Connections to track for each CPU, at most 1,048,576 together; 0 leaves `nf_conntrack_max` as it is",
    ),
    used(
        "conntrack.min",
        "conntrack-min",
        NATURAL,
        "131072",
        "Connections to track at least, whatever the number of CPUs",
    ),
    used(
        "conntrack.tcpEstablishedTimeout",
        "conntrack-tcp-timeout-established",
        Kind::Duration,
        "24h0m0s",
        "Idle time after which an established TCP connection is forgotten; 0s leaves it as it is",
    ),
    used(
        "conntrack.tcpCloseWaitTimeout",
        "conntrack-tcp-timeout-close-wait",
        Kind::Duration,
        "1h0m0s",
        "The same for connections in CLOSE_WAIT",
    ),
    used(
        "conntrack.tcpBeLiberal",
        "conntrack-tcp-be-liberal",
        Kind::Bool,
        "false",
        "TCP packets outside of the window are not INVALID; then the rule that drops INVALID packets is left out",
    ),
    used(
        "conntrack.udpTimeout",
        "conntrack-udp-timeout",
        Kind::Duration,
        "0s",
        "Idle time after which a UDP flow with packets one way is forgotten; 0s leaves it as it is",
    ),
    used(
        "conntrack.udpStreamTimeout",
        "conntrack-udp-timeout-stream",
        Kind::Duration,
        "0s",
        "The same for UDP flows with packets both ways",
    ),
    used(
        "oomScoreAdj",
        "oom-score-adj",
        Kind::Int(-1000, 1000),
        "-999",
        "Written to `/proc/self/oom_score_adj`; a failure is a warning",
    ),
    used(
        "featureGates",
        "feature-gates",
        Kind::Gates,
        "",
        "`AllowServiceExternalIPs=false` leaves externalIPs out of the rules, `ComponentFlagz=false` and `ComponentStatusz=false` turn `/flagz` and `/statusz` off; other gates mean nothing here and are named in a warning",
    ),
    ignored("clientConnection.kubeconfig", "kubeconfig", Kind::Text, "", NO_API),
    ignored("clientConnection.acceptContentTypes", "", Kind::Text, "", NO_API),
    ignored(
        "clientConnection.contentType",
        "kube-api-content-type",
        Kind::Text,
        "application/vnd.kubernetes.protobuf",
        NO_API,
    ),
    ignored("clientConnection.qps", "kube-api-qps", Kind::Any, "5", NO_API),
    ignored("clientConnection.burst", "kube-api-burst", NUMBER, "10", NO_API),
    ignored("", "master", Kind::Text, "", NO_API),
    ignored(
        "configSyncPeriod",
        "config-sync-period",
        Kind::Duration,
        "15m0s",
        "the control plane's stream is checked against digests, and never listed anew",
    ),
    ignored("portRange", "proxy-port-range", Kind::Text, "", "kube-proxy does not use it either"),
    ignored(
        "enableProfiling",
        "profiling",
        Kind::Bool,
        "false",
        "pages of the Go runtime: `perf record --call-graph dwarf -p PID` profiles the agent, whose binary tells names and lines",
    ),
    ignored(
        "showHiddenMetricsForVersion",
        "show-hidden-metrics-for-version",
        Kind::Text,
        "",
        "there are no hidden metrics",
    ),
    ignored("logging", "", Kind::Any, "", LOGS),
    ignored("", "boot-id-file", Kind::Text, "/proc/sys/kernel/random/boot_id", LIBRARY),
    ignored("", "machine-id-file", Kind::Text, "/etc/machine-id,/var/lib/dbus/machine-id", LIBRARY),
    ignored("", "v", Kind::Any, "0", LOGS),
    ignored("", "vmodule", Kind::Any, "", LOGS),
    ignored("", "logging-format", Kind::Any, "text", LOGS),
    ignored("", "log-flush-frequency", Kind::Any, "5s", LOGS),
    ignored("", "log-text-split-stream", Kind::Any, "false", LOGS),
    ignored("", "log-text-info-buffer-size", Kind::Any, "0", LOGS),
    ignored("", "log-json-split-stream", Kind::Any, "false", LOGS),
    ignored("", "log-json-info-buffer-size", Kind::Any, "0", LOGS),
    ignored("nftables.masqueradeBit", "", Kind::Int(0, 31), "14", NFTABLES),
    ignored("nftables.masqueradeAll", "", Kind::Bool, "false", NFTABLES),
    ignored("nftables.syncPeriod", "", Kind::Duration, "30s", NFTABLES),
    ignored("nftables.minSyncPeriod", "", Kind::Duration, "1s", NFTABLES),
    ignored("winkernel.networkName", "network-name", Kind::Text, "", WINDOWS),
    ignored("winkernel.sourceVip", "source-vip", Kind::Text, "", WINDOWS),
    ignored("winkernel.enableDSR", "enable-dsr", Kind::Bool, "false", WINDOWS),
    ignored("winkernel.rootHnsEndpointName", "root-hnsendpoint-name", Kind::Text, "", WINDOWS),
    ignored("winkernel.forwardHealthCheckVip", "forward-healthcheck-vip", Kind::Bool, "false", WINDOWS),
    ignored("windowsRunAsService", "windows-service", Kind::Bool, "false", WINDOWS),
];

/// The setting with that id.
#[must_use]
pub fn by_id(id: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.id() == id)
}

/// True for a mapping that fields stand in, such as `iptables`.
#[must_use]
pub fn is_section(path: &str) -> bool {
    FIELDS.iter().any(|field| field.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_defaults_can_be_used() {
        let ids: BTreeSet<&str> = FIELDS.iter().map(Field::id).collect();
        assert_eq!(ids.len(), FIELDS.len());
        let named = FIELDS.iter().flat_map(|field| [field.flag, field.alias]).filter(|flag| !flag.is_empty());
        let flags: BTreeSet<&str> = named.clone().collect();
        assert_eq!(flags.len(), named.count());
        for field in FIELDS.iter().filter(|field| !field.default.is_empty()) {
            assert!(field.kind.parse(field.default).is_ok(), "{}", field.id());
        }
        assert!(is_section("iptables") && !is_section("ipt") && !is_section("mode"));
    }
}
