//! A stand-in Kubernetes API server for tests. It serves list and watch over HTTP/1.1 for the kinds
//! that a service proxy reads. Tests can inject faults into its answers and its connections.
//!
//! [`ApiServer`] runs on its own thread and a loopback port. Synchronous and asynchronous tests can
//! use its handle. Objects are JSON, and every write gets a new version from one global counter.
//! The server follows <https://kubernetes.io/docs/reference/using-api/api-concepts/> and, for
//! details, the code of `k8s.io/apiserver`. Over HTTP it accepts only what Headgate sends: lists
//! and watches with the options of its watch loop, reads of single objects, reviews of tokens,
//! patches of the conditions of pods, and what `headgatectl migrate run` and `cleanup` write. Tests
//! write objects through the handle.
//!
//! [`ApiUnderTest`] is a common interface to this server and to a real `kube-apiserver`, so that
//! tests can run against both.

mod faults;
mod http;
mod kinds;
pub mod objects;
mod real;
mod rights;
mod server;
mod state;
mod status;
mod tokens;
mod under_test;
mod watch;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::ensure;
use serde_json::Value;

pub use self::{
    faults::{Cut, Order, RecordedRequest, RequestFault, RequestFilter, Verb},
    http::Body,
    kinds::Kind,
    real::{ASSETS_VARIABLE, RealApiServer},
    rights::Rights,
    status::{Failure, failure},
    tokens::Token,
    under_test::{ApiUnderTest, client},
};
use self::{
    server::Server,
    state::{Shared, State, key},
};

/// Options for behaviour that differs between versions of the real server, and for intervals. Tests
/// may change the options while the server runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The time between BOOKMARK events on watches that allow them. A real server sends a bookmark
    /// about every minute.
    pub bookmark_interval: Duration,
    /// Whether watches get bookmarks, apart from the one at the end of a streaming list. A real
    /// server sends no bookmark to a watch of a kind for which etcd reports no progress.
    pub bookmarks: bool,
    /// Whether watches may ask for `sendInitialEvents`. If false, the server answers such a watch
    /// with 422, like older servers.
    pub streaming_lists: bool,
    /// Whether requests may select Services by `spec.clusterIP`. If false, such a request gets 400.
    pub service_field_selectors: bool,
    /// Whether the server has ServiceCIDRs. If false, their paths get 404.
    pub service_cidrs: bool,
    /// The rights of clients. Other requests get 403. With `None`, clients may do everything.
    pub rights: Option<Rights>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bookmark_interval: Duration::from_secs(60),
            bookmarks: true,
            streaming_lists: true,
            service_field_selectors: true,
            service_cidrs: true,
            rights: None,
        }
    }
}

impl Options {
    /// Options of a Kubernetes 1.28 to 1.30 server with default feature gates.
    pub fn before_1_31() -> Self {
        Self { streaming_lists: false, service_field_selectors: false, service_cidrs: false, ..Self::default() }
    }
}

/// The data that a server still has after a restart.
#[derive(Debug, Clone)]
pub enum Restart {
    /// The objects and the history. Watches can resume at their versions.
    KeepHistory,
    /// The objects, without the history. Watches from earlier versions get 410.
    LoseHistory,
    /// The objects, without the history. The version counter is raised by this number.
    RaiseVersions(u64),
}

/// A running stand-in API server. Dropping it ends its thread and closes all sockets.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    server: Server,
}

impl ApiServer {
    /// Starts an empty server with the default options on a free port of 127.0.0.1.
    pub fn start() -> io::Result<Self> {
        Self::start_with(Options::default())
    }

    /// Starts an empty server on a free port of 127.0.0.1.
    pub fn start_with(options: Options) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(options));
        Ok(Self { server: Server::start(&shared)?, shared })
    }

    /// An empty server without a port, for clients in the same process.
    pub fn without_port() -> Self {
        Self { shared: Arc::new(Shared::new(Options::default())), server: Server::without_port() }
    }

    /// Answers a request of a client in the same process.
    ///
    /// # Errors
    /// A fault cuts the connection.
    pub fn call<B>(
        &self,
        request: ::http::Request<B>,
    ) -> impl Future<Output = io::Result<::http::Response<Body>>> + use<B>
    where
        B: hyper::body::Body,
        B::Error: std::fmt::Display,
    {
        self::http::answer(Arc::clone(&self.shared), None, request)
    }

    /// The server's address and port. A restart does not change them.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// The text of a kubeconfig file for this server, without credentials.
    pub fn kubeconfig(&self) -> String {
        kubeconfig(&self.url(), "", "")
    }

    /// Changes the options.
    pub fn set_options(&self, change: impl FnOnce(&mut Options)) {
        self.shared.change(|state| change(&mut state.options));
    }
}

/// The text of a kubeconfig file, with further lines for the cluster and the user.
fn kubeconfig(url: &str, cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: tests\nclusters:\n- name: tests\n  cluster:\n    server: {url}\n\
         {cluster}contexts:\n- name: tests\n  context:\n    cluster: tests\n    user: tester\nusers:\n- name: tester\n  \
         user: {{{user}}}\n"
    )
}

/// Methods that read and write objects.
impl ApiServer {
    /// Creates or replaces an object, and returns it as stored. A write without a change causes no
    /// event.
    ///
    /// # Errors
    /// The object has an unknown kind or no name.
    pub fn apply(&self, object: Value) -> Result<Value, Failure> {
        Ok((*self.shared.change(|state| state.apply(object))?).clone())
    }

