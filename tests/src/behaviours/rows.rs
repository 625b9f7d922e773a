//! The checklist: what users of a Kubernetes service proxy rely on.

use crate::testbed::Backend;

/// A backend's column of the checklist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// iptables, all variants and layouts.
    Iptables,
    /// IPVS.
    Ipvs,
}

impl Column {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Iptables, Self::Ipvs];

    /// As comments name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
        }
    }

    /// The backend of the packet cases that it stands for.
    #[must_use]
    pub fn backend(self) -> Backend {
        match self {
            Self::Iptables => Backend::IptablesLegacy,
            Self::Ipvs => Backend::Ipvs,
        }
    }
}

/// Rows that belong together.
#[derive(Debug)]
pub struct Section {
    /// Heading.
    pub title: &'static str,
    /// Rows, in order.
    pub rows: &'static [Row],
}

/// A behaviour.
#[derive(Debug)]
pub struct Row {
    /// Its number, by which tests name it. Numbers stay when rows come and go.
    pub number: u8,
    /// What is expected.
    pub behaviour: &'static str,
    /// Why the iptables backend needs no test of it, if it needs none.
    pub iptables_reason: Option<&'static str>,
}

impl Row {
    /// Why a backend needs no test of it, if it needs none.
    #[must_use]
    pub fn reason(&self, column: Column) -> Option<&'static str> {
        match column {
            Column::Iptables => self.iptables_reason,
            Column::Ipvs => IPVS_REASONS.iter().find(|(number, _)| *number == self.number).map(|(_, reason)| *reason),
        }
    }
}

