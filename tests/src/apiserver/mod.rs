//! A stand-in Kubernetes API server: real HTTP/1.1 list and watch for the kinds that a service
//! proxy reads, with every fault that a watch can meet behind a switch.
//!
//! [`ApiServer`] runs on a thread of its own, on a loopback port, so that its handle works the same
//! from synchronous and asynchronous tests. Objects are JSON; every write gives a new version from
//! one global counter. What it does follows
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/> and, where that is silent, what
//! `k8s.io/apiserver` does. Over HTTP it serves lists and watches with the options that our watch
//! loop sends, and refuses everything else; objects are written through the handle.
//!
//! [`ApiUnderTest`] puts one face on this server and on a real `kube-apiserver`, so that the same
//! tests can run against both.

mod connection;
mod counters;
mod faults;
mod http;
mod kinds;
pub mod objects;
mod params;
mod real;
mod server;
mod status;
mod store;
mod under_test;
mod watch;

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use serde_json::Value;

use self::{
    counters::Counters,
    faults::{Faults, Order},
    server::Server,
    store::{Store, lock},
};
pub use self::{
    counters::{RecordedRequest, Verb},
    faults::{Cut, RequestFault, RequestFilter},
    kinds::Kind,
    real::{ASSETS_VARIABLE, RealApiServer, RealServerError},
    status::{Failure, failure},
    store::Backup,
    under_test::{ApiUnderTest, ApiUnderTestError},
};

/// What the server does where real ones differ, or where a test needs other times. May change while
/// it runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time between BOOKMARK events on watches that allow them. The real server's is about a
    /// minute.
    pub bookmark_interval: Duration,
    /// Whether watches may ask for `sendInitialEvents`; where false, such a watch gets 422 as from
    /// older servers.
    pub streaming_lists: bool,
    /// Whether Services can be selected by `spec.clusterIP` and `spec.type`; where false, such a
    /// request gets 400.
    pub service_field_selectors: bool,
    /// Whether there are ServiceCIDRs; where false, their paths get 404.
    pub service_cidrs: bool,
    /// Whether a watch from too old a version gets HTTP code 410; where false, 200 and an ERROR
    /// event, as today's servers answer.
    pub gone_as_http_status: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bookmark_interval: Duration::from_secs(60),
            streaming_lists: true,
            service_field_selectors: true,
            service_cidrs: true,
            gone_as_http_status: false,
        }
    }
}

impl Options {
    /// A server of Kubernetes 1.28 to 1.30 with its default feature gates.
    pub fn before_1_31() -> Self {
        Self { streaming_lists: false, service_field_selectors: false, service_cidrs: false, ..Self::default() }
    }
}

/// What a server that starts again still knows.
#[derive(Debug, Clone)]
pub enum Restart {
    /// Everything: watches resume where they were.
    KeepHistory,
    /// The objects, but no history: watches from before get 410.
    LoseHistory,
    /// The objects; versions went on by this much elsewhere, and there is no history.
    RaiseVersions(u64),
    /// The objects and the version counter of a backup, as after a restored etcd: versions go back.
    RestoreBackup(Backup),
}

/// What the handle and the handlers share.
#[derive(Debug)]
struct Shared {
    store: Store,
    faults: Arc<Faults>,
    counters: Arc<Counters>,
    options: Mutex<Options>,
    token_serial: AtomicU64,
    expired_tokens: AtomicU64,
}

impl Shared {
    fn options(&self) -> Options {
        lock(&self.options).clone()
    }

    fn next_token_serial(&self) -> u64 {
        self.token_serial.fetch_add(1, Ordering::Relaxed)
    }

    fn token_is_expired(&self, serial: u64) -> bool {
        serial < self.expired_tokens.load(Ordering::Relaxed)
    }
}

/// The server could not take a loopback port, or could not start its thread.
#[derive(Debug, thiserror::Error)]
#[error("the stand-in API server could not {action}: {source}")]
pub struct StartError {
    action: &'static str,
    source: std::io::Error,
}

/// A condition did not come true in the time that [`ApiServer::wait_until`] grants.
#[derive(Debug, thiserror::Error)]
#[error("gave up waiting until {0}")]
pub struct WaitError(String);

