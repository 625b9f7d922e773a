//! Active health checks: an endpoint that refuses a check gets no new connections, and keeps its
//! established connections.

use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::changes::eventually;
use super::live::{expect_servers, hold_connections, targets};
use crate::testbed::manifests::{Port, Service, Slice, Via, ready};
use crate::testbed::{Family, Outcome, Request, Testbed, Transport, client};

/// A port on which no server of the testbed listens.
const SILENT_PORT: u16 = 9999;
const GUARD: Duration = Duration::from_secs(60);

/// A service with an endpoint that answers and an endpoint that refuses.
fn half_refusing(name: &str) -> Service {
    let ports = vec![Port { name: "tcp", transport: Transport::Tcp, port: 80, target_port: SILENT_PORT }];
    let mut service = Service::new(name, &["a1"]);
    service.more_slices = vec![Slice { suffix: "silent", ports, endpoints: ready(&["b1"]) }];
    service
}

/// An endpoint refuses connections, then accepts a connection, then refuses connections again. The
/// agents check the endpoint every two seconds.
pub fn refusing_endpoints_are_left_out(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| {
        manifests.add(half_refusing("unchecked"))?;
        let mut checked = half_refusing("checked");
        checked.patch = Some(|_| {
            let annotations = json!({"headgate.io/health-check": "tcp", "headgate.io/health-check-interval": "2s"});
            json!({"metadata": {"annotations": annotations}})
        });
        manifests.add(checked)
    })?;
    let unchecked = bed.address("unchecked", Via::ClusterIp, Family::V4, "tcp")?;
    let ask = || client::ask_many(bed.machines().machine("a3")?, &Request::new(Transport::Tcp, unchecked), 40);
    let mut outcomes = ask()?;
    if bed.backend().carries_tcp() && outcomes.contains(&Outcome::Refused) {
        // On a busy machine, connections may go past the proxy for a moment.
        outcomes = ask()?;
    }
    let is_refused = outcomes.contains(&Outcome::Refused);
    ensure!(is_refused != bed.backend().carries_tcp(), "without checks, only a proxy avoids refusals: {outcomes:?}");

    eventually(|| expect_servers(bed, "checked", &["a1"]))
        .context("waiting until the refusing endpoint is left out")?;
    let mut held = hold_connections(bed, "checked")?;
    // The agents send no connection to the refusing endpoint.
    for (from, to) in targets(bed, "checked")? {
        let outcomes = client::ask_many(bed.machines().machine(from)?, &Request::new(Transport::Tcp, to), 40)?;
        ensure!(!outcomes.contains(&Outcome::Refused), "{from} is still refused by {to}");
    }

    let to = bed.address("checked", Via::ClusterIp, Family::V4, "tcp")?;
    let listener = bed.machines().machine("b1")?.run(|| {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, SILENT_PORT))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })?;
    let (mut inside, mut outside) =
        eventually_connected(bed, to, &listener).context("waiting until the endpoint gets connections again")?;

    drop(listener);
    eventually(|| expect_servers(bed, "checked", &["a1"])).context("waiting until the endpoint is left out again")?;
    inside.write_all(b"still")?;
    outside.set_read_timeout(Some(GUARD))?;
    outside.read_exact(&mut [0; 5]).context("using the old connection to the failed endpoint")?;
    held.iter_mut().try_for_each(client::HeldConnection::check)
}

/// Connects to `to` until `listener` accepts one of these connections. Returns the server's and the
/// client's ends of this connection. Agents' checks also connect to `listener`, but send no data.
fn eventually_connected(bed: &Testbed, to: SocketAddr, listener: &TcpListener) -> Result<(TcpStream, TcpStream)> {
    let machine = bed.machines().machine("a3")?;
    let found = std::cell::RefCell::new(None);
    eventually(|| {
        let mut client = machine.run(move || Ok(TcpStream::connect_timeout(&to, GUARD)?))?;
        // A proxy connects from a port of its own, so the sent bytes identify the connection.
        let sent = client.local_addr()?.port().to_be_bytes();
        client.write_all(&sent)?;
        while let Ok((mut server, _)) = listener.accept() {
            server.set_nonblocking(false)?;
            server.set_read_timeout(Some(Duration::from_millis(200)))?;
            let mut received = [0; 2];
            if server.read_exact(&mut received).is_ok() && received == sent {
                *found.borrow_mut() = Some((server, client));
                return Ok(());
            }
        }
        anyhow::bail!("{to} leads to another server")
    })?;
    found.into_inner().context("no connection was kept")
}
