//! The `Peers` service: questions of other replicas (discovery.proto, section 18).

use std::{collections::HashMap, pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use headgate_core::ServiceKey;
use headgate_proto::v1::{self, peers_server::Peers};
use tokio::{sync::mpsc, task::AbortHandle, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    identity::{Expiry, Peer},
    serve::barrier::{Barrier, Question, Wanted, address_from_wire, confirm},
    serve::fleet::Fleet,
    store::positions_from_wire,
};

/// The maximum number of unanswered questions on a stream. Further questions are not read.
const MAX_RUNNING: usize = 16_384;

/// The longest wait for an answer.
const MAX_WAIT: Duration = Duration::from_secs(3_600);

/// The service `headgate.v1.Peers`.
pub(crate) struct Answerer {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) barrier: Arc<Barrier>,
}

#[tonic::async_trait]
impl Peers for Answerer {
    type ConfirmStream = Pin<Box<dyn Stream<Item = Result<v1::ConfirmAnswer, Status>> + Send>>;

    async fn confirm(
        &self,
        request: Request<Streaming<v1::ConfirmRequest>>,
    ) -> Result<Response<Self::ConfirmStream>, Status> {
        let expiry = request.extensions().get::<Peer>().and_then(Peer::expiry);
        let (answers, receiver) = mpsc::channel(1);
        let stream =
            Asker { fleet: Arc::clone(&self.fleet), started: self.barrier.started, running: HashMap::new(), answers };
        tokio::spawn(stream.serve(request.into_inner(), expiry));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// One stream of questions. Dropping it gives all questions up.
struct Asker {
    fleet: Arc<Fleet>,
    started: Instant,
    running: HashMap<u64, AbortHandle>,
    answers: mpsc::Sender<Result<v1::ConfirmAnswer, Status>>,
}

impl Asker {
    async fn serve(mut self, mut questions: Streaming<v1::ConfirmRequest>, expiry: Option<Expiry>) {
        loop {
            let question = tokio::select! {
                question = questions.message() => question,
                () = Expiry::passed(expiry) => return,
                () = self.answers.closed() => return,
            };
            let Ok(Some(question)) = question else { return };
            if let Some(old) = self.running.remove(&question.id) {
                old.abort();
            }
            if question.is_cancelled {
                continue;
            }
            if self.running.len() >= MAX_RUNNING {
                self.running.retain(|_, work| !work.is_finished());
            }
            if self.running.len() >= MAX_RUNNING {
                let text = format!("a replica may have {MAX_RUNNING} unanswered questions at most");
                // The caller may have gone.
                let _ = self.answers.send(Err(Status::resource_exhausted(text))).await;
                return;
            }
            self.begin(question);
        }
    }

    fn begin(&mut self, request: v1::ConfirmRequest) {
        let (fleet, started, answers) = (Arc::clone(&self.fleet), self.started, self.answers.clone());
        let id = request.id;
        let work = tokio::spawn(async move {
            let answer = match question(&request) {
                Ok(question) => {
                    let until = Instant::now() + Duration::from_millis(request.wait_ms).min(MAX_WAIT);
                    Ok(v1::ConfirmAnswer { id, ..confirm(&fleet, &question, until, started).await })
                }
                Err(status) => Err(status),
            };
            // The caller may have gone.
            let _ = answers.send(answer).await;
        });
        self.running.insert(id, work.abort_handle());
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.running.values().for_each(AbortHandle::abort);
    }
}

fn question(request: &v1::ConfirmRequest) -> Result<Question, Status> {
    let endpoint = |endpoint: &v1::PodEndpoint| {
        let key = endpoint.service.as_ref()?;
        Some((ServiceKey::new(&key.namespace, &key.name), address_from_wire(&endpoint.address)?))
    };
    let endpoints: Option<Vec<_>> = request.endpoints.iter().map(endpoint).collect();
    let endpoints = endpoints.filter(|endpoints| !endpoints.is_empty()).ok_or_else(|| {
        Status::invalid_argument(
            "endpoints: needs at least one endpoint, each with a service and an address of 4 or 16 bytes",
        )
    })?;
    let awaited = request.awaited_nodes.clone();
    let wanted = if request.wants_usable { Wanted::Usable } else { Wanted::Unusable };
    Ok(Question { wanted, endpoints, positions: positions_from_wire(&request.positions), awaited })
}