/// Where IPVS cannot do what the checklist says, or has no need to.
const IPVS_REASONS: &[(u8, &str)] = &[
    (
        37,
        "but for UDP datagrams above the path's MTU that a node itself sends: IPVS translates them behind the kernel's choice of a path, and the sender is told that they are too long (over IPv4 the first one only)",
    ),
    (
        42,
        "as with kube-proxy: the packet leaves by the node's routes, since only addresses of Services are the node's own",
    ),
    (
        48,
        "IPVS cannot: a virtual server on 127.0.0.1 would send packets away with a source that nobody can reply to; connections are refused, as with kube-proxy",
    ),
    (
        50,
        "no NodePorts on 127.0.0.0/8, so the kernel keeps its own guard: nothing is opened that would have to be guarded",
    ),
    (
        74,
        "IPVS counts from when it forgets the client's last connection, two minutes after its end, and looks once a minute",
    ),
    (76, "IPVS cannot: it keeps records by virtual server, so each address of a port has its own"),
    (
        83,
        "a UDP destination that gets no new flows is removed at once, and its flows go to others, as with kube-proxy; those of TCP are kept, see rows 89 and 102",
    ),
    (
        85,
        "nothing to order: destinations are removed in the same batch in which others are added, and flows are looked for after it",
    ),
    (99, "no need: the number of rules is the same for any number of services, apart from services with Local policy"),
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
        title: "What is read",
        rows: &[
            row(1, "A Service without a cluster address, or with \"None\", is left alone"),
            row(2, "ExternalName is left alone; a Service that becomes another type is followed"),
            row(
                3,
                "The label service.kubernetes.io/service-proxy-name, whatever its value, hands a Service to another proxy, and back",
            ),
            row(4, "Slices with the label service.kubernetes.io/headless are left alone; the label may come and go"),
            row(5, "A slice's addresses are of its own family; names in place of addresses are left alone"),
            row(6, "Ports of Services and slices find each other by name and protocol, never by number"),
            row(7, "Slice ports without a name or a number are dropped; only an endpoint's first address counts"),
            row(8, "Conditions that are not given: ready, serving, not terminating"),
            row(
                9,
                "Endpoints and their ports are the union over all slices; conditions, node and hints belong to address and port",
            ),
            row(
                10,
                "Of two entries for one address and port, a terminating entry never replaces another; otherwise the slice that is later in name order counts",
            ),
            row(11, "One cluster address a family; other addresses count in their own family alone"),
            row(12, "Addresses with leading zeros are read as decimal"),
            row(13, "Ingress with ipMode Proxy, or a host name, is not programmed"),
            row(14, "Ports are added, removed and renamed live"),
            row(15, "A Service is deleted and made again, also under the same name"),
            row(16, "TCP, UDP and SCTP on one port number are independent"),
            row(17, "A Service with SCTP does not make the kernel load its SCTP module"),
            row(18, "externalIPs are left out where they are switched off"),
            row(19, "Changes that wait are gathered; what ends as it began drops out"),
        ],
    },
    Section {
        title: "Which endpoints",
        rows: &[
            row(20, "Ready endpoints alone, if there is one"),
            row(21, "If none is ready, those that serve and terminate"),
            row(22, "Policy Local falls back in the same way among the node's own endpoints"),
            row(23, "What is neither ready nor serving and terminating is never used"),
            row(24, "Endpoints published before they are ready are used, also while they terminate"),
            row(25, "Hints by zone count if every ready endpoint has one and one is for this zone"),
            row(26, "Without a zone, or a hint for it, all endpoints"),
            row(27, "Hints by node come first, then by zone, then none"),
            row(28, "Hints do not count for policy Local, nor among terminating endpoints"),
            row(29, "Another zone of the node changes everything that depends on it"),
            row(30, "Connections are spread evenly"),
        ],
    },
    Section {
        title: "Cluster addresses",
        rows: &[
            row(31, "A pod's source address is kept"),
            row(32, "What comes from outside the cluster is masqueraded, if pods can be told"),
            row(33, "What a node itself sends is masqueraded, if pods can be told"),
            row(34, "All of it can be masqueraded"),
            row(35, "Without a way to tell pods nothing is masqueraded"),
            row(36, "A pod reaches itself by its Service"),
            row(37, "From pods and from the host network, to both, with large payloads"),
            row(38, "internalTrafficPolicy Local uses the node's own endpoints alone"),
            row(39, "internalTrafficPolicy Local without an own endpoint drops"),
            row(40, "Without endpoints anywhere connections are refused at once"),
            without(
                41,
                "A port that the Service does not have",
                "no rule, as in kube-proxy's iptables mode: the packet leaves by the node's routes. ipvs and nftables refuse it",
            ),
            without(
                42,
                "An address of the service range that no Service has",
                "no rule, as in kube-proxy's iptables mode. nftables drops it",
            ),
            without(
                43,
                "Ping",
                "no rule, as in kube-proxy's iptables mode: iptables translates ports, and ICMP has none",
            ),
            row(44, "Addresses of a range that is added later"),
        ],
    },
    Section {
        title: "External destinations",
        rows: &[
            row(45, "NodePorts on every node address chosen for them, for pods of other nodes too"),
            row(46, "By default NodePorts are on all addresses"),
            row(47, "NodePort addresses can be restricted, for each family by itself"),
            row(48, "NodePorts on 127.0.0.0/8, masqueraded, which can be switched off"),
            row(49, "No NodePorts on ::1"),
            row(50, "What is bound to 127.0.0.1 stays out of the neighbours' reach"),
            row(51, "externalTrafficPolicy Cluster always masquerades"),
            row(52, "externalTrafficPolicy Local: own endpoints, source kept"),
            row(53, "externalTrafficPolicy Local without an own endpoint drops what comes from outside"),
            row(54, "A node's pods reach all endpoints in spite of externalTrafficPolicy Local, source kept"),
            row(55, "So does the node itself, masqueraded"),
            row(56, "internalTrafficPolicy Local leaves external destinations alone"),
            row(57, "Without endpoints NodePorts, externalIPs and load balancer addresses refuse"),
            row(58, "externalIPs that no machine has work within the cluster"),
            without(
                59,
                "External addresses that an interface of the node has already",
                "iptables binds no addresses to the node; the row is ipvs's",
            ),
            row(60, "loadBalancerSourceRanges admit who is in them and drop the rest"),
            row(61, "Pods are subject to the ranges"),
            row(62, "A node is admitted if its address is in a range, and then by the balancer's address as well"),
            row(63, "NodePorts and externalIPs are not subject to the ranges"),
            row(64, "A range of length zero opens; white space does not matter"),
            row(65, "Ranges, no endpoints, and a client that is not admitted"),
            row(66, "Load balancer addresses without NodePorts; type and ports may change"),
        ],
    },
    Section {
        title: "Health-check node ports",
        rows: &[
            row(67, "200 if the node has a ready endpoint and the agent is healthy, else 503"),
            row(68, "503 with terminating endpoints alone, while traffic is still served"),
            row(69, "The weight header counts different endpoint addresses"),
            row(70, "They open and close with the policy; a port can be used again"),
            row(71, "They listen on the NodePort addresses alone"),
            row(72, "The host's firewall lets them in"),
        ],
    },
    Section {
        title: "Session affinity",
        rows: &[
            row(73, "A client stays with one endpoint"),
            row(74, "Until the time-out has passed without a connection"),
            row(75, "It is switched on and off live"),
            row(76, "One record for all addresses of a port"),
            row(77, "The clients of an endpoint that goes get another"),
            row(78, "UDP as well"),
        ],
    },
    Section {
        title: "Connections and the kernel",
        rows: &[
            row(79, "UDP clients follow when an endpoint is replaced: NodePort, cluster and load balancer addresses"),
            row(80, "So they do with internalTrafficPolicy Local"),
            row(81, "A UDP client that sent before an endpoint was ready recovers"),
            row(82, "UDP clients follow a change of the target port"),
            row(83, "Flows to any endpoint that serves are kept, also to remote and terminating ones"),
            row(84, "TCP and SCTP flows, and other software's UDP flows, are kept"),
            row(85, "Flows are deleted after the rules are in place"),
            row(86, "A million entries do not stall the agent"),
            row(87, "A packet outside of the window does not end a TCP connection"),
            row(88, "Conntrack's limits and time-outs are set"),
            row(89, "Connections outlive their endpoint's removal, and restarts of programs"),
            row(90, "The mark's bit can be chosen; it is cleared after use"),
        ],
    },
    Section {
        title: "Sync and life",
        rows: &[
            row(91, "Nothing is written before everything is known"),
            row(92, "A restart keeps traffic flowing, and puts right what changed meanwhile"),
            row(93, "A change writes the rules of the services that changed"),
            row(94, "After a failure everything is written anew"),
            row(95, "Bursts are gathered; a full look follows from time to time"),
            row(96, "Rules that somebody else flushes come back"),
            row(97, "Rules of others are never touched"),
            row(98, "Chains that are not needed any more are removed"),
            row(99, "Large clusters have a layout of their own"),
            row(100, "Names, hashes and texts of rules are stable"),
            without(
                101,
                "Virtual servers that are excluded survive",
                "the row is ipvs's; other software's chains are row 97",
            ),
            without(
                102,
                "Real servers are removed gracefully",
                "the row is ipvs's: rules have no connections to drain, see row 89",
            ),
            row(103, "Cleanup removes what is ours; a switch of modes leaves nothing of the other behind"),
            row(104, "A change is visible everywhere within seconds"),
        ],
    },
    Section {
        title: "The process",
        rows: &[
            row(105, "/healthz and /livez: JSON and status codes"),
            row(106, "Unhealthy only if a change has waited for too long, in each family by itself"),
            row(107, "A node that goes away fails /healthz alone"),
            row(108, "/proxyMode tells the mode"),
            row(109, "Names and labels of metrics"),
            row(110, "The configuration file: defaults, lenience, validation"),
            row(
                111,
                "An edit of the file ends the process; another pod range is taken up without that (kube-proxy ends)",
            ),
            row(112, "Which address is the node's, and which family comes first"),
            row(113, "How local pods are told, by mode and family"),
        ],
    },
];