/// A running stand-in; dropping it ends the thread and closes every socket.
pub struct ApiServer {
    shared: Arc<Shared>,
    server: Server,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ApiServer").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Starts an empty server with the default options on a free port of 127.0.0.1.
    pub fn start() -> Result<Self, StartError> {
        Self::start_with(Options::default())
    }

    /// Starts an empty server on a free port of 127.0.0.1.
    pub fn start_with(options: Options) -> Result<Self, StartError> {
        let shared = Arc::new(Shared {
            store: Store::new(),
            faults: Arc::new(Faults::default()),
            counters: Arc::new(Counters::default()),
            options: Mutex::new(options),
            token_serial: AtomicU64::new(0),
            expired_tokens: AtomicU64::new(0),
        });
        let server = Server::start(shared.clone())?;
        Ok(Self { shared, server })
    }

    /// Where it listens; the same across restarts.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// The text of a kubeconfig file that leads here, without credentials.
    pub fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: stand-in\nclusters:\n- name: stand-in\n  cluster:\n    server: {}\n\
             contexts:\n- name: stand-in\n  context:\n    cluster: stand-in\n    user: tester\nusers:\n- name: tester\n  user: {{}}\n",
            self.url()
        )
    }

    /// Changes options from now on.
    pub fn set_options(&self, change: impl FnOnce(&mut Options)) {
        let mut options = self.shared.options();
        change(&mut options);
        *lock(&self.shared.options) = options;
        self.shared.store.ring();
    }
}

/// Objects.
impl ApiServer {
    /// Creates or replaces an object and gives it back as stored. A write that changes nothing
    /// makes no event. Fails for an unknown kind and without a name.
    pub fn apply(&self, object: Value) -> Result<Value, Failure> {
        Ok((*self.shared.store.apply(object)?).clone())
    }

    /// Deletes an object and gives back its last state; 404 if there is none. The namespace of a
    /// cluster-scoped kind is ignored.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<Value, Failure> {
        Ok((*self.shared.store.delete(kind, namespace, name)?).clone())
    }

    /// One object as stored.
    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        Some((*self.shared.store.get(kind, namespace, name)?).clone())
    }

    /// Every object of a kind, ordered by namespace and name.
    pub fn list(&self, kind: Kind) -> Vec<Value> {
        let listed = self.shared.store.list(kind, None).map(|(_, objects)| objects);
        listed.unwrap_or_default().into_values().map(|object| (*object).clone()).collect()
    }

    /// The resourceVersion of the last write of any kind.
    pub fn version(&self) -> u64 {
        self.shared.store.version()
    }

    /// Drops the history: watches, exact reads and continue tokens from before now get 410. Watches
    /// already open lose nothing.
    pub fn compact(&self) {
        self.shared.store.compact();
    }

    /// Makes every continue token given out so far answer 410.
    pub fn expire_continue_tokens(&self) {
        let issued = self.shared.token_serial.load(Ordering::Relaxed);
        self.shared.expired_tokens.store(issued, Ordering::Relaxed);
    }

    /// Copies objects and version counter, for [`Restart::RestoreBackup`].
    pub fn backup(&self) -> Backup {
        self.shared.store.backup()
    }
}

/// Faults. `kind: None` means every kind; what is returned is how many open watches were told. A
/// watch obeys between the writes made before the call, which it sends first unless its kind is
/// blocked, and those made after it.
impl ApiServer {
    /// The next `count` requests that the filter lets through meet the fault.
    pub fn fail_next(&self, count: u64, filter: RequestFilter, fault: RequestFault) {
        self.shared.faults.add_rule(filter, fault, count);
    }

    /// Requests meet the fault until [`Self::clear_faults`].
    pub fn fail_all(&self, filter: RequestFilter, fault: RequestFault) {
        self.fail_next(u64::MAX, filter, fault);
    }

    /// Removes every request fault, lets stalled requests go on and releases blocked kinds.
    pub fn clear_faults(&self) {
        self.shared.faults.clear();
        self.shared.store.ring();
    }

