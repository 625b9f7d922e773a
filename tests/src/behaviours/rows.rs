//! The checklist: behaviours that users of a Kubernetes service proxy rely on.

use crate::testbed::Backend;

/// A backend of the checklist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// iptables, all variants and layouts.
    Iptables,
    /// IPVS.
    Ipvs,
    /// nftables.
    Nftables,
    /// A proxy in the agent, behind rules of nftables.
    Userspace,
}

impl Column {
    /// All backends of the checklist.
    pub const ALL: [Self; 4] = [Self::Iptables, Self::Ipvs, Self::Nftables, Self::Userspace];

    /// The backend's name in comments and on the page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Nftables => "nftables",
            Self::Userspace => "userspace",
        }
    }

    /// The backend of the testbed that represents this backend of the checklist. If a packet case
    /// excludes the testbed's backend, the case does not test its rows for the checklist's backend.
    #[must_use]
    pub fn backend(self) -> Backend {
        match self {
            Self::Iptables => Backend::IptablesLegacy,
            Self::Ipvs => Backend::Ipvs,
            Self::Nftables => Backend::Nftables,
            Self::Userspace => Backend::Userspace,
        }
    }
}

/// A section of the checklist.
#[derive(Debug)]
pub struct Section {
    /// The heading.
    pub title: &'static str,
    /// The rows, in order.
    pub rows: &'static [Row],
}

/// A behaviour.
#[derive(Debug)]
pub struct Row {
    /// The number by which tests refer to the row. It does not change when rows are added or
    /// removed.
    pub number: u8,
    /// The expected behaviour.
    pub behaviour: &'static str,
    /// The reason why the iptables backend needs no test of this row, or a description of how the
    /// backend differs from the row, if any.
    pub iptables_reason: Option<&'static str>,
}

impl Row {
    /// The reason why a backend needs no test of this row, or a description of how the backend
    /// differs from the row, if any.
    #[must_use]
    pub fn reason(&self, column: Column) -> Option<&'static str> {
        let reasons = match column {
            Column::Iptables => return self.iptables_reason,
            Column::Ipvs => IPVS_REASONS,
            Column::Nftables => NFTABLES_REASONS,
            Column::Userspace => USERSPACE_REASONS,
        };
        reasons.iter().find(|(number, _)| *number == self.number).map(|(_, reason)| *reason)
    }
}

/// Rows that IPVS cannot or need not fulfil, with the reason.
const IPVS_REASONS: &[(u8, &str)] = &[
    (
        37,
        "except UDP datagrams above the path's MTU that a node itself sends: IPVS translates them after the kernel has chosen the route, and sending fails (over IPv4 only for the first datagram)",
    ),
    (
        42,
        "as with kube-proxy: the packet follows the node's routes, because the node holds only addresses of existing Services",
    ),
    (
        48,
        "IPVS cannot do this: a virtual server on 127.0.0.1 would send packets with a source to which no endpoint can reply; connections are refused, as with kube-proxy",
    ),
    (50, "there are no NodePorts on 127.0.0.0/8, so the kernel itself drops such packets"),
    (
        74,
        "IPVS starts the time-out when it forgets the client's last connection, two minutes after the connection has ended, and checks once a minute",
    ),
    (
        76,
        "IPVS cannot do this: each virtual server has its own records, so the addresses of a port do not share records",
    ),
    (
        83,
        "a UDP destination that gets no new flows is removed at once, and its flows move to other endpoints, as with kube-proxy; TCP flows are kept, see rows 89 and 102",
    ),
    (
        85,
        "no order is needed: destinations are removed and added in one batch, and the agent deletes stale flows afterwards",
    ),
    (
        99,
        "not needed: the number of rules does not depend on the number of Services, except Services with policy Local",
    ),
];

/// Rows that nftables cannot or need not fulfil, with the reason.
const NFTABLES_REASONS: &[(u8, &str)] = &[
    (43, "there is no rule, as in kube-proxy's nftables mode: the packet follows the node's routes"),
    (65, RANGES_COME_FIRST),
    (
        72,
        "nftables cannot do this: a table cannot accept what another table drops, so the host's firewall must admit the ports",
    ),
    (99, "not needed: the number of rules does not depend on the number of Services"),
    (101, "this row is for ipvs; row 97 covers tables of other programs"),
    (102, "this row is for ipvs: rules have no connections to drain, see row 89"),
];

