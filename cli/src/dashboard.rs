//! `headgatectl dashboard`: a page on this machine that shows what every node forwards.
//!
//! The server listens only on 127.0.0.1, and asks a replica with the rights of the user. It answers
//! only its own page ([`guard`]).

mod ask;
mod fleet;
mod guard;
mod rows;
mod table;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::{Method, Request, Response, StatusCode, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use self::fleet::Shared;
use self::guard::Guard;
use self::table::Services;
use crate::answer::{Failure, Session};
use crate::args::{Args, Output};

/// The most connections at a time. A browser opens at most 6.
const MAX_CONNECTIONS: usize = 32;
/// The most questions to the replica at a time.
const MAX_QUESTIONS: usize = 8;
/// The most bytes of a question.
const MAX_BODY_BYTES: usize = 4096;
/// How long a browser may take to send the headers of a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(200);

/// The files of the page, with their types.
const FILES: [(&str, &str, &str); 10] = [
    ("/", "text/html; charset=utf-8", include_str!("dashboard/index.html")),
    ("/style.css", "text/css; charset=utf-8", include_str!("dashboard/style.css")),
    ("/main.js", "text/javascript; charset=utf-8", include_str!("dashboard/main.js")),
    ("/model.js", "text/javascript; charset=utf-8", include_str!("dashboard/model.js")),
    ("/words.js", "text/javascript; charset=utf-8", include_str!("dashboard/words.js")),
    ("/map.js", "text/javascript; charset=utf-8", include_str!("dashboard/map.js")),
    ("/panels.js", "text/javascript; charset=utf-8", include_str!("dashboard/panels.js")),
    ("/services.js", "text/javascript; charset=utf-8", include_str!("dashboard/services.js")),
    ("/drawer.js", "text/javascript; charset=utf-8", include_str!("dashboard/drawer.js")),
    ("/ask.js", "text/javascript; charset=utf-8", include_str!("dashboard/ask.js")),
];

/// The browser loads nothing from elsewhere, runs no other script, and shows the page in no frame.
const HEADERS: [(&str, &str); 5] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
         frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
    ("cross-origin-resource-policy", "same-origin"),
];

type Answer = Response<Either<Full<Bytes>, Lines>>;

/// The lines of a stream, as they come.
struct Lines(mpsc::Receiver<Bytes>);

impl Body for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

struct Server {
    guard: Guard,
    fleet: Shared,
    services: Services,
    questions: Semaphore,
}

/// Serves the page until the program ends.
pub(crate) async fn run(args: &Args, port: u16, out: &mut dyn Write) -> Result<(), Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    let listener = listener.map_err(|error| Failure::Faulty(format!("--port {port}: {error}: choose another port")))?;
    let guard = listener.local_addr().and_then(|address| Guard::new(address.port()));
    let guard = guard.map_err(|error| Failure::Faulty(format!("the page cannot be served: {error}")))?;
    // The URL is printed, and no browser is started: other users can read the arguments of
    // processes, and the URL has the token.
    writeln!(out, "{}\nOpen this address in a browser on this machine. Ctrl-C ends the page.", guard.url())?;
    out.flush()?;
    let (fleet, questions) = (Shared::default(), Semaphore::new(MAX_QUESTIONS));
    let server = Rc::new(Server { guard, fleet: Rc::clone(&fleet), services: Services::default(), questions });
    let serving = LocalSet::new();
    serving.run_until(async { tokio::join!(fleet::follow(&fleet, args), accept(&server, &listener)) }).await;
    Ok(())
}

async fn accept(server: &Rc<Server>, listener: &TcpListener) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let place = Arc::clone(&room).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            // The system lacks files.
            sleep(RETRY).await;
            continue;
        };
        let server = Rc::clone(server);
        spawn_local(async move {
            let answer = service_fn(|request| {
                let server = Rc::clone(&server);
                async move { Ok::<_, Infallible>(server.answer(request).await) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            // A browser that closes its connection is no error.
            let _ = http.serve_connection(TokioIo::new(stream), answer).await;
            drop(place);
        });
    }
}

fn response(status: StatusCode, kind: &'static str, body: Either<Full<Bytes>, Lines>) -> Answer {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    for (name, value) in HEADERS.into_iter().chain([("content-type", kind)]) {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Answer {
    response(status, "text/plain; charset=utf-8", Either::Left(Full::new(text.into())))
}

fn json(value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string()));
    response(StatusCode::OK, "application/json", Either::Left(body))
}

