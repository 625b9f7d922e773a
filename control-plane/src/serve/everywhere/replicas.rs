//! The other replicas: who they are, which nodes they know, and their answers to questions
//! (discovery.proto, section 18). One stream to each replica carries all this. The addresses of
//! replicas and API servers are reserved.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use headgate_core::{Protocol, ServiceKey, check_subdomain, node_state::SourceState};
use headgate_listener::{Carrier, connector, name_servers, resolve};
use headgate_proto::{
    address_to_wire,
    v1::{self, inspect_client::InspectClient, peers_client::PeersClient},
};
use headgate_tls::{Files, Side, entries_of_replica, explain};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout, timeout_at},
};
use tokio_rustls::TlsConnector;
use tokio_util::io::{ReaderStream, StreamReader};
use tonic::transport::{Channel, Endpoint, Uri};

use super::here::Question;
use crate::{
    serve::{
        context::{Context, PeerSettings, Ports, milliseconds},
        fleet::{Departed, Fleet, clip},
        tls::ServerTls,
    },
    store::positions_to_wire,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A replica that does not answer a keepalive in this time has vanished.
const KEEPALIVE: Duration = Duration::from_secs(3);

/// The pause before the next attempt to connect.
const PAUSE: Duration = Duration::from_millis(500);

/// How long the answer may take after the end of its wait.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// The pause between two looks at the names and addresses of replicas, and at departed nodes.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum size of a message: the names of all nodes.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The maximum number of nodes that another replica may name, departed ones included.
const MAX_NAMED: usize = 1 << 18;

/// The maximum number of vanished replicas that are remembered.
const MAX_VANISHED: usize = 256;

/// The maximum number of replicas that are announced to agents.
const MAX_ANNOUNCED: usize = 64;

/// The links to the other replicas, and the memory of those that are gone.
pub(crate) struct Replicas {
    fleet: Arc<Fleet>,
    settings: PeerSettings,
    known: Mutex<KnownReplicas>,
    /// Where agents reach all replicas, this one first.
    pub(super) announced: watch::Sender<Arc<[String]>>,
    /// Grows when a replica joins or vanishes, and with each change of a roster.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct KnownReplicas {
    links: HashMap<SocketAddr, (Arc<Link>, AbortHandle)>,
    /// Replicas that vanished, by epoch: their names, and when.
    vanished: HashMap<u64, (String, Instant)>,
    /// Replicas that have joined this one, by epoch, and how many streams of each are open.
    callers: HashMap<u64, usize>,
    /// Why a name of `--peers` does not resolve. At first, no name has been resolved.
    resolve_problem: Option<String>,
}

impl KnownReplicas {
    /// Forgets the replicas that vanished longer than `time` ago, and the oldest ones beyond
    /// [`MAX_VANISHED`].
    fn forget_vanished(&mut self, time: Duration) {
        self.vanished.retain(|_, (_, at)| at.elapsed() < time);
        while self.vanished.len() > MAX_VANISHED
            && let Some(oldest) = self.vanished.iter().min_by_key(|(_, (_, at))| *at).map(|(epoch, _)| *epoch)
        {
            self.vanished.remove(&oldest);
        }
    }
}

/// The stream to one address. It is joined once the roster of the replica has arrived.
pub(crate) struct Link {
    pub(crate) address: SocketAddr,
    state: Mutex<LinkState>,
    /// Where agents reach the replica; `None` until it has joined once.
    agents: Mutex<Option<SocketAddr>>,
    /// The number of the roster.
    number: watch::Sender<u64>,
}

enum LinkState {
    /// No attempt to join has ended yet.
    Untried,
    /// The address is this replica itself.
    Own,
    Joined(Joined),
    /// The reason.
    Apart(String),
}

/// A replica that has joined, with a copy of its roster.
pub(crate) struct Joined {
    pub(crate) identity: v1::PeerIdentity,
    pub(crate) since: Instant,
    /// The latest time at which the replica may have started.
    started: Instant,
    is_incomplete: bool,
    pub(crate) nodes: HashMap<Arc<str>, (u64, Option<Departed>)>,
    channel: Channel,
}

impl Replicas {
    pub(super) fn new(fleet: Arc<Fleet>, settings: PeerSettings) -> Arc<Self> {
        let has_others = !settings.names.is_empty() || settings.service.is_some();
        let resolve_problem = has_others.then(|| "the names are not resolved yet".to_owned());
        let known = Mutex::new(KnownReplicas { resolve_problem, ..KnownReplicas::default() });
        let announced = watch::Sender::new([fleet.context.settings.ports.agents.to_string()].into());
        Arc::new(Self { fleet, settings, known, announced, changes: watch::Sender::new(0) })
    }

    fn known(&self) -> MutexGuard<'_, KnownReplicas> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The addresses to which the names lead.
    fn addresses(&self) -> Vec<SocketAddr> {
        self.known().links.keys().copied().collect()
    }

    /// The links to all addresses, except the own one.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        let links = self.known().links.values().map(|(link, _)| Arc::clone(link)).collect::<Vec<_>>();
        links.into_iter().filter(|link| !matches!(*link.state(), LinkState::Own)).collect()
    }

    /// The replicas that vanished within the last `time`, by name, and since when.
    pub(crate) fn vanished(&self, time: Duration) -> Vec<(u64, String, Instant)> {
        let known = self.known();
        let recent = known.vanished.iter().filter(|(_, (_, at))| at.elapsed() < time);
        recent.map(|(epoch, (name, at))| (*epoch, name.clone(), *at)).collect()
    }

    /// Why replicas may be missing; empty if all are joined for `time`, and none vanished in it.
    pub(super) fn problems(&self, time: Duration) -> BTreeMap<String, String> {
        let mut problems = BTreeMap::new();
        let mut joined = Vec::new();
        for link in self.links() {
            link.look(|replica| match replica {
                Ok(replica) => {
                    joined.push(replica.identity.epoch);
                    let name = format!("replica {}", replica.identity.replica);
                    if replica.is_incomplete {
                        problems.insert(name, "it has forgotten nodes for lack of room".into());
                    } else if replica.started.elapsed() < time {
                        problems.insert(name, format!("it has run for less than {} s", time.as_secs()));
                    }
                }
                Err(problem) => drop(problems.insert(format!("replica at {}", link.address), problem.to_owned())),
            });
        }
        for (_, name, at) in self.vanished(time) {
            let text = format!("it vanished {} s ago without saying which nodes it had", at.elapsed().as_secs());
            problems.insert(format!("replica {name}"), text);
        }
        let known = self.known();
        if problems.is_empty() && known.callers.keys().any(|epoch| !joined.contains(epoch)) {
            let text = "a replica is connected to this one, and none of these names leads to it".to_owned();
            problems.insert("--peers".into(), text);
        }
        problems.extend(known.resolve_problem.clone().map(|problem| ("--peers".to_owned(), problem)));
        problems
    }

    /// Notes that another replica has joined this one, until the result is dropped.
    pub(crate) fn caller(self: &Arc<Self>, epoch: u64) -> PeerCaller {
        *self.known().callers.entry(epoch).or_default() += 1;
        self.changed();
        PeerCaller(Arc::clone(self), epoch)
    }

    /// Joins the replicas, once for a start, and then keeps looking for them. Never returns.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            self.resolve().await;
            self.announce();
            self.fleet.forget_departed();
            sleep(LOOK_INTERVAL).await;
        }
    }

    /// Waits until this replica knows where the others are. The endpoints of a Service have to be
    /// listed first.
    pub(super) async fn until_listed(&self) {
        while self.settings.service.is_some() && !self.is_listed() {
            sleep(PAUSE).await;
        }
    }

    fn is_listed(&self) -> bool {
        self.fleet.context.store.source_state() != SourceState::Unlisted
    }

    /// Waits until each replica has been joined, or cannot be joined at the moment.
    pub(super) async fn joined(self: &Arc<Self>) {
        self.resolve().await;
        let is_tried = |link: Arc<Link>| !matches!(*link.state(), LinkState::Untried);
        let is_done = |_: &u64| self.known().resolve_problem.is_none() && self.links().into_iter().all(is_tried);
        // The sender lives as long as `self`.
        let _ = self.changes().wait_for(is_done).await;
    }

    /// Tells agents where the replicas are (discovery.proto, section 22).
    pub(super) fn announce(&self) {
        let others: BTreeSet<_> = self.links().into_iter().filter_map(|link| *link.agents()).collect();
        let own = self.fleet.context.settings.ports.agents;
        let all = [own].into_iter().chain(others).take(MAX_ANNOUNCED).map(|at| at.to_string()).collect();
        self.announced.send_if_modified(|announced| std::mem::replace(announced, Arc::clone(&all)) != all);
    }

    async fn resolve(self: &Arc<Self>) {
        let mut found = HashSet::new();
        let mut problem = None;
        for (host, port) in &self.settings.names {
            let carrier = self.fleet.context.settings.carrier.as_deref();
            match timeout(CONNECT_TIMEOUT, resolve(carrier, host, *port)).await {
                Ok(Ok(addresses)) => found.extend(addresses),
                Ok(Err(error)) => problem = Some(format!("{host} does not resolve: {error}")),
                Err(_) => problem = Some(format!("{host} does not resolve in time")),
            }
        }
        if let Some(service) = &self.settings.service {
            let port = self.fleet.context.settings.ports.inspect.port();
            let endpoints = self.fleet.context.store.endpoints(service);
            match self.is_listed() {
                true if endpoints.is_empty() => problem = Some(format!("the Service {service} has no endpoints")),
                true => found.extend(endpoints.into_iter().map(|(at, _)| SocketAddr::new(at.address, port))),
                false => problem = Some(format!("the endpoints of {service} are not listed yet")),
            }
        }
        let mut known = self.known();
        let is_whole = problem.is_none();
        let is_news = known.resolve_problem != problem;
        known.resolve_problem = problem;
        if is_whole {
            // The stream to a replica whose name has gone goes on until it ends.
            known.links.retain(|address, (link, task)| {
                let is_kept = found.contains(address) || link.look(|replica| replica.is_ok());
                if !is_kept {
                    task.abort();
                }
                is_kept
            });
        }
        for address in found {
            known.links.entry(address).or_insert_with(|| {
                let link = Arc::new(Link::new(address));
                (Arc::clone(&link), tokio::spawn(Arc::clone(self).follow(link)).abort_handle())
            });
        }
        drop(known);
        if is_news {
            self.changed();
        }
    }

    /// Joins the replica at an address, again after each failure.
    async fn follow(self: Arc<Self>, link: Arc<Link>) {
        let mut is_logged = false;
        loop {
            let (Ok(problem) | Err(problem)) = self.join(&link).await;
            if matches!(*link.state(), LinkState::Own) {
                return;
            }
            if !is_logged {
                tracing::warn!(replica = %link.address, "no stream to another replica: {problem}; check --peers, and the role replica of the certificates");
                is_logged = true;
            }
            *link.state() = LinkState::Apart(problem);
            self.changed();
            sleep(PAUSE).await;
        }
    }

    /// Joins a replica, and reads its messages until the stream ends. Returns why it ended.
    async fn join(&self, link: &Link) -> Result<String, String> {
        let connecting = link.connect(self.settings.tls.clone(), self.fleet.context.settings.carrier.clone());
        let connected = timeout(CONNECT_TIMEOUT * 2, connecting).await;
        let channel = connected.map_err(|_| "it does not answer".to_owned())??;
        let mut client = peers(channel.clone());
        let (replica, epoch) = (self.fleet.context.settings.replica_name.clone(), self.fleet.context.store.epoch());
        let refused = |status: tonic::Status| status.message().to_owned();
        let begun = timeout(CONNECT_TIMEOUT * 2, async {
            let mut rosters = client.join(v1::PeerIdentity { replica, epoch }).await.map_err(refused)?.into_inner();
            Ok::<_, String>((rosters.message().await.map_err(refused)?, rosters))
        });
        let (mut next, mut rosters) = begun.await.map_err(|_| "it does not answer".to_owned())??;
        let ended = loop {
            let Some(roster) = next else { break Err("the stream ended".to_owned()) };
            if roster.identity.as_ref().is_some_and(|identity| identity.epoch == epoch) {
                *link.state() = LinkState::Own;
                self.changed();
                return Ok("it is this replica".into());
            }
            let says_goodbye = roster.says_goodbye;
            if let Err(problem) = self.take_roster(link, roster, &channel) {
                break Err(problem);
            }
            if says_goodbye {
                break Ok("it said goodbye".to_owned());
            }
            next = match rosters.message().await {
                Ok(roster) => roster,
                Err(status) => break Err(refused(status)),
            };
        };
        self.part(link, ended.is_ok());
        ended
    }

    /// Takes in a roster.
    ///
    /// # Errors
    ///
    /// The roster cannot come from a sound replica. The stream must end.
    pub(crate) fn take_roster(&self, link: &Link, roster: v1::Roster, channel: &Channel) -> Result<(), String> {
        let mut named = roster.present.iter().chain(&roster.departed);
        if let Some(problem) = named.find_map(|node| check_subdomain(&node.node).err()) {
            return Err(format!("it names a node that cannot exist: {problem}"));
        }
        let now = Instant::now();
        let ago = |milliseconds| now.checked_sub(Duration::from_millis(milliseconds)).unwrap_or(now);
        let mut state = link.state();
        let held = match &*state {
            LinkState::Joined(joined) if !roster.is_full => joined.nodes.len(),
            _ => 0,
        };
        if held + roster.present.len() + roster.departed.len() > MAX_NAMED {
            return Err(format!("it names more than {MAX_NAMED} nodes"));
        }
        let mut identity = roster.identity.unwrap_or_default();
        identity.replica.truncate(clip(&identity.replica).len());
        let epoch = identity.epoch;
        let is_new = !matches!(&*state, LinkState::Joined(_));
        if is_new {
            tracing::info!(replica = identity.replica, address = %link.address, "joined another replica");
            let (nodes, channel) = (HashMap::new(), channel.clone());
            let joined = Joined { identity, since: now, started: now, is_incomplete: false, nodes, channel };
            *state = LinkState::Joined(joined);
        }
        let LinkState::Joined(joined) = &mut *state else { return Ok(()) };
        if roster.is_full {
            joined.nodes.clear();
        }
        // An older replica does not say where its agents connect.
        if let Ok(mut agents) = roster.agents.parse::<SocketAddr>() {
            if agents.ip().is_unspecified() {
                agents.set_ip(link.address.ip());
            }
            *link.agents() = Some(agents);
        }
        joined.started = joined.started.min(ago(roster.uptime_ms));
        joined.is_incomplete = roster.is_incomplete;
        for node in roster.present {
            joined.nodes.insert(node.node.into(), (roster.number, None));
        }
        for node in roster.departed {
            let departed = Departed { at: ago(node.departed_ms), version: node.programmed_version };
            joined.nodes.insert(node.node.into(), (roster.number, Some(departed)));
        }
        for node in roster.forgotten {
            joined.nodes.remove(node.as_str());
        }
        drop(state);
        link.number.send_replace(roster.number);
        if is_new {
            self.known().vanished.remove(&epoch);
        }
        self.changed();
        Ok(())
    }

    /// Takes over the memory of a replica that left: its nodes have lost their stream.
    pub(crate) fn part(&self, link: &Link, says_goodbye: bool) {
        let old = std::mem::replace(&mut *link.state(), LinkState::Apart("the stream ended".into()));
        let LinkState::Joined(joined) = old else { return };
        let (now, name) = (Instant::now(), joined.identity.replica);
        let departed = |state: Option<Departed>| state.unwrap_or(Departed { at: now, version: 0 });
        let nodes: Vec<_> = joined.nodes.into_iter().map(|(node, (_, state))| (node, departed(state))).collect();
        if says_goodbye {
            // The end of its stream to this replica is no news.
            self.known().callers.remove(&joined.identity.epoch);
            tracing::info!(
                replica = name,
                nodes = nodes.len(),
                "another replica has stopped and has handed its nodes over"
            );
        } else {
            tracing::warn!(replica = name, address = %link.address, nodes = nodes.len(), "another replica has vanished; its nodes count as nodes without an agent until they are seen again");
            let mut known = self.known();
            known.vanished.insert(joined.identity.epoch, (name, now));
            known.forget_vanished(self.fleet.context.settings.uncovered_after);
        }
        self.fleet.adopt(nodes);
        self.changed();
    }
}