/// How rules of nftables differ for clients outside of the source ranges.
const RANGES_COME_FIRST: &str =
    "they get no answer, because ranges are checked first, as in kube-proxy's mode nftables";

/// The reason for rows of which the rules decide, and not the proxy.
const RULES_OF_NFTABLES: &str = "the rules are those of nftables, and its tests show the row";

/// Rows that mode userspace cannot or need not fulfil, with the reason.
const USERSPACE_REASONS: &[(u8, &str)] = &[
    (
        31,
        "for UDP to node ports, which goes straight to endpoints; SCTP is refused; a proxy cannot keep the client's address, so other endpoints see the address of the node that gets the packets",
    ),
    (41, RULES_OF_NFTABLES),
    (42, RULES_OF_NFTABLES),
    (43, "there is no rule, as in mode nftables: the packet follows the node's routes"),
    (50, RULES_OF_NFTABLES),
    (54, "the proxy cannot keep the client's address, see row 31"),
    (59, RULES_OF_NFTABLES),
    (65, RANGES_COME_FIRST),
    (
        72,
        "nftables cannot do this: a table cannot accept what another table drops, so the host's firewall must admit the ports",
    ),
    (
        76,
        "except that addresses with policy Cluster and addresses with policy Local do not share records, because the proxy has two pools of endpoints",
    ),
    (93, RULES_OF_NFTABLES),
    (96, RULES_OF_NFTABLES),
    (97, RULES_OF_NFTABLES),
    (99, "not needed: the number of rules does not depend on the number of Services"),
    (100, RULES_OF_NFTABLES),
    (101, "this row is for ipvs; row 97 covers tables of other programs"),
    (102, "this row is for ipvs: connections to removed endpoints continue, see row 89"),
    (103, RULES_OF_NFTABLES),
];

const fn row(number: u8, behaviour: &'static str) -> Row {
    Row { number, behaviour, iptables_reason: None }
}

const fn without(number: u8, behaviour: &'static str, reason: &'static str) -> Row {
    Row { number, behaviour, iptables_reason: Some(reason) }
}

