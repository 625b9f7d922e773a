//! All services of a replica except the streams of agents: Inspect, Peers, health and reflection
//! over gRPC, and pages over HTTP. The *general server* of [`super::transport`] serves the gRPC
//! requests.

mod fleetwide;
mod inspect;
mod pages;
mod peers;
mod wait;

use std::{future::ready, sync::Arc, time::SystemTime};

use axum::body::Body;
use headgate_proto::{
    FILE_DESCRIPTOR_SET,
    v1::{inspect_server::InspectServer, peers_server::PeersServer},
};
use http::Uri;
use tonic::{
    Request, Status,
    service::{Routes, interceptor::InterceptedService},
};
use tonic_health::ServingStatus;

use self::inspect::Inspector;
pub(crate) use self::pages::serve as serve_pages;
use super::{
    context::{Context, Lifecycle, Warning},
    stream::Streams,
    verification::Verifier,
};
use crate::identity::{Denied, Peer};

/// Longest message of a request to the general server. The messages contain little more than names.
/// The limit is small because the server allocates memory for the whole message as soon as it has
/// read the message's length.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Returns the services of the general server, and starts a task that updates the health service.
/// Fails if the built-in descriptor set is invalid.
pub(crate) async fn routes(streams: &Arc<Streams>) -> Result<Routes, tonic_reflection::server::Error> {
    let context = &streams.context;
    let (reporter, health) = tonic_health::server::health_reporter();
    let names = ["", "headgate.v1.Discovery"];
    for name in names {
        reporter.set_service_status(name, ServingStatus::NotServing).await;
    }
    let (mut source, mut lifecycle) = (context.store.watch_source(), context.lifecycle.subscribe());
    let following = Arc::clone(context);
    tokio::spawn(async move {
        loop {
            source.mark_unchanged();
            lifecycle.mark_unchanged();
            let is_ready = following.unready_reason().is_none();
            let status = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            for name in names {
                reporter.set_service_status(name, status).await;
            }
            let changed = tokio::select! {
                changed = source.changed() => changed,
                changed = lifecycle.changed() => changed,
            };
            if changed.is_err() || *lifecycle.borrow() == Lifecycle::Ended {
                return;
            }
        }
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (fleet, barrier) = (Arc::clone(&streams.fleet), Arc::clone(&streams.barrier));
    let everywhere = Arc::clone(&streams.everywhere);
    let verifier = Verifier::new(Arc::clone(&fleet));
    let overview = Arc::clone(&streams.overview);
    let inspect = InspectServer::new(Inspector { fleet, everywhere, barrier, overview, verifier });
    let inspect = inspect.max_decoding_message_size(MAX_REQUEST_BYTES);
    let (fleet, everywhere) = (Arc::clone(&streams.fleet), Arc::clone(&streams.everywhere));
    let peers = peers::PeerService { fleet, everywhere };
    let peers = PeersServer::new(peers).max_decoding_message_size(MAX_REQUEST_BYTES);
    let reflection_v1 = reflection().build_v1()?.max_decoding_message_size(MAX_REQUEST_BYTES);
    let reflection_v1alpha = reflection().build_v1alpha()?.max_decoding_message_size(MAX_REQUEST_BYTES);
    let port = context.settings.ports.agents.port();
    let elsewhere = move |uri: Uri| {
        let text = format!("{} is not a method on this port; agents connect to port {port}, --listen", uri.path());
        ready(Status::unimplemented(text).into_http::<Body>())
    };
    let routes = Routes::new(InterceptedService::new(inspect, readers_only(context)))
        .add_service(InterceptedService::new(peers, only(context, |peer| peer.may_ask_as_replica(SystemTime::now()))))
        .add_service(health.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(InterceptedService::new(reflection_v1, readers_only(context)))
        .add_service(InterceptedService::new(reflection_v1alpha, readers_only(context)));
    Ok(routes.into_axum_router().fallback(elsewhere).into())
}

/// Returns a filter that rejects requests of clients that may not use Inspect and reflection. The
/// health service has no filter: every client with a trusted certificate may use it.
fn readers_only(context: &Arc<Context>) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let nodes_may_inspect = context.settings.nodes_may_inspect;
    only(context, move |peer| peer.may_inspect(nodes_may_inspect, SystemTime::now()))
}

fn only<F: Fn(&Peer) -> Result<(), Denied> + Clone>(
    context: &Arc<Context>,
    may: F,
) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + use<F> {
    let context = Arc::clone(context);
    move |request| {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.ok_or_else(|| Status::internal("the connection has no peer"))?;
        may(peer).map_err(|denied| {
            context.metrics.requests_denied.of([denied.reason()]).inc();
            if context.warnings.admit(Warning::RequestRefused, tokio::time::Instant::now()) {
                tracing::warn!(address = %peer.address, reason = denied.reason(), %denied, "request refused");
            }
            Status::from(denied)
        })?;
        Ok(request)
    }
}
