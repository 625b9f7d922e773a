//! Answers the replica's queries about this node (`discovery.proto`, rule 17).

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use headgate_proto::v1::{self, agent_message::Body, node_answer, node_query};
use prost::Message as _;
use tokio::time::{Instant, sleep_until};

/// Maximum number of queries that wait for their turn.
const MAX_WAITING: usize = 4;
/// Maximum size of all parts of an answer.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// The preferred size of one part. A part that holds a list has about this size at most.
pub(crate) const PART_BYTES: usize = 16 << 10;
/// How fast parts are sent, at most.
const BYTES_PER_SECOND: usize = 128 << 10;

/// The answer to a query of a kind that this version does not know.
const UNKNOWN: &str =
    concat!("an agent of version ", env!("CARGO_PKG_VERSION"), " does not know this kind of query: upgrade the agent");

/// The parts of an answer, or the reason why there is none: a sentence with the remedy.
pub(crate) type NodeAnswer = Result<Vec<node_answer::Kind>, String>;

/// What the agent knows about its node.
pub(crate) trait NodeKnowledge: fmt::Debug + Send + Sync {
    /// Answers a query. The future must not block its thread.
    fn answer(&self, query: node_query::Kind) -> BoxFuture<'static, NodeAnswer>;
}

/// The queries and answers of one stream.
pub(super) struct Answers {
    knowledge: Option<Arc<dyn NodeKnowledge>>,
    waiting: VecDeque<v1::Query>,
    running: Option<(u64, BoxFuture<'static, NodeAnswer>)>,
    /// The messages that are left of the current answer.
    parts: VecDeque<v1::Answer>,
    /// When the next part may be sent.
    next_part: Instant,
}

impl Answers {
    /// Creates the queue of a stream. Without `knowledge`, every query gets an error.
    pub(super) fn new(knowledge: Option<Arc<dyn NodeKnowledge>>) -> Self {
        let (waiting, parts) = (VecDeque::new(), VecDeque::new());
        Self { knowledge, waiting, running: None, parts, next_part: Instant::now() }
    }

    /// Queues a query.
    pub(super) fn ask(&mut self, query: v1::Query) {
        if self.waiting.len() >= MAX_WAITING {
            let error = format!("{MAX_WAITING} queries already wait; ask again later");
            self.parts.push_back(v1::Answer { id: query.id, error, is_last: true, ..v1::Answer::default() });
        } else {
            self.waiting.push_back(query);
        }
    }

    /// Waits until [`Self::pop`] returns a message. The wait can be abandoned and repeated.
    pub(super) async fn ready(&mut self) {
        loop {
            if !self.parts.is_empty() {
                return sleep_until(self.next_part).await;
            }
            if let Some((id, answer)) = &mut self.running {
                let (id, answer) = (*id, answer.await);
                self.running = None;
                self.parts = messages(id, answer);
            } else if let Some(v1::Query { id, query }) = self.waiting.pop_front() {
                let kind = query.and_then(|query| query.kind);
                match self.knowledge.as_ref().zip(kind) {
                    Some((knowledge, kind)) => self.running = Some((id, knowledge.answer(kind))),
                    None => self.parts = messages(id, Err(UNKNOWN.to_owned())),
                }
            } else {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns the next part that may be sent at `now`, if any.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Body> {
        let part = self.parts.pop_front_if(|_| self.next_part <= now)?;
        let pause = Duration::from_secs(1).mul_f64(part.encoded_len() as f64 / BYTES_PER_SECOND as f64);
        self.next_part = now + pause;
        Some(Body::Answer(part))
    }
}

/// The messages of an answer. At least one message: the last.
fn messages(id: u64, answer: NodeAnswer) -> VecDeque<v1::Answer> {
    let part = |kind| v1::Answer { id, part: Some(v1::NodeAnswer { kind: Some(kind) }), ..v1::Answer::default() };
    let checked = answer.and_then(|parts| {
        let parts: VecDeque<v1::Answer> = parts.into_iter().map(part).collect();
        let bytes: usize = parts.iter().map(prost::Message::encoded_len).sum();
        if bytes > MAX_ANSWER_BYTES {
            return Err(format!("the answer has {bytes} bytes, and {MAX_ANSWER_BYTES} are allowed; ask for less"));
        }
        Ok(parts)
    });
    let mut parts = checked.unwrap_or_else(|error| [v1::Answer { id, error, ..v1::Answer::default() }].into());
    match parts.back_mut() {
        Some(last) => last.is_last = true,
        None => parts.push_back(v1::Answer { id, is_last: true, ..v1::Answer::default() }),
    }
    parts
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;

    use super::*;

    /// Answers with the given number of parts of 16 KiB. The prefix of the query is that number.
    #[derive(Debug)]
    struct Parts;

    impl NodeKnowledge for Parts {
        fn answer(&self, query: node_query::Kind) -> BoxFuture<'static, NodeAnswer> {
            let node_query::Kind::Metrics(v1::MetricsQuery { prefix }) = query else {
                return std::future::ready(Err("only metrics".to_owned())).boxed();
            };
            let part = || node_answer::Kind::Metrics(v1::MetricsText { text: "x".repeat(16 << 10) });
            let parts = std::iter::repeat_with(part).take(prefix.parse().unwrap_or(0)).collect();
            std::future::ready(Ok(parts)).boxed()
        }
    }

    fn query(id: u64, kind: Option<node_query::Kind>) -> v1::Query {
        v1::Query { id, query: Some(v1::NodeQuery { kind }) }
    }

    fn parts(id: u64, count: usize) -> v1::Query {
        query(id, Some(node_query::Kind::Metrics(v1::MetricsQuery { prefix: count.to_string() })))
    }

    async fn next(answers: &mut Answers) -> v1::Answer {
        answers.ready().await;
        match answers.pop(Instant::now()) {
            Some(Body::Answer(answer)) => answer,
            other => panic!("not an answer: {other:?}"),
        }
    }

    #[tokio::test]
    async fn parts_are_sent_slowly_and_in_order() {
        let mut answers = Answers::new(Some(Arc::new(Parts)));
        answers.ask(parts(1, 3));
        answers.ask(parts(2, 0));
        let start = Instant::now();
        let mut found = Vec::new();
        for _ in 0..4 {
            let answer = next(&mut answers).await;
            found.push((answer.id, answer.part.is_some(), answer.is_last));
        }
        assert_eq!(found, [(1, true, false), (1, true, false), (1, true, true), (2, false, true)]);
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(375), "3 parts of 16 KiB took {took:?}");
    }

    #[tokio::test]
    async fn queries_that_cannot_be_answered_get_a_reason() {
        let mut answers = Answers::new(Some(Arc::new(Parts)));
        answers.ask(query(1, None));
        assert_eq!(next(&mut answers).await.error, UNKNOWN, "a kind that only newer replicas know");
        answers.ask(parts(2, 64));
        let too_large = next(&mut answers).await;
        assert!(too_large.is_last && too_large.error.contains("ask for less"), "{too_large:?}");
        for id in 3..=3 + MAX_WAITING as u64 {
            answers.ask(parts(id, 1));
        }
        let busy = next(&mut answers).await;
        assert!(busy.id == 7 && busy.error.contains("ask again later"), "{busy:?}");
        let mut without = Answers::new(None);
        without.ask(parts(1, 1));
        assert_eq!(next(&mut without).await.error, UNKNOWN);
    }
}
