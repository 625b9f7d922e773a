//! A table of all settings of kube-proxy 1.36: the field in the configuration file, the flag, the
//! kind of values, and the effect in Headgate. Files and flags are parsed with this table, and
//! `docs/configuration.md` is generated from it.

use super::value::Kind;

/// The effect of a setting in Headgate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The setting has this effect.
    Used(&'static str),
    /// The setting has no effect, for this reason. If its value differs from the default, the agent
    /// logs a warning.
    Ignored(&'static str),
}

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The path in a `KubeProxyConfiguration`, separated by dots; empty if only a flag exists.
    pub path: &'static str,
    /// The name of the flag, without leading dashes; empty if there is no flag.
    pub flag: &'static str,
    /// Another name of the flag; empty if there is no other name.
    pub alias: &'static str,
    /// The kind of values.
    pub kind: Kind,
    /// The default in the syntax of the flag; empty if the setting is unset by default.
    pub default: &'static str,
    /// The effect in Headgate.
    pub meaning: Meaning,
}

impl Field {
    /// The key of the setting in [`super::Raw`]: the path, or the flag if the path is empty.
    pub fn id(&self) -> &'static str {
        if self.path.is_empty() { self.flag } else { self.path }
    }
}

const NO_API: &str = "the agent holds no API credentials: it receives its state from --control-plane";
const WINDOWS: &str = "for Windows only";
const NO_MARK: &str = "rules of mode nftables need no packet mark";
const LIBRARY: &str = "kube-proxy does not use this setting either: it belongs to a library";
const LOGS: &str = "--log (or HEADGATE_LOG) sets what is logged, and --log-format (or HEADGATE_LOG_FORMAT) how; logs go to standard error";