/// Another replica that has joined this one.
pub(crate) struct PeerCaller(Arc<Replicas>, u64);

impl Drop for PeerCaller {
    fn drop(&mut self) {
        let is_joined =
            |link: &Arc<Link>| link.look(|replica| replica.is_ok_and(|replica| replica.identity.epoch == self.1));
        let is_joined = self.0.links().iter().any(is_joined);
        let mut known = self.0.known();
        if let Some(count) = known.callers.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                known.callers.remove(&self.1);
                if !is_joined {
                    // Nobody knows which agents it had, unless its goodbye or its end was seen.
                    let vanished = ("that was never joined".to_owned(), Instant::now());
                    known.vanished.entry(self.1).or_insert(vanished);
                    known.forget_vanished(self.0.fleet.context.settings.uncovered_after);
                }
            }
        }
        drop(known);
        self.0.changed();
    }
}

impl Link {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let state = Mutex::new(LinkState::Untried);
        Self { address, state, agents: Mutex::default(), number: watch::Sender::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn agents(&self) -> MutexGuard<'_, Option<SocketAddr>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `look` with the replica, if it is joined, or with the problem.
    pub(crate) fn look<T>(&self, look: impl FnOnce(Result<&Joined, &str>) -> T) -> T {
        look(match &*self.state() {
            LinkState::Joined(joined) => Ok(joined),
            LinkState::Apart(problem) => Err(problem),
            LinkState::Untried | LinkState::Own => Err("it is not joined yet"),
        })
    }

    /// A client of the replica's `Inspect`; `None` if the replica is not joined.
    pub(crate) fn inspect(&self) -> Option<InspectClient<Channel>> {
        let channel = self.look(|joined| joined.ok().map(|joined| joined.channel.clone()))?;
        Some(InspectClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// Asks the replica. Returns its epoch and its answer, or `None` if it is not joined or does
    /// not answer. When this function returns an answer, the roster has at least its number.
    pub(super) async fn ask(
        &self,
        question: &Question,
        until: tokio::time::Instant,
    ) -> Option<(u64, v1::QuestionAnswer)> {
        let joined = |joined: &Joined| (joined.identity.epoch, joined.channel.clone());
        let (epoch, channel) = self.look(|replica| replica.ok().map(joined))?;
        let endpoints = question.endpoints.iter().map(|(key, address)| v1::QuestionEndpoint {
            service: Some(v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() }),
            address: address.map(address_to_wire).unwrap_or_default(),
        });
        let question = v1::Question {
            wanted: question.wanted.into(),
            endpoints: endpoints.collect(),
            positions: positions_to_wire(question.positions.iter().map(|(kind, position)| (*kind, *position))),
            wait_ms: milliseconds(until.saturating_duration_since(tokio::time::Instant::now())),
        };
        let (mut numbers, mut client) = (self.number.subscribe(), peers(channel));
        let asked = async {
            let answer = client.ask(question).await.ok()?.into_inner();
            numbers.wait_for(|number| *number >= answer.roster).await.ok()?;
            Some((epoch, answer))
        };
        timeout_at(until + ANSWER_GRACE, asked).await.ok()?
    }

    async fn connect(&self, tls: Option<Arc<ServerTls>>, carrier: Option<Arc<dyn Carrier>>) -> Result<Channel, String> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address))
            .map_err(|error| error.to_string())?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        let connected = match (tls, carrier) {
            (Some(tls), _) => {
                let at = self.address;
                let secured = move |_: Uri| handshake(Arc::clone(&tls), at);
                // An https URL would enable tonic's own TLS, which verifies names and addresses.
                endpoint.connect_with_connector(tower::service_fn(secured)).await
            }
            (None, Some(carrier)) => endpoint.connect_with_connector(connector(carrier, self.address)).await,
            (None, None) => endpoint.connect().await,
        };
        connected.map_err(|error| chain(&error))
    }
}