fn failed(failure: &Failure) -> Answer {
    let status = if matches!(failure, Failure::NotFound(_)) { StatusCode::NOT_FOUND } else { StatusCode::BAD_GATEWAY };
    text(status, failure.to_string())
}

impl Server {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let is_api = path.starts_with("/api/");
        if let Err((status, reason)) = self.guard.check(request.headers(), is_api) {
            return text(status, reason);
        }
        if is_api {
            return self.api(&path, request).await;
        }
        match FILES.iter().find(|(name, ..)| *name == path) {
            Some((_, kind, file)) if request.method() == Method::GET => {
                response(StatusCode::OK, kind, Either::Left(Full::new(Bytes::from_static(file.as_bytes()))))
            }
            Some(_) => text(StatusCode::METHOD_NOT_ALLOWED, "only GET"),
            None => text(StatusCode::NOT_FOUND, "there is no such file"),
        }
    }

    async fn api(&self, path: &str, request: Request<Incoming>) -> Answer {
        let parts: Vec<&str> = path.split('/').skip(2).collect();
        let is_question = parts.first() == Some(&"ask");
        if *request.method() != if is_question { Method::POST } else { Method::GET } {
            return text(StatusCode::METHOD_NOT_ALLOWED, "wrong method");
        }
        if parts == ["stream"] {
            let lines = Lines(self.fleet.borrow_mut().open());
            return response(StatusCode::OK, "application/x-ndjson", Either::Right(lines));
        }
        let Ok(_permit) = self.questions.try_acquire() else {
            return text(StatusCode::TOO_MANY_REQUESTS, "too many questions wait for an answer");
        };
        let replica = self.fleet.borrow().replica();
        let mut replica = match replica {
            Ok(replica) => replica,
            Err(problem) => return text(StatusCode::SERVICE_UNAVAILABLE, problem),
        };
        if let ["ask", command] = parts[..] {
            let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await;
            let fields = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
            let fields: BTreeMap<String, Value> = match fields {
                Some(fields) => fields,
                None => return text(StatusCode::BAD_REQUEST, "the question is no JSON object, or too long"),
            };
            return match ask::run(replica, command, &fields).await {
                Some(answer) => json(&answer),
                None => text(StatusCode::NOT_FOUND, "the page does not run this command"),
            };
        }
        let listed = match (&parts[..], serde_urlencoded::from_str(request.uri().query().unwrap_or_default())) {
            (["services"], Ok(query)) => Some(self.services.answer(&mut replica, &query).await),
            _ => None,
        };
        let mut sink = io::sink();
        let mut session = Session::new(replica, Output::Json, &mut sink);
        let answer = match (listed, &parts[..]) {
            (Some(listed), _) => listed.map_err(|status| session.refused(&status)),
            (None, ["services", namespace, name]) => ask::service(&mut session, namespace, name).await,
            (None, ["nodes", name]) => ask::card(&mut session, name).await,
            _ => return text(StatusCode::NOT_FOUND, "there is no such question"),
        };
        answer.map_or_else(|failure| failed(&failure), |answer| json(&answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_only_files_of_the_server() {
        for (name, _, file) in FILES {
            assert!(!file.contains("http://") && !file.contains("https://"), "{name} names another server");
        }
        let module =
            |line: &str| line.split_once(" from './").and_then(|(_, rest)| Some(rest.split_once('\'')?.0.to_owned()));
        for wanted in FILES.iter().flat_map(|(.., file)| file.lines().filter_map(module)) {
            assert!(FILES.iter().any(|(name, ..)| *name == format!("/{wanted}")), "{wanted} is not served");
        }
    }

    #[test]
    fn the_page_keeps_its_budget() {
        let lines: usize = FILES.iter().map(|(.., file)| file.lines().count()).sum();
        assert!(lines <= 1500, "the page has {lines} lines");
    }
}
