//! The `Peers` service: other replicas that have joined this one (discovery.proto, section 18).

use std::{collections::HashMap, pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use headgate_core::ServiceKey;
use headgate_proto::v1::{self, peer_message::Body, peer_request, peers_server::Peers, question::Wanted};
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
    time::{Instant, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    identity::{Expiry, Peer},
    serve::{
        barrier::address_from_wire,
        context::{Lifecycle, milliseconds},
        everywhere::{Caller, Everywhere, Question, answer},
        fleet::Fleet,
    },
    store::positions_from_wire,
};

/// The maximum number of unanswered questions on a stream.
const MAX_RUNNING: usize = 16_384;

/// The longest wait for an answer.
const MAX_WAIT: Duration = Duration::from_secs(3_600);

/// The shortest time between two rosters.
const ROSTER_PACE: Duration = Duration::from_millis(20);

/// The service `headgate.v1.Peers`.
pub(crate) struct PeerService {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) everywhere: Arc<Everywhere>,
}

#[tonic::async_trait]
impl Peers for PeerService {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<v1::PeerMessage, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<v1::PeerRequest>>) -> Result<Response<Self::JoinStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        let mut requests = request.into_inner();
        let (messages, receiver) = mpsc::channel(1);
        let (fleet, everywhere) = (Arc::clone(&self.fleet), Arc::clone(&self.everywhere));
        let first = requests.message().await?.and_then(|first| first.body);
        let Some(peer_request::Body::Identity(identity)) = first else {
            return Err(Status::invalid_argument("the first message of a replica must be its identity"));
        };
        if fleet.context.lifecycle() == Lifecycle::Ended {
            return Err(Status::unavailable("this replica stops"));
        }
        let is_self = identity.epoch == fleet.context.store.epoch();
        let caller = everywhere.replicas().filter(|_| !is_self).map(|replicas| replicas.caller(identity.epoch));
        let (answers, answered) = mpsc::channel(64);
        let stream =
            Joined { fleet, everywhere, running: HashMap::new(), messages, answers, number: 0, _caller: caller };
        tokio::spawn(stream.serve(requests, answered, expiry));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// The stream of a replica that has joined. Dropping it gives all its questions up.
struct Joined {
    fleet: Arc<Fleet>,
    everywhere: Arc<Everywhere>,
    running: HashMap<u64, AbortHandle>,
    messages: mpsc::Sender<Result<v1::PeerMessage, Status>>,
    answers: mpsc::Sender<v1::QuestionAnswer>,
    /// The number of the roster that was sent last.
    number: u64,
    _caller: Option<Caller>,
}

impl Joined {
    /// Serves the stream until it ends.
    async fn serve(
        mut self,
        mut requests: Streaming<v1::PeerRequest>,
        mut answered: mpsc::Receiver<v1::QuestionAnswer>,
        expiry: Option<Expiry>,
    ) {
        let (mut rosters, mut lifecycle) = (self.fleet.rosters(), self.fleet.context.lifecycle.subscribe());
        if self.send_roster(false).await.is_none() {
            return;
        }
        loop {
            let sent = tokio::select! {
                request = requests.message() => match request {
                    Ok(Some(request)) => self.take(request).await,
                    Ok(None) | Err(_) => return,
                },
                Some(answer) = answered.recv() => self.send_answer(answer).await,
                Ok(()) = rosters.changed() => {
                    rosters.mark_unchanged();
                    let sent = self.send_roster(false).await;
                    sleep(ROSTER_PACE).await;
                    sent
                }
                () = ended(&mut lifecycle) => {
                    self.send_roster(true).await;
                    return;
                }
                () = Expiry::passed(expiry) => return,
                () = self.messages.closed() => return,
            };
            if sent.is_none() {
                return;
            }
        }
    }

    async fn send(&self, body: Body) -> Option<()> {
        self.messages.send(Ok(v1::PeerMessage { body: Some(body) })).await.ok()
    }

    async fn send_roster(&mut self, says_goodbye: bool) -> Option<()> {
        let context = &self.fleet.context;
        let time = context.settings.uncovered_after;
        let roster = v1::Roster {
            identity: Some(v1::PeerIdentity {
                replica: context.settings.replica_name.clone(),
                epoch: context.store.epoch(),
            }),
            uptime_ms: milliseconds(self.everywhere.uptime()),
            is_incomplete: self.fleet.with_roster(|roster| roster.is_incomplete(time)),
            says_goodbye,
            ..self.fleet.roster_since(self.number)
        };
        self.number = roster.number;
        self.send(Body::Roster(roster)).await
    }

    /// Sends an answer, after the roster for which it holds.
    async fn send_answer(&mut self, answer: v1::QuestionAnswer) -> Option<()> {
        self.running.remove(&answer.id);
        if answer.roster > self.number {
            self.send_roster(false).await?;
        }
        self.send(Body::Answer(answer)).await
    }

    /// Begins or gives up a question. Returns `None` if the stream has to end.
    async fn take(&mut self, request: v1::PeerRequest) -> Option<()> {
        let Some(peer_request::Body::Question(question)) = request.body else { return Some(()) };
        if let Some(old) = self.running.remove(&question.id) {
            old.abort();
        }
        if question.is_cancelled {
            return Some(());
        }
        if self.running.len() >= MAX_RUNNING {
            let text = format!("a replica may have {MAX_RUNNING} unanswered questions at most");
            // The caller may have gone.
            let _ = self.messages.send(Err(Status::resource_exhausted(text))).await;
            return None;
        }
        self.fleet.context.metrics.count_peer_question();
        let id = question.id;
        let until = Instant::now() + Duration::from_millis(question.wait_ms).min(MAX_WAIT);
        let question = match from_wire(&question) {
            Ok(question) => question,
            Err(status) => {
                // The caller may have gone.
                let _ = self.messages.send(Err(status)).await;
                return None;
            }
        };
        let (fleet, answers) = (Arc::clone(&self.fleet), self.answers.clone());
        let work = tokio::spawn(async move {
            let answer = v1::QuestionAnswer { id, ..answer(&fleet, &question, until).await };
            // The stream may have ended.
            let _ = answers.send(answer).await;
        });
        self.running.insert(id, work.abort_handle());
        Some(())
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.running.values().for_each(AbortHandle::abort);
    }
}

/// Waits until the streams of this replica have ended, because it stops.
async fn ended(lifecycle: &mut watch::Receiver<Lifecycle>) {
    // An error means that the replica is gone.
    let _ = lifecycle.wait_for(|lifecycle| *lifecycle == Lifecycle::Ended).await.map(drop);
}

fn from_wire(wire: &v1::Question) -> Result<Question, Status> {
    let wanted = Wanted::try_from(wire.wanted)
        .map_err(|_| Status::invalid_argument(format!("wanted: {} is unknown to this replica", wire.wanted)))?;
    let endpoint = |endpoint: &v1::QuestionEndpoint| {
        let key = endpoint.service.as_ref()?;
        let address = match &endpoint.address[..] {
            [] => None,
            bytes => Some(address_from_wire(bytes)?),
        };
        Some((ServiceKey::new(&key.namespace, &key.name), address))
    };
    let endpoints: Option<Vec<_>> = wire.endpoints.iter().map(endpoint).collect();
    let endpoints = endpoints.ok_or_else(|| {
        Status::invalid_argument("endpoints: each needs a service, and an address of 0, 4 or 16 bytes")
    })?;
    Ok(Question { wanted, endpoints, positions: positions_from_wire(&wire.positions) })
}