    /// Issues a service-account token, which TokenReviews confirm.
    pub fn issue_token(&self, token: Token) -> String {
        self.shared.change(|state| state.tokens.issue(token))
    }

    /// Deletes an object, and returns its last state. The namespace is ignored for cluster-scoped
    /// kinds.
    ///
    /// # Errors
    /// 404 if the object does not exist.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<Value, Failure> {
        Ok((*self.shared.change(|state| state.delete(kind, key(kind, namespace, name)))?).clone())
    }

    /// Returns an object as stored; `None` if it does not exist.
    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.look(|state| state.get(kind, &key(kind, namespace, name)).map(|object| (*object).clone()))
    }

    /// Returns all objects of a kind, ordered by namespace and name.
    pub fn list(&self, kind: Kind) -> Vec<Value> {
        self.look(|state| state.of_kind(kind).map(|(_, object)| (**object).clone()).collect())
    }

    /// The resourceVersion of the last write of any kind.
    pub fn version(&self) -> u64 {
        self.look(|state| state.version)
    }

    /// Drops the history. New watches, exact reads and continue tokens of earlier versions get 410.
    /// Open watches still get all their events.
    pub fn compact(&self) {
        self.shared.change(State::compact);
    }

    /// Expires all continue tokens issued so far. Requests with them get 410.
    pub fn expire_continue_tokens(&self) {
        self.shared.change(|state| state.expired_tokens = state.token_serial);
    }

    fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.shared.lock())
    }
}

/// Methods that cause faults. `kind: None` means every kind. [`Self::order`] returns the number of
/// watches that get the order. A watch first sends the events of all writes that preceded the call,
/// and then executes the order. A watch whose kind is blocked executes it at once, without sending
/// these events.
impl ApiServer {
    /// Applies the fault to the next `count` requests that match the filter.
    pub fn fail_next(&self, count: u64, filter: RequestFilter, fault: RequestFault) {
        self.shared.change(|state| state.rules.push((filter, fault, count)));
    }

    /// Applies the fault to all requests that match the filter, until [`Self::clear_faults`].
    pub fn fail_all(&self, filter: RequestFilter, fault: RequestFault) {
        self.fail_next(u64::MAX, filter, fault);
    }

    /// Removes all request faults, continues stalled requests and releases blocked kinds.
    pub fn clear_faults(&self) {
        self.shared.change(State::clear_faults);
    }

    /// Gives an order to open watches.
    pub fn order(&self, kind: Option<Kind>, order: &Order) -> usize {
        self.shared.change(|state| state.order(kind, order))
    }

    /// Holds back all events of a kind, including initial events and bookmarks, until
    /// [`Self::release`]. Lists and writes still work. A real server behaves in this way if its
    /// watch cache is stuck, because it then reads lists from etcd.
    pub fn block(&self, kind: Kind) {
        self.shared.change(|state| state.blocked.insert(kind));
    }

    /// Like [`Self::block`]. In addition, watches do not end at their time limits, as if a proxy
    /// kept dead connections open.
    pub fn freeze(&self, kind: Kind) {
        self.shared.change(|state| state.endless.insert(kind));
        self.block(kind);
    }

    /// Ends [`Self::block`] and [`Self::freeze`], and sends the events that they held back.
    pub fn release(&self, kind: Kind) {
        self.shared.change(|state| (state.blocked.remove(&kind), state.endless.remove(&kind)));
    }

    /// Cuts all connections and refuses new connections. The port stays reserved. Does nothing if
    /// the server is stopped.
    pub fn stop(&self) {
        self.server.stop();
    }

    /// Stops the server if it runs, and listens again on its port.
    ///
    /// # Errors
    /// The server cannot listen on its port.
    pub fn restart(&self, restart: &Restart) -> io::Result<()> {
        self.stop();
        self.reload(restart);
        self.server.listen(&self.shared)
    }

    /// Changes the data as a restart does.
    pub fn reload(&self, restart: &Restart) {
        self.shared.change(|state| match restart {
            Restart::KeepHistory => {}
            Restart::LoseHistory => state.compact(),
            Restart::RaiseVersions(by) => {
                state.version += by;
                state.compact();
            }
        });
    }
}

/// Methods that read what the server has seen, also before a restart.
impl ApiServer {
    /// The number of requests with a verb, for one kind or for all kinds.
    pub fn requests(&self, verb: Verb, kind: Option<Kind>) -> u64 {
        let filter = RequestFilter { verb: Some(verb), kind };
        self.look(|state| state.recorded.iter().filter(|seen| filter.matches(seen.verb, seen.kind)).count() as u64)
    }

    /// All requests so far, in order, with their query strings.
    pub fn recorded(&self) -> Vec<RecordedRequest> {
        self.look(|state| state.recorded.clone())
    }

    /// The number of open watches, for one kind or for all kinds.
    pub fn open_watches(&self, kind: Option<Kind>) -> usize {
        self.look(|state| state.watches.values().filter(|watch| kind.is_none_or(|kind| kind == watch.kind)).count())
    }

    /// Waits until a condition holds, and checks it every few milliseconds. `what` completes the
    /// error message "gave up waiting until …".
    ///
    /// # Errors
    /// The condition does not hold after 30 seconds.
    pub async fn wait_until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) -> anyhow::Result<()> {
        let until = tokio::time::Instant::now() + Duration::from_secs(30);
        while !condition(self) {
            ensure!(tokio::time::Instant::now() < until, "gave up waiting until {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