/// Connects with the present files. Like agents, replicas know each other by the role in the
/// certificate, so that a replica may have any address. If a file denies the certificate later, the
/// connection ends.
async fn handshake(
    tls: Arc<ServerTls>,
    at: SocketAddr,
) -> io::Result<TokioIo<impl AsyncRead + AsyncWrite + Unpin + Send + 'static>> {
    let stream = TcpStream::connect(at).await?;
    stream.set_nodelay(true)?;
    let stream = TlsConnector::from(tls.link_config()).connect(at.ip().into(), stream).await.map_err(|error| {
        let files = Files { side: Side::Client, ..tls.files().clone() };
        // The other explanations are for agents, which have other options.
        let refusal = explain(&error, &files).filter(|refusal| refusal.reason == "certificate_denied");
        refusal.map_or(error, |refusal| io::Error::other(refusal.sentence))
    })?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let entries = certificate.map(|certificate| entries_of_replica(certificate)).unwrap_or_default();
    let (read, write) = tokio::io::split(stream);
    let read = ReaderStream::new(read).take_until(async move { tls.denied(&entries).await });
    Ok(TokioIo::new(tokio::io::join(StreamReader::new(read.boxed()), write)))
}

fn peers(channel: Channel) -> PeersClient<Channel> {
    PeersClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    headgate_proto::errors::chain(error)
}

