//! Replicas, an agent and a client that talk over another carrier than TCP.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, ready},
};
use headgate_control_plane::{
    metrics::Metrics,
    model::{Sink as _, Transaction, TriggeredChange},
    serve::{self, CancellationToken, Listen, PeerSettings, Running, Security, ServeError, Settings},
    store::{Limits, Store},
};
use headgate_listener::{Accept, Carrier, Io, connector};
use headgate_node_agent::backoff::Backoff;
use headgate_proto::v1::{self, inspect_client::InspectClient};
use headgate_tests::agent::Agent;
use tokio::{io::duplex, sync::mpsc};
use tonic::transport::Endpoint;

use crate::{
    client::eventually,
    identity::authority::{Authority, load},
    replica::{endpoint, service, settings},
};

/// Carries connections through the memory of the process.
#[derive(Debug, Default)]
struct Pipes(Mutex<HashMap<SocketAddr, mpsc::Sender<Box<dyn Io>>>>);

struct Accepted(mpsc::Receiver<Box<dyn Io>>);

impl Carrier for Pipes {
    fn connect(&self, to: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Io>>> {
        let (client, server) = duplex(4096);
        let listening = self.0.lock().unwrap();
        let is_accepted = listening.get(&to).is_some_and(|listener| listener.try_send(Box::new(server)).is_ok());
        let client: Box<dyn Io> = Box::new(client);
        ready(is_accepted.then_some(client).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())).boxed()
    }

    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        ready(host.parse().map(|host| vec![SocketAddr::new(host, port)]).map_err(io::Error::other)).boxed()
    }

    fn listen(&self, at: SocketAddr) -> io::Result<(Box<dyn Accept>, SocketAddr)> {
        let (sender, receiver) = mpsc::channel(16);
        self.0.lock().unwrap().insert(at, sender);
        Ok((Box::new(Accepted(receiver)), at))
    }
}

impl Accept for Accepted {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn Io>, SocketAddr)>> {
        let client = SocketAddr::from(([192, 0, 2, 100], 40_000));
        self.0.poll_recv(cx).map(|io| io.map(|io| (io, client)).ok_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }
}

/// Starts a replica at an address for tests, which no machine has.
async fn start(host: u8, carrier: Arc<dyn Carrier>, security: Security) -> Result<(Arc<Store>, Running), ServeError> {
    let names = [1, 2].map(|host| (format!("192.0.2.{host}"), 7444)).into();
    let peers = Some(PeerSettings { names, tls: None });
    let (carrier, uncovered_after) = (Some(carrier), Duration::ZERO);
    let settings = Settings { replica_name: format!("replica-{host}"), peers, carrier, uncovered_after, ..settings() };
    let metrics = Arc::new(Metrics::default());
    let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
    let at = SocketAddr::from(([192, 0, 2, host], 7443));
    let (serving, stop) = (Arc::clone(&store), CancellationToken::new());
    let running = serve::start(Listen::at(at), security, settings, serving, metrics, stop).await?;
    let changes = [service(1, 80), endpoint(1, 1, 8080)].map(|change| TriggeredChange { change, trigger_unix_ms: 0 });
    store.commit(Transaction { changes: changes.into(), ..Transaction::default() });
    store.synced();
    Ok((store, running))
}

#[tokio::test]
async fn replicas_agents_and_clients_talk_over_another_carrier() {
    let carrier: Arc<dyn Carrier> = Arc::<Pipes>::default();
    let (first, running) = start(1, Arc::clone(&carrier), Security::Plaintext).await.unwrap();
    let (_second, other) = start(2, Arc::clone(&carrier), Security::Plaintext).await.unwrap();
    let urls = ["http://192.0.2.1:7443".to_owned()];
    let agent = Agent::start("a", &urls, None, Backoff::default, Some(Arc::clone(&carrier))).unwrap();
    eventually("the agent has programmed the state", async || agent.programmed() == Some(first.digests())).await;

    // The second replica knows the agent from the first one.
    let inspect = Endpoint::from_static("http://replica-2");
    let connected = inspect.connect_with_connector(connector(carrier, other.inspect_addr)).await;
    let mut inspect = InspectClient::new(connected.unwrap());
    let wanted = v1::WaitRequest { namespace: "default".into(), name: "service-1".into(), ..Default::default() };
    let mut answer = inspect.wait(wanted).await.unwrap().into_inner();
    let answer = answer.message().await.unwrap().unwrap();
    assert!(answer.done && answer.nodes == 1, "{answer:?}");
    drop(agent);
    running.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn another_carrier_serves_no_tls() {
    let (authority, folder) = (Authority::new("authority"), tempfile::tempdir().unwrap());
    authority.server(|_| {}).write(folder.path(), &[&authority]);
    let refused = start(1, Arc::<Pipes>::default(), Security::Tls(load(folder.path()))).await.err().unwrap();
    assert!(matches!(&refused, ServeError::Listen { option: "--listen", .. }), "{refused}");
    assert!(refused.to_string().contains("only TCP has TLS"), "{refused}");
}
