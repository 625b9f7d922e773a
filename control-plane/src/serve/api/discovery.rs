//! The `Discovery` service of the general server ([`crate::serve::transport`]). The general server
//! answers all requests except `Discovery.Sync`. This service answers `Standing`, and refuses other
//! requests.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::Either;
use http::{Method, Request, Response};
use tonic::{Status, body::Body, server::NamedService};
use tower::Service;

use super::standing;
use crate::serve::{fleet::Fleet, stream::SYNC_PATH};

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// The service `headgate.v1.Discovery` of the general server.
#[derive(Clone)]
pub(crate) struct Discovery(pub(crate) Arc<Fleet>);

impl NamedService for Discovery {
    const NAME: &'static str = "headgate.v1.Discovery";
}

impl Service<Request<Body>> for Discovery {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<Ready<Result<Response<Body>, Infallible>>, Answer>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() == standing::PATH {
            return Either::Right(Box::pin(standing::answer(Arc::clone(&self.0), request)));
        }
        Either::Left(ready(Ok(refusal(&request).into_http())))
    }
}

/// Returns the error for a request other than `Standing`. Valid requests for `Sync` never reach
/// this service, because [`crate::serve::transport`] handles them.
fn refusal(request: &Request<Body>) -> Status {
    let path = request.uri().path();
    if path == SYNC_PATH && request.method() == Method::POST {
        return Status::invalid_argument("content-type must be application/grpc");
    }
    Status::unimplemented(format!("{path} is not a method of headgate.v1.Discovery"))
}