    /// Ends watches cleanly, as a time-out does.
    pub fn drop_watches(&self, kind: Option<Kind>) -> usize {
        self.order(kind, &Order::Close)
    }

    /// Sends half an event at once, then cuts the connection.
    pub fn cut_watches(&self, kind: Option<Kind>, how: Cut) -> usize {
        self.order(kind, &Order::CutNow(how))
    }

    /// When the next event is due, sends half of it and cuts the connection.
    pub fn cut_watches_on_next_event(&self, kind: Option<Kind>, how: Cut) -> usize {
        self.order(kind, &Order::CutOnNextEvent(how))
    }

    /// Sends bytes as they are (add the newline that ends a line) and goes on with the watch.
    pub fn send_garbage(&self, kind: Option<Kind>, bytes: impl Into<Bytes>) -> usize {
        self.order(kind, &Order::Raw(bytes.into()))
    }

    /// Sends an ERROR event with this object, then ends the watch. See [`failure`] for ready Status
    /// bodies.
    pub fn send_error_event(&self, kind: Option<Kind>, status: Value) -> usize {
        self.order(kind, &Order::Error(status))
    }

    /// Tells open watches that their version is too old (an ERROR event with code 410), then ends
    /// them. Together with [`Self::compact`] resuming fails as well.
    pub fn expire_watches(&self, kind: Option<Kind>) -> usize {
        let status = status::too_old(self.version(), self.version()).body;
        self.order(kind, &Order::Error(status))
    }

    /// Sends a BOOKMARK event on watches that allow them, after every event before it.
    pub fn send_bookmarks(&self, kind: Option<Kind>) -> usize {
        self.order(kind, &Order::Bookmark)
    }

    fn order(&self, kind: Option<Kind>, order: &Order) -> usize {
        let told = self.shared.faults.order(kind, order, self.version());
        self.shared.store.ring();
        told
    }

    /// Holds back every event of a kind, initial ones and bookmarks too, until [`Self::release`].
    /// Lists and writes go on.
    pub fn block(&self, kind: Kind) {
        self.shared.faults.set_blocked(kind, true);
    }

    /// Lets the events held back go out.
    pub fn release(&self, kind: Kind) {
        self.shared.faults.set_blocked(kind, false);
        self.shared.store.ring();
    }

    /// Cuts every connection and refuses new ones. The port stays reserved. Does nothing if already
    /// stopped.
    pub fn stop(&self) {
        self.server.stop();
    }

    /// Listens again on the same port, after stopping first if that was not done. Fails if the port
    /// cannot be listened on.
    pub fn restart(&self, restart: &Restart) -> Result<(), StartError> {
        self.stop();
        match restart {
            Restart::KeepHistory => {}
            Restart::LoseHistory => self.shared.store.raise_version(0),
            Restart::RaiseVersions(by) => self.shared.store.raise_version(*by),
            Restart::RestoreBackup(backup) => self.shared.store.restore(backup),
        }
        self.server.listen()
    }
}

/// Counters; they run on across restarts.
impl ApiServer {
    /// How many requests of a verb came, of one kind or of all.
    pub fn requests(&self, verb: Verb, kind: Option<Kind>) -> u64 {
        self.shared.counters.requests(verb, kind)
    }

    /// Every request so far, in order, query strings included.
    pub fn recorded(&self) -> Vec<RecordedRequest> {
        self.shared.counters.recorded()
    }

    /// How many watches are open now, of one kind or of all.
    pub fn open_watches(&self, kind: Option<Kind>) -> usize {
        self.shared.faults.open_watches(kind)
    }

    /// Bytes written to sockets, headers included.
    pub fn bytes_sent(&self) -> u64 {
        self.shared.counters.bytes_sent()
    }

    /// Connections accepted.
    pub fn connections(&self) -> u64 {
        self.shared.counters.connections()
    }

    /// Waits until a condition holds, looking every few milliseconds; gives up after half a minute.
    /// `what` ends the sentence "gave up waiting until …".
    pub async fn wait_until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) -> Result<(), WaitError> {
        let until = tokio::time::Instant::now() + Duration::from_secs(30);
        while !condition(self) {
            if tokio::time::Instant::now() > until {
                return Err(WaitError(what.to_owned()));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
