//! The way from a replica to the API server, which can be cut.

use std::{
    io::{self, ErrorKind},
    sync::Arc,
};

use futures::stream;
use http::{Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use tokio::sync::watch;

use super::net::Route;
use crate::apiserver::{ApiServer, Body};

/// The way from one replica to the API server. Clones share it.
#[derive(Debug, Clone)]
pub struct WayToApi {
    api: Arc<ApiServer>,
    route: Arc<watch::Sender<Route>>,
}

impl WayToApi {
    /// An open way.
    #[must_use]
    pub fn new(api: Arc<ApiServer>) -> Self {
        Self { api, route: Arc::new(watch::Sender::new(Route::Open)) }
    }

    /// Sets what happens to requests, and to the watches that are open.
    pub fn set(&self, route: Route) {
        self.route.send_replace(route);
    }

    /// A client, as kube makes one for a real server.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        let way = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| way.clone().call(request));
        kube::Client::new(service, "default")
    }

    async fn call(self, request: Request<kube::client::Body>) -> io::Result<Response<Body>> {
        let mut route = self.route.subscribe();
        pass(&mut route).await?;
        let answer = tokio::select! {
            answer = self.api.call(request) => answer?,
            error = refused(&mut route) => return Err(error),
        };
        pass(&mut route).await?;
        let (head, body) = answer.into_parts();
        let pieces = stream::unfold(Some((body, route)), |state| async move {
            let (mut body, mut route) = state?;
            let mut gate = route.clone();
            let frame = tokio::select! {
                frame = body.frame() => frame?,
                error = refused(&mut gate) => Err(error),
            };
            match pass(&mut route).await.and(frame) {
                Ok(frame) => Some((Ok(frame), Some((body, route)))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok(Response::from_parts(head, StreamBody::new(pieces).boxed_unsync()))
    }
}

/// Waits while the way is silent.
async fn pass(route: &mut watch::Receiver<Route>) -> io::Result<()> {
    let route = route.wait_for(|route| *route != Route::Silent).await.map(|route| *route);
    match route {
        Ok(Route::Open) => Ok(()),
        _ => Err(ErrorKind::ConnectionRefused.into()),
    }
}

/// Waits until the way refuses connections.
async fn refused(route: &mut watch::Receiver<Route>) -> io::Error {
    // The sender lives as long as the replica.
    let _ = route.wait_for(|route| *route == Route::Refused).await;
    io::Error::from(ErrorKind::ConnectionReset)
}