/// All rows.
pub const SECTIONS: &[Section] = &[
    Section {
        title: "Reading objects",
        rows: &[
            row(1, "A Service without a cluster address, or with \"None\", is ignored"),
            row(2, "A Service of type ExternalName is ignored; changes of the type are followed"),
            row(
                3,
                "A Service with the label service.kubernetes.io/service-proxy-name, whatever its value, is ignored; the label may be added and removed",
            ),
            row(
                4,
                "Slices with the label service.kubernetes.io/headless are ignored; the label may be added and removed",
            ),
            row(5, "All addresses of a slice belong to its address family; slices with host names are ignored"),
            row(6, "Ports of Services and slices match by name and protocol, never by number"),
            row(
                7,
                "Slice ports without a number are ignored, and a port without a name has the name ''; only an endpoint's first address is used",
            ),
            row(8, "Missing conditions have the defaults ready, serving and not terminating"),
            row(
                9,
                "Endpoints and their ports are the union of all slices; conditions, node and hints apply to one address and port",
            ),
            row(
                10,
                "If several entries list one address and port, a ready one counts, then one that does not terminate; among equal ones the slice whose name comes last",
            ),
            row(
                11,
                "A Service has one cluster address for each family; other addresses are used only in their own family",
            ),
            row(12, "Addresses with leading zeros are read as decimal"),
            row(13, "Ingress addresses with ipMode Proxy, and ingress host names, are not programmed"),
            row(14, "Ports can be added, removed and renamed"),
            row(15, "A Service can be deleted and created again, also with an equal name"),
            row(16, "TCP, UDP and SCTP on one port number are independent"),
            row(17, "A Service with SCTP does not make the kernel load its SCTP module"),
            row(18, "externalIPs are ignored if they are turned off"),
            row(19, "Pending changes are combined; changes that cancel each other out are dropped"),
        ],
    },
    Section {
        title: "Choosing endpoints",
        rows: &[
            row(20, "Only ready endpoints are used, if there are any"),
            row(21, "If no endpoint is ready, endpoints that are serving and terminating are used"),
            row(
                22,
                "With policy Local, the node's own serving and terminating endpoints are used if none of its own is ready",
            ),
            row(23, "Endpoints that are neither ready nor both serving and terminating are never used"),
            row(24, "Endpoints that are published before they are ready are used, also while they terminate"),
            row(
                25,
                "Hints by zone are followed if every ready endpoint has a hint and at least one hint names the node's zone",
            ),
            row(26, "If the node has no zone, or no hint names its zone, all endpoints are used"),
            row(27, "Hints by node take precedence over hints by zone"),
            row(28, "Hints are ignored for policy Local and among terminating endpoints"),
            row(29, "A change of the node's zone changes all endpoint choices that depend on the zone"),
            row(30, "Endpoints get equal shares of the connections"),
            row(115, "An endpoint of weight 0 gets no new connections, and keeps its connections"),
        ],
    },
    Section {
        title: "Cluster addresses",
        rows: &[
            row(31, "A pod's source address is kept"),
            row(32, "Traffic from outside the cluster is masqueraded, if pods can be detected"),
            row(33, "A node's own traffic is masqueraded, if pods can be detected"),
            row(34, "All traffic to cluster addresses can be masqueraded"),
            row(35, "If pods cannot be detected, no traffic is masqueraded"),
            row(36, "A pod reaches itself through its Service"),
            row(37, "Pods and the host network reach pods and the host network, also with large payloads"),
            row(38, "internalTrafficPolicy Local uses only the node's own endpoints"),
            row(39, "internalTrafficPolicy Local drops packets if the node has no endpoint"),
            row(40, "If a Service has no endpoints, connections are refused at once"),
            without(
                41,
                "Connections to a port that the Service does not have",
                "there is no rule, as in kube-proxy's iptables mode: the packet follows the node's routes; ipvs and nftables refuse it",
            ),
            without(
                42,
                "Packets to an address of the service range that no Service has",
                "there is no rule, as in kube-proxy's iptables mode; nftables drops the packet",
            ),
            without(
                43,
                "Pings to a cluster address",
                "there is no rule, as in kube-proxy's iptables mode: iptables translates ports, and ICMP has none",
            ),
            row(44, "Addresses of a ServiceCIDR that is added later work"),
            row(
                114,
                "A ClusterIP belongs to its Service with all ports: externalIPs and load balancer addresses of other Services that equal it have no effect, also if they came first",
            ),
        ],
    },
    Section {
        title: "External destinations",
        rows: &[
            row(45, "NodePorts are served on every selected node address, also for pods of other nodes"),
            row(46, "By default NodePorts are served on all addresses"),
            row(47, "NodePort addresses can be restricted, separately for each family"),
            row(48, "NodePorts are served on 127.0.0.0/8, masqueraded; this can be turned off"),
            row(49, "NodePorts are not served on ::1"),
            row(50, "Neighbours cannot reach sockets that are bound to 127.0.0.1"),
            row(51, "externalTrafficPolicy Cluster always masquerades"),
            row(52, "externalTrafficPolicy Local uses the node's own endpoints and keeps the source"),
            row(53, "externalTrafficPolicy Local drops traffic from outside if the node has no endpoint"),
            row(
                54,
                "A node's pods reach all endpoints in spite of externalTrafficPolicy Local, and their source is kept",
            ),
            row(
                55,
                "The node itself reaches all endpoints in spite of externalTrafficPolicy Local, and its traffic is masqueraded",
            ),
            row(56, "internalTrafficPolicy Local does not affect external destinations"),
            row(
                57,
                "If a Service has no endpoints, its NodePorts, externalIPs and load balancer addresses refuse connections",
            ),
            row(58, "externalIPs that no machine holds work within the cluster"),
            without(
                59,
                "External addresses that an interface of the node already holds",
                "iptables binds no addresses to the node; this row is for ipvs",
            ),
            row(60, "loadBalancerSourceRanges admit clients in the ranges and drop other clients"),
            row(61, "The ranges also apply to pods"),
            row(
                62,
                "A node whose address is in a range is admitted, also if its requests have the load balancer's address as their source",
            ),
            row(63, "The ranges do not apply to NodePorts and externalIPs"),
            row(64, "A range with prefix length 0 admits all clients; white space is ignored"),
            row(65, "If a Service has no endpoints, clients outside the ranges are refused, too"),
            row(66, "Load balancer addresses work without NodePorts; type and ports may change"),
        ],
    },
    Section {
        title: "Health-check node ports",
        rows: &[
            row(67, "The port answers 200 if the node has a ready endpoint and the agent is healthy, else 503"),
            row(
                68,
                "The port answers 503 if the node has only terminating endpoints, although traffic is still served",
            ),
            row(69, "The weight header has the number of different endpoint addresses"),
            row(70, "Ports open and close with the policy; a port can be used again"),
            row(71, "Ports listen only on the NodePort addresses"),
            row(72, "The host's firewall admits health checks"),
        ],
    },
    Section {
        title: "Session affinity",
        rows: &[
            row(73, "A client stays with one endpoint"),
            row(74, "Affinity ends after the time-out without a connection"),
            row(75, "Affinity can be turned on and off"),
            row(76, "All addresses of a port share one affinity record"),
            row(77, "Clients of a removed endpoint get another endpoint"),
            row(78, "Affinity also works for UDP"),
        ],
    },
    Section {
        title: "Connections and the kernel",
        rows: &[
            row(
                79,
                "UDP clients move when their endpoint is replaced, at NodePorts, cluster addresses and load balancer addresses",
            ),
            row(80, "UDP clients also move with internalTrafficPolicy Local"),
            row(81, "A UDP client that sent before an endpoint was ready recovers"),
            row(82, "UDP clients follow a change of the target port"),
            row(83, "Flows to endpoints that serve are kept, also to remote and terminating endpoints"),
            row(84, "TCP and SCTP flows, and other software's UDP flows, are kept"),
            row(85, "Flows are deleted after the rules are in place"),
            row(86, "A million entries do not stall the agent"),
            row(87, "A packet outside the TCP window does not end the connection"),
            row(88, "Conntrack's limits and time-outs are set"),
            row(89, "Connections survive their endpoint's removal and restarts of programs"),
            row(90, "The bit of the packet mark can be chosen; the bit is cleared after use"),
        ],
    },
    Section {
        title: "Synchronisation",
        rows: &[
            row(91, "Nothing is written before the complete state is known"),
            row(92, "A restart does not interrupt traffic, and then programs the changes that were missed"),
            row(93, "A change writes only the rules of the changed Services"),
            row(94, "After a failure all rules are written again"),
            row(95, "Bursts are combined; a full check follows from time to time"),
            row(96, "Rules that another program flushes are restored"),
            row(97, "Rules of other programs are never changed"),
            row(98, "Chains that are no longer needed are removed"),
            row(99, "Large clusters use a separate layout of rules"),
            row(100, "Names, hashes and texts of rules are stable"),
            without(
                101,
                "Excluded virtual servers are kept",
                "this row is for ipvs; row 97 covers chains of other programs",
            ),
            without(
                102,
                "Real servers are removed gracefully",
                "this row is for ipvs: rules have no connections to drain, see row 89",
            ),
            row(
                103,
                "Cleanup removes all objects of Headgate; a switch of modes removes all objects of the other mode",
            ),
            row(104, "A change is visible everywhere within seconds"),
        ],
    },
    Section {
        title: "The process",
        rows: &[
            row(105, "/healthz and /livez return JSON and a status code"),
            row(106, "The agent is unhealthy only if a change has waited for too long, separately for each family"),
            row(107, "If the node is deleted, or is about to be deleted, only /healthz fails"),
            row(108, "/proxyMode returns the mode"),
            row(109, "Metrics have kube-proxy's names and labels"),
            row(110, "The configuration file has defaults, is read leniently, and is validated"),
            row(
                111,
                "An edit of the file ends the process; a changed pod range is applied without a restart (kube-proxy ends)",
            ),
            row(112, "The agent chooses the node's address and the first IP family"),
            row(113, "Local pods are detected by the chosen mode, separately for each family"),
        ],
    },
];
