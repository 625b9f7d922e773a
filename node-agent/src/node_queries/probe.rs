//! Whether the ClusterIPs that every cluster needs answer this node (`ProbeQuery`). The addresses
//! come from the agent's state, so that no client chooses what an agent dials.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use futures::future::join_all;
use headgate_core::{Protocol, ServiceKey, State};
use headgate_proto::v1::{self, node_answer};
use tokio::{
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use crate::{metrics::Metrics, session::outbox::NodeAnswer};

/// How long a probe waits for an answer.
const LIMIT: Duration = Duration::from_secs(1);
const MAX_PROBES: usize = 16;
const DNS_PORT: u16 = 53;
/// The Service of the API, whose ports are all probed, and the names of the cluster DNS.
const API: (&str, &str) = ("default", "kubernetes");
const DNS: [(&str, &str); 4] = [
    ("kube-system", "coredns"),
    ("kube-system", "kube-dns"),
    ("kube-system", "rke2-coredns-rke2-coredns"),
    ("openshift-dns", "dns-default"),
];
/// A question for the address of `kubernetes.default.svc.cluster.local`. Each answer counts, also
/// one that denies the name: it says that the rules lead to a name server.
const QUESTION: &[u8] =
    b"\x48\x67\x01\0\0\x01\0\0\0\0\0\0\x0akubernetes\x07default\x03svc\x07cluster\x05local\0\0\x01\0\x01";

/// What to probe, in order of Service.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProbeTarget {
    service: String,
    at: SocketAddr,
    protocol: Protocol,
}

/// The ClusterIPs of the API and of the cluster DNS that the agent holds.
pub(super) fn targets(state: &State) -> Vec<ProbeTarget> {
    let mut targets = Vec::new();
    for (namespace, name) in [API].into_iter().chain(DNS) {
        let key = ServiceKey::new(namespace, name);
        let Some(service) = state.entry(&key).and_then(|entry| entry.service()) else { continue };
        let is_probed = |protocol, port| match protocol {
            Protocol::Tcp => (namespace, name) == API || port == DNS_PORT,
            Protocol::Udp => port == DNS_PORT,
            Protocol::Sctp => false,
        };
        for address in &service.cluster_ips {
            let ports = service.ports.iter().filter(|port| is_probed(port.protocol, port.port));
            targets.extend(ports.map(|port| ProbeTarget {
                service: key.to_string(),
                at: (*address, port.port).into(),
                protocol: port.protocol,
            }));
        }
    }
    targets.truncate(MAX_PROBES);
    targets
}

pub(super) async fn answer(targets: Vec<ProbeTarget>, metrics: Arc<Metrics>) -> NodeAnswer {
    let probes: Vec<v1::Probe> = join_all(targets.into_iter().map(probe)).await;
    for probe in &probes {
        let result = if probe.error.is_empty() { "answered" } else { "failed" };
        metrics.probes.get_or_create(&[("result", result)]).inc();
    }
    Ok(vec![node_answer::Kind::Probes(v1::Probes { probes })])
}

async fn probe(ProbeTarget { service, at, protocol }: ProbeTarget) -> v1::Probe {
    let answered = async {
        match protocol {
            Protocol::Udp => asks(at).await,
            _ => TcpStream::connect(at).await.map(drop),
        }
    };
    let error = match timeout(LIMIT, answered).await {
        Ok(Ok(())) => String::new(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", LIMIT.as_secs()),
    };
    v1::Probe { service, destination: format!("{at}/{protocol}"), error }
}

async fn asks(at: SocketAddr) -> io::Result<()> {
    let any: SocketAddr = if at.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(at).await?;
    socket.send(QUESTION).await?;
    let mut answer = [0; 512];
    // Only an answer has the bit of answers, and the number of the question.
    while socket.recv(&mut answer).await? < 12 || answer[..2] != QUESTION[..2] || answer[2] & 0x80 == 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use headgate_core::{Change, Dirty, Service, ServicePort};
    use tokio::net::TcpListener;

    use super::*;
    use crate::tests::ReservedPort;

    fn service(namespace: &str, name: &str, ports: &[(Protocol, u16)]) -> Change {
        let port =
            |&(protocol, port)| ServicePort { name: format!("{port}").as_str().into(), protocol, port, node_port: 0 };
        let address = Ipv4Addr::LOCALHOST.into();
        Change::from(Service::new(ServiceKey::new(namespace, name), vec![address], ports.iter().map(port).collect()))
    }

    #[test]
    fn only_the_api_and_the_cluster_dns_are_probed() {
        let mut state = State::default();
        for change in [
            service("default", "kubernetes", &[(Protocol::Tcp, 443)]),
            service("kube-system", "kube-dns", &[(Protocol::Tcp, 53), (Protocol::Tcp, 9153), (Protocol::Udp, 53)]),
            service("kube-system", "metrics", &[(Protocol::Tcp, 53)]),
            service("team", "kube-dns", &[(Protocol::Udp, 53)]),
        ] {
            state.apply(change, &mut Dirty::default());
        }
        let shown = |target: &ProbeTarget| format!("{} {}/{}", target.service, target.at, target.protocol);
        assert_eq!(
            targets(&state).iter().map(shown).collect::<Vec<_>>(),
            [
                "default/kubernetes 127.0.0.1:443/TCP",
                "kube-system/kube-dns 127.0.0.1:53/TCP",
                "kube-system/kube-dns 127.0.0.1:53/UDP",
            ]
        );
    }

    #[tokio::test]
    async fn what_answers_and_what_does_not_is_told_and_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = ReservedPort::reserve().unwrap();
        let [server, silent] =
            [UdpSocket::bind("127.0.0.1:0").await.unwrap(), UdpSocket::bind("127.0.0.1:0").await.unwrap()];
        let addresses = [
            (listener.local_addr().unwrap(), Protocol::Tcp),
            (closed.address(), Protocol::Tcp),
            (server.local_addr().unwrap(), Protocol::Udp),
            (silent.local_addr().unwrap(), Protocol::Udp),
        ];
        tokio::spawn(async move {
            loop {
                let mut question = [0; 512];
                let (length, client) = server.recv_from(&mut question).await.unwrap();
                // The question itself is no answer.
                server.send_to(&question[..length], client).await.unwrap();
                question[2] |= 0x80;
                server.send_to(&question[..length], client).await.unwrap();
            }
        });
        let target = |(at, protocol)| ProbeTarget { service: "kube-system/kube-dns".to_owned(), at, protocol };
        // On a slow machine, an answer may come too late: then the test asks again.
        for attempt in 1.. {
            let metrics = Arc::new(Metrics::default());
            let parts = answer(addresses.map(target).into(), Arc::clone(&metrics)).await.unwrap();
            let [node_answer::Kind::Probes(v1::Probes { probes })] = &parts[..] else { panic!("{parts:?}") };
            let failed: Vec<bool> = probes.iter().map(|probe| !probe.error.is_empty()).collect();
            if failed == [false, true, false, true] {
                let counted = |result| metrics.probes.get_or_create(&[("result", result)]).get();
                assert_eq!((counted("answered"), counted("failed")), (2, 2));
                return;
            }
            assert!(attempt < 20, "{probes:?}");
        }
    }
}
