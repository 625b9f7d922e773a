//! The queries on one stream that the agent has not answered yet (discovery.proto, section 17).

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use headgate_proto::v1;
use prost::Message as _;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tonic::Status;

/// The maximum number of unanswered queries on a stream.
const MAX_ON_STREAM: usize = 4;

/// The maximum size of the parts of an answer, in bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// The maximum number of parts that wait for the client. Agents send fewer parts in an answer.
const MAX_WAITING_PARTS: usize = 128;

/// The unanswered queries on one stream.
#[derive(Debug, Default)]
pub(crate) struct Queries {
    /// True if a query has not been sent yet. Each visit of the stream reads this value without a
    /// lock.
    has_unsent: AtomicBool,
    open: Mutex<OpenQueries>,
}

#[derive(Debug, Default)]
struct OpenQueries {
    last_id: u64,
    unanswered: Vec<Unanswered>,
    /// True after the stream has ended.
    is_over: bool,
}

#[derive(Debug)]
struct Unanswered {
    id: u64,
    /// `None` after the query was sent.
    unsent: Option<v1::NodeQuery>,
    received_bytes: usize,
    /// The parts of the answer that wait for the client.
    parts: Sender<Result<v1::Answer, Status>>,
}

impl Queries {
    /// Returns a query that has not been sent on the stream yet.
    pub(crate) fn take_unsent(&self) -> Option<v1::Query> {
        if !self.has_unsent.load(Ordering::Acquire) {
            return None;
        }
        let mut open = self.open();
        let mut unsent = open.unanswered.iter_mut().filter(|query| query.unsent.is_some());
        let next = unsent.next().map(|query| v1::Query { id: query.id, query: query.unsent.take() });
        self.has_unsent.store(unsent.next().is_some(), Ordering::Release);
        next
    }

    /// Passes a part of an answer to the client. Returns false if the query is unknown, for example
    /// because its client has gone.
    pub(crate) fn answer(&self, answer: v1::Answer) -> bool {
        let mut open = self.open();
        let Some(index) = open.unanswered.iter().position(|query| query.id == answer.id) else { return false };
        let query = &mut open.unanswered[index];
        query.received_bytes += answer.encoded_len();
        let is_too_large = query.received_bytes > MAX_ANSWER_BYTES;
        let is_last = answer.is_last || is_too_large;
        let part = if is_too_large {
            let text = "the answer has more than 1 MiB: ask for less, such as a single Service";
            Err(Status::resource_exhausted(text))
        } else {
            Ok(answer)
        };
        // A client that reads too slowly loses the answer. So does a client that has gone.
        if query.parts.try_send(part).is_err() || is_last {
            open.unanswered.swap_remove(index);
        }
        true
    }

    /// Ends all queries, because the stream has ended.
    pub(super) fn close(&self) {
        let mut open = self.open();
        open.is_over = true;
        open.unanswered = Vec::new();
    }

    pub(super) fn add(&self, node: &str, query: v1::NodeQuery) -> Result<(u64, AnswerParts), Status> {
        let mut open = self.open();
        if open.is_over {
            return Err(stream_ended(node));
        }
        if open.unanswered.len() >= MAX_ON_STREAM {
            let text = format!("{MAX_ON_STREAM} queries already wait for the agent of node {node}: ask again later");
            return Err(Status::resource_exhausted(text));
        }
        open.last_id += 1;
        let (id, (parts, received)) = (open.last_id, channel(MAX_WAITING_PARTS));
        open.unanswered.push(Unanswered { id, unsent: Some(query), received_bytes: 0, parts });
        self.has_unsent.store(true, Ordering::Release);
        Ok((id, received))
    }

    pub(super) fn remove(&self, id: u64) {
        self.open().unanswered.retain(|query| query.id != id);
    }

    fn open(&self) -> MutexGuard<'_, OpenQueries> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) type AnswerParts = Receiver<Result<v1::Answer, Status>>;

/// The status of a query whose stream ended.
pub(super) fn stream_ended(node: &str) -> Status {
    let text = format!("the stream of the agent of node {node} ended, or the answer was read too slowly: ask again");
    Status::unavailable(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn query() -> v1::NodeQuery {
        let kind = v1::node_query::Kind::Status(v1::NodeStatusQuery {});
        v1::NodeQuery { kind: Some(kind) }
    }

    fn part(id: u64, text_bytes: usize) -> v1::Answer {
        let text = "x".repeat(text_bytes);
        let kind = Some(v1::node_answer::Kind::Metrics(v1::MetricsText { text }));
        v1::Answer { id, part: Some(v1::NodeAnswer { kind }), ..v1::Answer::default() }
    }

    #[test]
    fn each_query_is_sent_once_and_the_number_is_limited() {
        let queries = Queries::default();
        let asked: Vec<_> = (0..MAX_ON_STREAM).map(|_| queries.add("n1", query()).unwrap()).collect();
        let refused = queries.add("n1", query()).unwrap_err();
        assert!(refused.message().contains("node n1"), "{refused}");
        let sent: Vec<u64> = std::iter::from_fn(|| queries.take_unsent()).map(|query| query.id).collect();
        assert_eq!(sent, [1, 2, 3, 4]);
        queries.remove(asked[0].0);
        queries.add("n1", query()).unwrap();
        assert_eq!(queries.take_unsent().unwrap().id, 5);
    }

    #[test]
    fn an_answer_that_is_too_large_ends_with_an_error() {
        let queries = Queries::default();
        let (id, mut parts) = queries.add("n1", query()).unwrap();
        for _ in 0..5 {
            queries.answer(part(id, 250 << 10));
        }
        let received: Vec<_> = std::iter::from_fn(|| parts.try_recv().ok()).collect();
        assert_eq!(received.iter().filter(|part| part.is_ok()).count(), 4);
        assert!(received[4].is_err() && received.len() == 5);
        assert!(!queries.answer(part(id, 1)), "the query is over");
    }

    #[tokio::test]
    async fn the_end_of_the_stream_ends_its_queries() {
        let queries = Queries::default();
        let (_, mut parts) = queries.add("n1", query()).unwrap();
        queries.close();
        assert!(parts.recv().await.is_none());
        assert_eq!(queries.add("n1", query()).unwrap_err().code(), tonic::Code::Unavailable);
    }
}