const MODES: Kind = Kind::Choice(&["", "auto", "iptables", "ipvs", "nftables", "userspace"]);
const DETECTIONS: Kind = Kind::Choice(&["", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"]);
const NATURAL: Kind = Kind::Int(0, i64::MAX);
const NUMBER: Kind = Kind::Int(i64::MIN, i64::MAX);

/// Declares [`FIELDS`]. Each row has the field, the flag with its other name, the kind of values
/// and the default. The text above a row is its effect, for `--help` and docs/configuration.md. The
/// text at the end of a row is the reason for no effect.
macro_rules! settings {
    (
        $($(#[doc = $effect:literal])+ $path:literal, $flag:literal $(| $alias:literal)?, $kind:expr, $default:literal;)+
        without effect:
        $($unused:literal, $its_flag:literal, $its_kind:expr, $its_default:literal, $why:expr;)+
    ) => {
        /// All settings of kube-proxy.
        pub const FIELDS: &[Field] = &[
            $(Field {
                path: $path,
                flag: $flag,
                alias: concat!($($alias)?),
                kind: $kind,
                default: $default,
                meaning: Meaning::Used(concat!($($effect),+).trim_ascii_start()),
            },)+
            $(Field {
                path: $unused,
                flag: $its_flag,
                alias: "",
                kind: $its_kind,
                default: $its_default,
                meaning: Meaning::Ignored($why),
            },)+
        ];
    };
}

settings! {
    /// How the kernel is programmed: `auto` (also when empty) chooses `nftables` where no Service
    /// behaves differently than with `iptables`, else `iptables`; `iptables` writes iptables rules,
    /// `ipvs` uses virtual servers of IPVS, `nftables` uses maps of nftables (see
    /// docs/nftables.md), and `userspace` uses these maps and carries TCP connections through the
    /// agent (see docs/userspace.md). kube-proxy's default is `iptables`. If a node does not
    /// support `ipvs`, `nftables` or `userspace`, the agent uses `iptables`, and reports this in
    /// the log, in `headgatectl agents` and in `/status` on the metrics port
    "mode", "proxy-mode", MODES, "auto";
    /// Name of the node, if `--node-name` (or `--hostname-override`) is not given
    "hostnameOverride", "", Kind::Text, "";
    /// The node's address, unless the value is `0.0.0.0` or `::`. It takes precedence over the
    /// Node's addresses of the same family. Its family also decides the defaults of
    /// `healthzBindAddress` and `metricsBindAddress`
    "bindAddress", "bind-address", Kind::Text, "0.0.0.0";
    /// The address that serves `/healthz` and `/livez`. `0.0.0.0` and `[::]` both mean all
    /// addresses of both families, as in kube-proxy. An empty flag turns the pages off
    "healthzBindAddress", "healthz-bind-address", Kind::Text, "0.0.0.0:10256";
    /// The address that serves `/metrics`, `/metrics/slis`, `/healthz`, `/proxyMode`, `/configz`,
    /// `/flagz`, `/statusz` and `/status`. `0.0.0.0` and `[::]` both mean all addresses of both
    /// families. An empty flag turns the pages off
    "metricsBindAddress", "metrics-bind-address", Kind::Text, "127.0.0.1:10249";
    /// Port of `--healthz-bind-address`, if that flag contains no port. 0 turns the pages off.
    /// kube-proxy calls this flag deprecated
    "", "healthz-port", Kind::Int(0, 65_535), "10256";
    /// Port of `--metrics-bind-address`, if that flag contains no port. 0 turns the pages off.
    /// kube-proxy calls this flag deprecated
    "", "metrics-port", Kind::Int(0, 65_535), "10249";
    /// The agent ends when `healthzBindAddress` or `metricsBindAddress` cannot be bound. Otherwise
    /// it logs an error and tries again
    "bindAddressHardFail", "bind-address-hard-fail", Kind::Bool, "false";
    /// Ranges of pod addresses, at most one per family, separated by commas. In mode `ClusterCIDR`,
    /// rules recognise local pods by these ranges. Without a range of a family, nothing that is
    /// sent to ClusterIPs of that family is masqueraded
    "clusterCIDR", "cluster-cidr", Kind::Text, "";
    /// How rules distinguish local pods from other clients. `NodeCIDR` uses the Node's `podCIDRs`;
    /// when they change, the agent writes the rules again (kube-proxy ends in this case)
    "detectLocalMode", "detect-local-mode", DETECTIONS, "ClusterCIDR";
    /// The bridge that local pods are connected to, for mode `BridgeInterface`
    "detectLocal.bridgeInterface", "pod-bridge-interface", Kind::Text, "";
    /// Prefix of the names of local pods' interfaces, for mode `InterfaceNamePrefix`
    "detectLocal.interfaceNamePrefix", "pod-interface-name-prefix", Kind::Text, "";
    /// Addresses of the node on which NodePorts answer: CIDRs, `primary` for the node's own
    /// addresses (kube-proxy takes it alone, and from 1.37 on in any mixture), and, as in
    /// kube-proxy from 1.37 on, `localhost` for 127.0.0.0/8 and ::1, and `all`. Empty means all
    /// addresses; if `mode` is `nftables`, empty means `primary`, as in kube-proxy. CIDRs of one
    /// family do not restrict the other family. In mode `ipvs`, NodePorts do not answer on
    /// 127.0.0.0/8. In no mode do they answer on ::1, where kube-proxy 1.37 has a proxy for TCP in
    /// mode nftables; the log says so if the list names ::1. When addresses of interfaces change,
    /// the agent updates the rules at once
    "nodePortAddresses", "nodeport-addresses", Kind::List, "";
    /// Bit of the packet mark that requests masquerading
    "iptables.masqueradeBit", "iptables-masquerade-bit", Kind::Int(0, 31), "14";
    /// Masquerade everything that is sent to ClusterIPs. As in kube-proxy, the flag applies to each
    /// mode, but a file with mode nftables uses only `nftables.masqueradeAll`
    "iptables.masqueradeAll", "masquerade-all", Kind::Bool, "false";
    /// NodePorts also answer on 127.0.0.0/8 (IPv4 only). The agent then sets `route_localnet`, and
    /// its rules drop packets that other hosts send to these addresses
    "iptables.localhostNodePorts", "iptables-localhost-nodeports", Kind::Bool, "true";
    /// How often the agent checks whether somebody else removed or changed rules. A change that
    /// waits for twice this time makes the agent unhealthy. In a file, the modes ipvs, nftables and
    /// userspace use other fields. As in kube-proxy, the flag applies to each mode except ipvs
    "iptables.syncPeriod", "iptables-sync-period" | "sync-period", Kind::Duration, "30s";
    /// Shortest time between two syncs; changes during this time are written together. kube-proxy's
    /// default is 1s, because it writes large parts of the tables each time. With 0s, the agent
    /// writes each change at once. The field and the flag apply to the same modes as
    /// `iptables.syncPeriod`
    "iptables.minSyncPeriod", "iptables-min-sync-period" | "min-sync-period", Kind::Duration, "0s";
    /// Mode ipvs: how virtual servers choose endpoints: rr (also when empty), wrr, lc, wlc, lblc,
    /// lblcr, sh, dh, sed, nq, mh, fo or ovf. The annotation `headgate.io/scheduler` sets another
    /// scheduler for one Service
    "ipvs.scheduler", "ipvs-scheduler", Kind::Text, "";
    /// Mode ipvs: virtual servers with addresses in these ranges belong to other software and are
    /// never removed
    "ipvs.excludeCIDRs", "ipvs-exclude-cidrs", Kind::List, "";
    /// Mode ipvs: sets `arp_ignore` to 1 and `arp_announce` to 2, so that other interfaces do not
    /// answer ARP for the services' addresses
    "ipvs.strictARP", "ipvs-strict-arp", Kind::Bool, "false";
    /// Mode ipvs: idle time after which an established TCP connection is forgotten; 0s keeps the
    /// kernel's value
    "ipvs.tcpTimeout", "ipvs-tcp-timeout", Kind::Duration, "0s";
    /// Mode ipvs: idle time after which a TCP connection is forgotten after a FIN; 0s keeps the
    /// kernel's value
    "ipvs.tcpFinTimeout", "ipvs-tcpfin-timeout", Kind::Duration, "0s";
    /// Mode ipvs: idle time after which a UDP flow is forgotten; 0s keeps the kernel's value
    "ipvs.udpTimeout", "ipvs-udp-timeout", Kind::Duration, "0s";
    /// Mode ipvs: like `iptables.syncPeriod`
    "ipvs.syncPeriod", "ipvs-sync-period", Kind::Duration, "30s";
    /// Mode ipvs: like `iptables.minSyncPeriod`
    "ipvs.minSyncPeriod", "ipvs-min-sync-period", Kind::Duration, "0s";
    /// Modes nftables and userspace: like `iptables.masqueradeAll`. Mode userspace uses both fields
    "nftables.masqueradeAll", "", Kind::Bool, "false";
    /// Modes nftables and userspace: like `iptables.syncPeriod`
    "nftables.syncPeriod", "", Kind::Duration, "30s";
    /// Modes nftables and userspace: like `iptables.minSyncPeriod`
    "nftables.minSyncPeriod", "", Kind::Duration, "0s";
    /// Connections to track per CPU, at most 1,048,576 in total; 0 keeps the present
    /// `nf_conntrack_max`. As in kube-proxy 1.37, a larger `nf_conntrack_max` also stays
    "conntrack.maxPerCore", "conntrack-max-per-core", NATURAL, "32768";
    /// Minimum number of connections to track, for any number of CPUs
    "conntrack.min", "conntrack-min", NATURAL, "131072";
    /// Idle time after which an established TCP connection is forgotten; 0s keeps the kernel's
    /// value
    "conntrack.tcpEstablishedTimeout", "conntrack-tcp-timeout-established", Kind::Duration, "24h0m0s";
    /// Idle time after which a TCP connection in CLOSE_WAIT is forgotten; 0s keeps the kernel's
    /// value
    "conntrack.tcpCloseWaitTimeout", "conntrack-tcp-timeout-close-wait", Kind::Duration, "1h0m0s";
    /// Conntrack does not mark TCP packets outside of the window INVALID, and the agent writes no
    /// rule that drops INVALID packets
    "conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal", Kind::Bool, "false";
    /// Idle time after which a UDP flow with packets in one direction is forgotten; 0s keeps the
    /// kernel's value
    "conntrack.udpTimeout", "conntrack-udp-timeout", Kind::Duration, "0s";
    /// Idle time after which a UDP flow with packets in both directions is forgotten; 0s keeps the
    /// kernel's value
    "conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream", Kind::Duration, "0s";
    /// The value that the agent writes to `/proc/self/oom_score_adj`. If the write fails, the agent
    /// logs a warning
    "oomScoreAdj", "oom-score-adj", Kind::Int(-1000, 1000), "-999";
    /// `AllowServiceExternalIPs=false`, the default of kube-proxy from 1.40 on, leaves externalIPs
    /// out of the rules, `ComponentFlagz=false` and `ComponentStatusz=false` turn `/flagz` and
    /// `/statusz` off. Other gates have no effect and are named in a warning
    "featureGates", "feature-gates", Kind::Gates, "";
    without effect:
    "clientConnection.kubeconfig", "kubeconfig", Kind::Text, "", NO_API;
    "clientConnection.acceptContentTypes", "", Kind::Text, "", NO_API;
    "clientConnection.contentType", "kube-api-content-type", Kind::Text, "application/vnd.kubernetes.protobuf",
        NO_API;
    "clientConnection.qps", "kube-api-qps", Kind::Any, "5", NO_API;
    "clientConnection.burst", "kube-api-burst", NUMBER, "10", NO_API;
    "", "master", Kind::Text, "", NO_API;
    "configSyncPeriod", "config-sync-period", Kind::Duration, "15m0s",
        "the agent lists no resources; it compares digests with the control plane";
    "portRange", "proxy-port-range", Kind::Text, "", "kube-proxy does not use this setting either";
    "enableProfiling", "profiling", Kind::Bool, "false",
        "the setting turns on pages of the Go runtime; to profile the agent, use `perf record --call-graph dwarf -p PID`";
    "showHiddenMetricsForVersion", "show-hidden-metrics-for-version", Kind::Text, "",
        "the agent has no hidden metrics";
    "logging", "", Kind::Any, "", LOGS;
    "", "boot-id-file", Kind::Text, "/proc/sys/kernel/random/boot_id", LIBRARY;
    "", "machine-id-file", Kind::Text, "/etc/machine-id,/var/lib/dbus/machine-id", LIBRARY;
    "", "v", Kind::Any, "0", LOGS;
    "", "vmodule", Kind::Any, "", LOGS;
    "", "logging-format", Kind::Any, "text", LOGS;
    "", "log-flush-frequency", Kind::Any, "5s", LOGS;
    "", "log-text-split-stream", Kind::Any, "false", LOGS;
    "", "log-text-info-buffer-size", Kind::Any, "0", LOGS;
    "", "log-json-split-stream", Kind::Any, "false", LOGS;
    "", "log-json-info-buffer-size", Kind::Any, "0", LOGS;
    "nftables.masqueradeBit", "", Kind::Int(0, 31), "14", NO_MARK;
    "winkernel.networkName", "network-name", Kind::Text, "", WINDOWS;
    "winkernel.sourceVip", "source-vip", Kind::Text, "", WINDOWS;
    "winkernel.enableDSR", "enable-dsr", Kind::Bool, "false", WINDOWS;
    "winkernel.rootHnsEndpointName", "root-hnsendpoint-name", Kind::Text, "", WINDOWS;
    "winkernel.forwardHealthCheckVip", "forward-healthcheck-vip", Kind::Bool, "false", WINDOWS;
    "windowsRunAsService", "windows-service", Kind::Bool, "false", WINDOWS;
}

/// The setting with this [`Field::id`].
pub fn by_id(id: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.id() == id)
}

/// True if `path` is a mapping that contains fields, such as `iptables`.
pub fn is_section(path: &str) -> bool {
    FIELDS.iter().any(|field| field.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_defaults_are_valid() {
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