// Finds where replicas, API servers and their name servers are. No Service gets these.

/// The maximum number of addresses and ports that are reserved. Those of replicas come first.
const MAX_RESERVED: usize = 1_000;

/// Tells the store where replicas and API servers are: as options and names say, and as the
/// endpoints of their Services. If there are names, the name servers follow from them. A name that
/// cannot be resolved keeps its addresses. Never returns.
pub(super) async fn reserve(context: Arc<Context>, replicas: Option<Arc<Replicas>>) {
    let (settings, store) = (&context.settings, &context.store);
    let enrolment = settings.enrolment.as_ref().map(|enrolment| enrolment.listen);
    let Ports { agents, inspect, pages } = settings.ports;
    // Pages at a loopback address are nobody's but this machine's.
    let pages = pages.filter(|pages| !pages.ip().is_loopback());
    let own: Vec<SocketAddr> = [agents, inspect].into_iter().chain(enrolment).chain(pages).collect();
    let kubernetes = ServiceKey::new("default", "kubernetes");
    let endpoints = |key: &ServiceKey| store.endpoints(key).into_iter().map(|(endpoint, _)| endpoint);
    let ports_of = |headgate_core::Endpoint { address, ports, .. }| {
        (0..ports.len()).map(move |index| SocketAddr::new(address, ports[index].port))
    };
    let mut api_servers: Vec<SocketAddr> = Vec::new();
    loop {
        if let Some((host, port)) = &settings.api_server
            && let Ok(Ok(found)) = timeout(CONNECT_TIMEOUT, lookup_host((host.as_str(), *port))).await
        {
            api_servers = found.collect();
        }
        let others = replicas.as_ref().map(|replicas| replicas.addresses()).unwrap_or_default();
        let of_service = settings.balance_service.iter().flat_map(endpoints).map(|endpoint| endpoint.address);
        let hosts = own.iter().chain(&others).map(SocketAddr::ip).chain(of_service);
        let of_replicas = hosts.flat_map(|host| own.iter().map(move |own| SocketAddr::new(host, own.port())));
        let of_servers = api_servers.iter().copied().chain(endpoints(&kubernetes).flat_map(ports_of));
        let peers = settings.peers.iter().flat_map(|peers| &peers.names);
        let has_names = peers.chain(&settings.api_server).any(|(host, _)| host.parse::<IpAddr>().is_err());
        let of_names = if has_names { name_servers() } else { BTreeSet::new() };
        let all = of_replicas.chain(of_servers).map(|at| (Protocol::Tcp, at)).chain(of_names);
        let all = all.map(|(by, at)| (by, SocketAddr::new(at.ip().to_canonical(), at.port())));
        // Every machine has the other addresses for itself.
        let all = all.filter(|(_, at)| !(at.ip().is_loopback() || at.ip().is_unspecified()));
        store.reserve(&all.take(MAX_RESERVED).collect());
        sleep(LOOK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use headgate_core::frontends::Frontend;
    use headgate_proto::reserved_to_wire;

    use super::*;
    use crate::{
        metrics::Metrics,
        serve::context::Settings,
        store::{Limits, Store},
    };

    /// Waits until `expected` is reserved for a replica with this API server.
    async fn until_reserved(api_server: &str, expected: BTreeSet<Frontend>) {
        let api_server = Some((api_server.to_owned(), 6443));
        until_reserved_with(Settings { api_server, ..Settings::default() }, expected).await;
    }

    async fn until_reserved_with(settings: Settings, expected: BTreeSet<Frontend>) {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let following = tokio::spawn(reserve(Context::new(Arc::clone(&store), metrics, settings), None));
        while store.reserved() != reserved_to_wire(&expected) {
            sleep(Duration::from_millis(5)).await;
        }
        following.abort();
    }

    /// Whoever answers the kubelet in place of a replica has it killed.
    #[tokio::test]
    async fn the_pages_of_a_replica_are_reserved_unless_only_its_machine_has_them() {
        for (pages, ports) in [("[::]:7480", &[7443, 7444, 7480][..]), ("127.0.0.1:7480", &[7443, 7444])] {
            let at = |port| SocketAddr::new([192, 0, 2, 8].into(), port);
            let ports_of = Ports { agents: at(7443), inspect: at(7444), pages: Some(pages.parse().unwrap()) };
            let expected = ports.iter().map(|port| Frontend::Address(at(*port).ip(), Protocol::Tcp, *port)).collect();
            until_reserved_with(Settings { ports: ports_of, ..Settings::default() }, expected).await;
        }
    }

    /// Whoever takes the name server of replicas keeps them from finding each other and the API
    /// server.
    #[tokio::test]
    async fn name_servers_are_reserved_if_there_are_names() {
        let is_elsewhere = |at: &SocketAddr| !(at.ip().is_loopback() || at.ip().is_unspecified());
        let servers = name_servers().into_iter().filter(|(_, at)| is_elsewhere(at));
        // The name leads to this machine, which reserves nothing.
        until_reserved("localhost", servers.map(|(by, at)| Frontend::Address(at.ip(), by, at.port())).collect()).await;
        let address = Frontend::Address([192, 0, 2, 7].into(), Protocol::Tcp, 6443);
        until_reserved("192.0.2.7", [address].into()).await;
    }
}
