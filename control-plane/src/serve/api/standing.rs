//! `Discovery.Standing`: the state of this replica, for agents of other replicas that look for a
//! better replica (discovery.proto, section 15).
//!
//! An answer is cheap: it reads a few numbers. A request names a node, and the client must be
//! allowed to open a stream for this node. Each request counts against the node's limit of new
//! streams.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::Arc,
    time::{Instant, SystemTime},
};

use futures::future::{Ready, ready};
use headgate_core::{dns_name::check_subdomain, node_state::SourceState};
use headgate_proto::v1;
use http::{Request, Response};
use tonic::{
    Status,
    body::Body,
    server::{Grpc, UnaryService},
};
use tonic_prost::ProstCodec;

use super::MAX_REQUEST_BYTES;
use crate::{
    identity::Peer,
    serve::{
        context::{Lifecycle, milliseconds},
        fleet::Fleet,
    },
    store::positions_to_wire,
    transaction::SourceKind,
};

/// The path of the method.
pub(crate) const PATH: &str = "/headgate.v1.Discovery/Standing";

/// Answers a request.
pub(crate) async fn answer(fleet: Arc<Fleet>, request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let codec = ProstCodec::<v1::StandingResponse, v1::StandingRequest>::default();
    let mut grpc = Grpc::new(codec).apply_max_message_size_config(Some(MAX_REQUEST_BYTES), None);
    Ok(grpc.unary(Method(fleet), request).await)
}

struct Method(Arc<Fleet>);

impl UnaryService<v1::StandingRequest> for Method {
    type Response = v1::StandingResponse;
    type Future = Ready<Result<tonic::Response<Self::Response>, Status>>;

    fn call(&mut self, request: tonic::Request<v1::StandingRequest>) -> Self::Future {
        ready(standing(&self.0, &request).map(tonic::Response::new))
    }
}

fn standing(fleet: &Fleet, request: &tonic::Request<v1::StandingRequest>) -> Result<v1::StandingResponse, Status> {
    let context = &fleet.context;
    let peer = request.extensions().get::<Peer>();
    let peer = peer.ok_or_else(|| Status::internal("the connection has no peer"))?;
    let node = &request.get_ref().node_name;
    check_subdomain(node).map_err(|problem| Status::invalid_argument(format!("node_name: {problem}")))?;
    peer.may_follow(node, SystemTime::now()).map_err(|denied| {
        context.metrics.count_request_denied(denied.reason());
        Status::from(denied)
    })?;
    if !fleet.may_open(node, Instant::now()) {
        context.metrics.count_request_denied("too_many_requests");
        return Err(Status::resource_exhausted(format!(
            "node {node} sends too many requests; wait some seconds before the next request"
        )));
    }
    let store = &context.store;
    let is_serving = context.lifecycle() == Lifecycle::Serving;
    let source = if is_serving { store.source_state_for_others() } else { SourceState::Unlisted };
    // The answer has only positions that can be compared between replicas.
    let comparable = |positions: BTreeMap<SourceKind, u64>| {
        positions_to_wire(positions.into_iter().filter(|(kind, _)| kind.is_comparable()))
    };
    Ok(v1::StandingResponse {
        replica: context.settings.replica_name.clone(),
        epoch: store.epoch(),
        source_state: v1::SourceState::from(source).into(),
        source_age_ms: milliseconds(store.source_age()),
        positions: comparable(store.positions()),
        changed_positions: comparable(store.changed_positions()),
    })
}
