//! Peers without a certificate begin handshakes and then stall. Meanwhile, an agent must be able to
//! connect.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use headgate_tests::fleet::rig::allow_open_files;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    client::{Client, GUARD, eventually},
    identity::{authority::Authority, client::Client as TlsClient},
    replica::{Replica, service},
};

use super::get;

fn host(number: u8) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, number).into()
}

async fn connect_from(host: IpAddr, address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((host, 0).into())?;
    socket.connect(address).await
}

/// Holds `of_each` connections from each of `hosts`. When a connection closes, the crowd opens
/// another connection. Each connection sends `first` and then nothing.
struct Crowd(JoinSet<()>);

impl Crowd {
    fn gather(address: SocketAddr, hosts: impl IntoIterator<Item = u8>, of_each: usize, first: &'static [u8]) -> Self {
        let mut crowd = JoinSet::new();
        for number in hosts {
            for _ in 0..of_each {
                crowd.spawn(async move {
                    loop {
                        if let Ok(mut stream) = connect_from(host(number), address).await
                            && stream.write_all(first).await.is_ok()
                        {
                            // Wait until the replica closes the connection.
                            let _ = stream.read(&mut [0]).await;
                        }
                        sleep(Duration::from_millis(5)).await;
                    }
                });
            }
        }
        Self(crowd)
    }

    /// Waits until `count` handshakes are active and other connections wait.
    async fn until_active(&self, replica: &Replica, count: u64) {
        let pending = |state: &str| replica.metric(&format!("headgate_tls_handshakes_pending{{state=\"{state}\"}}"));
        let is_so = async || pending("active") == count && pending("waiting") > 0;
        eventually("the crowd fills the slots for handshakes", is_so).await;
    }

    /// Waits until the replica has closed more than `before` silent handshakes of this crowd.
    async fn until_more_are_closed(&self, replica: &Replica, before: u64) {
        eventually("the replica closes silent handshakes", async || silent(replica) > before).await;
    }

    async fn leave(mut self) {
        self.0.shutdown().await;
    }
}

fn silent(replica: &Replica) -> u64 {
    replica.metric("headgate_tls_handshakes_failed_total{reason=\"silent\"}")
}

async fn agent_gets_everything(replica: &Replica, authority: &Authority, from: IpAddr, node: &str) {
    let tls = TlsClient::new(authority, &authority.kubelet(node));
    let opened = async {
        loop {
            if let Ok(connected) = tls.connect_from(from, replica.running.local_addr).await
                && let Ok(client) = Client::open(connected.channel, node, None).await
            {
                return client;
            }
            // On a slow machine, the replica may take the agent for one of the silent peers. Agents
            // try again.
            sleep(Duration::from_millis(50)).await;
        }
    };
    let mut client = timeout(GUARD, opened).await.expect("the agent got no slot for its handshake");
    client.reach(1).await;
}

#[tokio::test]
async fn silent_peers_do_not_keep_an_agent_from_connecting() {
    // An eighth of the files is for connections that wait.
    allow_open_files(20_000).unwrap();
    let authority = Authority::new("authority");
    let replica = Replica::start_with_tls(&authority).await;
    replica.put([service(1, 80)]);
    let address = replica.running.local_addr;

    // Peers that send nothing fill no slots.
    let crowd = Crowd::gather(address, [1, 2], 500, b"");
    crowd.until_active(&replica, 0).await;
    agent_gets_everything(&replica, &authority, host(1), "n1").await;
    crowd.leave().await;

    // One host opens enough connections to fill its slots again and again. Only 64 of its
    // handshakes may be active at the same time.
    let header = b"\x16\x03\x01\x02\x00";
    let crowd = Crowd::gather(address, [2], 1_500, header);
    crowd.until_active(&replica, 64).await;
    agent_gets_everything(&replica, &authority, host(1), "n1").await;
    crowd.leave().await;

    // Many hosts fill all slots. The replica closes silent connections.
    let before = silent(&replica);
    let crowd = Crowd::gather(address, 10..40, 40, header);
    crowd.until_active(&replica, 256).await;
    agent_gets_everything(&replica, &authority, host(1), "n1").await;
    crowd.until_more_are_closed(&replica, before).await;
    crowd.leave().await;

    // Peers on the agent's own host send only the header of a TLS record.
    let before = silent(&replica);
    let crowd = Crowd::gather(address, [1], 100, header);
    crowd.until_active(&replica, 64).await;
    agent_gets_everything(&replica, &authority, host(1), "n1").await;
    crowd.until_more_are_closed(&replica, before).await;
    crowd.leave().await;
}

#[tokio::test]
async fn connections_for_pages_are_bounded_and_a_new_one_is_served() {
    allow_open_files(10_000).unwrap();
    let replica = Replica::start().await;
    let address = replica.running.metrics_addr.unwrap();
    let mut crowd = JoinSet::new();
    for number in 0..500 {
        let mut stream = connect_from(host(2), address).await.unwrap();
        if number % 2 == 0 {
            // Send half of a request.
            stream.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
        }
        crowd.spawn(async move { stream.read(&mut [0]).await });
    }
    for _ in 0..500 - 128 {
        timeout(GUARD, crowd.join_next()).await.expect("the replica keeps too many connections");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(get(&replica, path).await.0, "HTTP/1.1 200 OK");
    }
    // Many connections request the slowest page again and again.
    let flood = Crowd::gather(address, [2], 200, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
    for _ in 0..20 {
        assert_eq!(get(&replica, "/metrics").await.0, "HTTP/1.1 200 OK");
    }
    flood.leave().await;
}
