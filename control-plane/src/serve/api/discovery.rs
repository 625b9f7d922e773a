//! `Discovery` as a raw tower service: the response body of `Sync` consists of encoded messages
//! that all streams share.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::Either;
use headgate_proto::{MAX_AGENT_MESSAGE_BYTES, v1};
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::StreamBody;
use tonic::{
    Status, Streaming,
    body::Body,
    codec::{Codec as _, Decoder},
    server::NamedService,
};
use tonic_prost::ProstCodec;
use tower::Service;

use super::standing;
use crate::{
    identity::Peer,
    serve::{
        stream::{self, SYNC_PATH, Streams},
        transport::is_grpc,
    },
};

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// See the module.
#[derive(Clone)]
pub(crate) struct Discovery(pub(crate) Arc<Streams>);

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
            return Either::Right(Box::pin(standing::answer(Arc::clone(&self.0.fleet), request)));
        }
        Either::Left(ready(Ok(self.sync(request).unwrap_or_else(Status::into_http))))
    }
}

impl Discovery {
    fn sync(&self, request: Request<Body>) -> Result<Response<Body>, Status> {
        if request.uri().path() != SYNC_PATH || request.method() != Method::POST {
            return Err(Status::unimplemented(format!(
                "{} is not a method of headgate.v1.Discovery",
                request.uri().path()
            )));
        }
        if !is_grpc(request.headers().get(header::CONTENT_TYPE)) {
            return Err(Status::invalid_argument("content-type must be application/grpc"));
        }
        let peer = request.extensions().get::<Peer>().cloned();
        let peer = peer.ok_or_else(|| Status::internal("the connection has no peer"))?;
        let requests = Streaming::new_request(decoder(), request.into_body(), None, Some(MAX_AGENT_MESSAGE_BYTES));
        let frames = stream::frames(Arc::clone(&self.0), peer, requests);
        let mut response = Response::new(Body::new(StreamBody::new(frames)));
        response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
        Ok(response)
    }
}

fn decoder() -> impl Decoder<Item = v1::AgentMessage, Error = Status> + Send + 'static {
    ProstCodec::<v1::ServerMessage, v1::AgentMessage>::default().decoder()
}
