//! The `Peers` service: other replicas that have joined this one (discovery.proto, section 18).

use std::{sync::Arc, time::Duration};

use headgate_core::{ServiceKey, address_from_bytes};
use headgate_proto::v1::{self, peers_server::Peers, question::Wanted};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::inspect::Items;
use crate::{
    identity::{Expiry, Peer},
    serve::{
        context::{Lifecycle, milliseconds},
        everywhere::{Everywhere, Question, answer},
        fleet::Fleet,
    },
    store::positions_from_wire,
};

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
    type JoinStream = Items<v1::Roster>;

    async fn join(&self, request: Request<v1::PeerIdentity>) -> Result<Response<Self::JoinStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        let (fleet, everywhere) = (Arc::clone(&self.fleet), Arc::clone(&self.everywhere));
        if fleet.context.lifecycle() == Lifecycle::Ended {
            return Err(Status::unavailable("this replica stops"));
        }
        let caller = everywhere.caller(request.into_inner().epoch);
        let (rosters, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            tokio::select! {
                () = send_rosters(&fleet, &everywhere, &rosters) => {}
                () = Expiry::passed(expiry) => {}
                () = rosters.closed() => {}
            }
            drop(caller);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn ask(&self, request: Request<v1::Question>) -> Result<Response<v1::QuestionAnswer>, Status> {
        self.fleet.context.metrics.peer_questions.inc();
        let request = request.into_inner();
        let until = Instant::now() + Duration::from_millis(request.wait_ms).min(MAX_WAIT);
        Ok(Response::new(answer(&self.fleet, &from_wire(&request)?, until).await))
    }
}

/// Sends the roster and its changes until this replica stops, and then says goodbye.
async fn send_rosters(fleet: &Fleet, everywhere: &Everywhere, to: &mpsc::Sender<Result<v1::Roster, Status>>) {
    let (context, mut number) = (&fleet.context, 0);
    let (mut numbers, mut lifecycle) = (fleet.rosters(), context.lifecycle.subscribe());
    loop {
        numbers.mark_unchanged();
        let says_goodbye = *lifecycle.borrow_and_update() == Lifecycle::Ended;
        let identity =
            v1::PeerIdentity { replica: context.settings.replica_name.clone(), epoch: context.store.epoch() };
        let roster = v1::Roster {
            identity: Some(identity),
            uptime_ms: milliseconds(everywhere.uptime()),
            is_incomplete: fleet.with_roster(|roster| roster.is_incomplete(context.settings.uncovered_after)),
            says_goodbye,
            agents: context.settings.ports.agents.to_string(),
            ..fleet.with_roster(|roster| roster.since(number))
        };
        number = roster.number;
        if to.send(Ok(roster)).await.is_err() || says_goodbye {
            return;
        }
        tokio::select! {
            Ok(()) = numbers.changed() => sleep(ROSTER_PACE).await,
            Ok(()) = lifecycle.changed() => {}
            else => return,
        }
    }
}

fn from_wire(wire: &v1::Question) -> Result<Question, Status> {
    let wanted = Wanted::try_from(wire.wanted)
        .map_err(|_| Status::invalid_argument(format!("wanted: {} is unknown to this replica", wire.wanted)))?;
    let endpoint = |endpoint: &v1::QuestionEndpoint| {
        let key = endpoint.service.as_ref()?;
        let address = match &endpoint.address[..] {
            [] => None,
            bytes => Some(address_from_bytes(bytes)?),
        };
        Some((ServiceKey::new(&key.namespace, &key.name), address))
    };
    let endpoints: Option<Vec<_>> = wire.endpoints.iter().map(endpoint).collect();
    let endpoints = endpoints.ok_or_else(|| {
        Status::invalid_argument("endpoints: each needs a service, and an address of 0, 4 or 16 bytes")
    })?;
    Ok(Question { wanted, endpoints, positions: positions_from_wire(&wire.positions) })
}
