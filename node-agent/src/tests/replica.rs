//! A replica that the test controls, with a real socket.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use futures::StreamExt as _;
use headgate_proto::v1::{
    self,
    agent_message::Body,
    discovery_server::{Discovery, DiscoveryServer},
    server_message,
};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, watch},
    time::{Duration, timeout},
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, Streaming, transport::Server};

use super::GUARD;

type Outgoing = Result<v1::ServerMessage, Status>;

/// A replica that the test controls. The replica stops when this value is dropped.
pub(super) struct ScriptedReplica {
    pub(super) address: SocketAddr,
    connections: mpsc::Receiver<Connection>,
    standing: Standing,
    /// Notified at each request for the standing.
    asked: Arc<Notify>,
    /// While true, requests for the standing wait.
    delays_answers: watch::Sender<bool>,
    _stops: DropGuard,
}

/// One agent's stream.
pub(super) struct Connection {
    /// The first message, until it is taken.
    first: Option<Body>,
    incoming: Streaming<v1::AgentMessage>,
    outgoing: mpsc::Sender<Outgoing>,
}

struct Service {
    connections: mpsc::Sender<Connection>,
    standing: Standing,
    asked: Arc<Notify>,
    delays_answers: watch::Receiver<bool>,
}

/// The answer to a request for the standing. `None` means an error.
type Standing = Arc<Mutex<Option<v1::StandingResponse>>>;

#[tonic::async_trait]
impl Discovery for Service {
    type SyncStream = ReceiverStream<Outgoing>;

    async fn sync(&self, request: Request<Streaming<v1::AgentMessage>>) -> Result<Response<Self::SyncStream>, Status> {
        let (outgoing, receiver) = mpsc::channel(16);
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.and_then(|message| message.body);
        if let Some(Body::Standing(_)) = &first {
            let body = Some(server_message::Body::Standing(self.standing().await?));
            let _ = outgoing.send(Ok(v1::ServerMessage { body })).await;
            return Ok(Response::new(ReceiverStream::new(receiver)));
        }
        let connection = Connection { first, incoming, outgoing };
        self.connections.send(connection).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

impl Service {
    async fn standing(&self) -> Result<v1::StandingResponse, Status> {
        let standing = self.standing.lock().unwrap().clone();
        self.asked.notify_one();
        let _ = self.delays_answers.clone().wait_for(|delays| !delays).await;
        standing.ok_or_else(|| Status::unavailable("the test sets no standing"))
    }
}

impl ScriptedReplica {
    pub(super) async fn start() -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn serve(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let (sender, connections) = mpsc::channel(16);
        let stop = CancellationToken::new();
        let standing = Standing::default();
        let (asked, (delays_answers, delays)) = (Arc::<Notify>::default(), watch::channel(false));
        let service = Service {
            connections: sender,
            standing: Arc::clone(&standing),
            asked: Arc::clone(&asked),
            delays_answers: delays,
        };
        let serving = Server::builder().add_service(DiscoveryServer::new(service));
        let serving = serving.serve_with_incoming(TcpListenerStream::new(listener));
        let stopped = stop.clone();
        tokio::spawn(async move { stopped.run_until_cancelled(serving).await });
        Self { address, connections, standing, asked, delays_answers, _stops: stop.drop_guard() }
    }

    /// Sets the answer to requests for the standing.
    pub(super) fn set_standing(&self, epoch: u64, state: v1::SourceState, positions: Vec<v1::SourcePosition>) {
        let standing = v1::StandingResponse {
            replica: "test".into(),
            epoch,
            source_state: state.into(),
            changed_positions: positions.clone(),
            positions,
            ..Default::default()
        };
        *self.standing.lock().unwrap() = Some(standing);
    }

    /// While `delays` is true, requests for the standing wait. After the wait, a request gets the
    /// answer that was set when the request arrived.
    pub(super) fn delay_answers(&self, delays: bool) {
        self.delays_answers.send_replace(delays);
    }

    /// Waits until an agent has requested the standing.
    pub(super) async fn wait_until_asked(&self) {
        timeout(GUARD, self.asked.notified()).await.unwrap();
    }

    pub(super) async fn accept(&mut self) -> Connection {
        timeout(GUARD, self.connections.recv()).await.unwrap().unwrap()
    }
}

impl Connection {
    pub(super) async fn send(&mut self, message: v1::ServerMessage) {
        // Ignore the error of a disconnected agent: the test then fails because the agent's answers
        // are missing.
        let _ = timeout(GUARD, self.outgoing.send(Ok(message))).await.unwrap();
    }

    pub(super) async fn end(self, status: Status) {
        let _ = self.outgoing.send(Err(status)).await;
    }

    pub(super) async fn next_within(&mut self, wait: Duration) -> Option<Body> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        timeout(wait, self.incoming.next()).await.ok().map(|message| message.unwrap().unwrap().body.unwrap())
    }

    pub(super) async fn next(&mut self) -> Body {
        self.next_within(GUARD).await.unwrap()
    }

    pub(super) async fn hello(&mut self) -> v1::Hello {
        let Body::Hello(hello) = self.next().await else { panic!("not Hello") };
        hello
    }

    pub(super) async fn ack(&mut self) -> v1::Ack {
        match self.next().await {
            Body::Ack(ack) => ack,
            other => panic!("{other:?}"),
        }
    }
}
