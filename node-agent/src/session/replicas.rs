//! Chooses the replica to connect to: each address of a URL's host, and those that replicas have
//! announced (discovery.proto, section 22). The order is random, with the previous replica at the
//! end. Names are resolved again after all were tried. No Service of this node gets the addresses.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt, io, iter,
    net::{IpAddr, SocketAddr},
    slice,
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use headgate_core::{
    Protocol,
    addresses::{AddressUse, unreachable},
};
use headgate_listener::name_servers;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::{control_planes::ControlPlane, state::AgentState};

/// One replica at one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// The configured URL.
    pub control_plane: ControlPlane,
    /// The address; `None` if the name could not be resolved. In this case, the error of the
    /// connection attempt names the reason.
    pub address: Option<SocketAddr>,
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) if !self.control_plane.names(address) => write!(f, "{} ({address})", self.control_plane),
            _ => self.control_plane.fmt(f),
        }
    }
}

/// The maximum number of announced addresses that the agent tries.
const MAX_ANNOUNCED: usize = 64;

/// How long a name server may delay an agent that knows replicas without it.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The addresses that the replica `by` announces, as far as the agent may connect to them. The
/// first is its own, for which the agent keeps the one at which it has reached the replica. `None`
/// if nothing is announced: the earlier ones stay.
pub(super) fn announced(texts: &[String], by: &Replica) -> Option<BTreeSet<SocketAddr>> {
    let own = by.address.filter(|_| by.control_plane.socket().is_none() && !texts.is_empty())?;
    let is_local = own.ip().to_canonical().is_loopback();
    let others = texts.iter().take(MAX_ANNOUNCED).skip(1).filter_map(|text| {
        let at: SocketAddr = text.parse().ok()?;
        let at = SocketAddr::new(at.ip().to_canonical(), at.port());
        let is_here = is_local && at.ip().is_loopback();
        let is_usable = at.port() != 0 && (is_here || unreachable(at.ip(), AddressUse::Other).is_none());
        let target = Replica::at(at, slice::from_ref(&by.control_plane)).filter(|_| is_usable);
        if target.is_none() {
            debug!(%by, text, "a replica announces an address to which this agent may not connect");
        }
        target.map(|_| at)
    });
    Some(iter::once(own).chain(others).collect())
}

impl Replica {
    /// The replica at an announced address. It gets TLS if any URL has it, and `None` is returned
    /// if it may not do without.
    fn at(address: SocketAddr, control_planes: &[ControlPlane]) -> Option<Self> {
        let uses_tls = control_planes.iter().any(ControlPlane::uses_tls);
        let scheme = if uses_tls { "https" } else { "http" };
        let control_plane = ControlPlane::parse(&format!("{scheme}://{address}"), !uses_tls).ok()?;
        Some(Self { control_plane, address: Some(address) })
    }

    /// True if both are the same server, perhaps by different URLs.
    fn is(&self, other: &Self) -> bool {
        let has_address = self.address.is_some() && self.control_plane.socket().is_none();
        self == other || has_address && self.address == other.address
    }
}

/// The order in which the agent tries replicas. [`Replicas::next`] resolves names.
#[derive(Debug)]
pub(super) struct Replicas {
    control_planes: Vec<ControlPlane>,
    state: Arc<AgentState>,
    waiting: VecDeque<Replica>,
    last: Option<Replica>,
}

impl Replicas {
    /// Creates an order of the replicas behind these URLs, whose addresses `state` reserves.
    pub(super) fn new(control_planes: Vec<ControlPlane>, state: Arc<AgentState>) -> Self {
        Self { control_planes, state, waiting: VecDeque::new(), last: None }
    }

    /// Returns the next replica to try; `None` only if no URL is configured.
    pub(super) async fn next(&mut self) -> Option<Replica> {
        if self.waiting.is_empty() {
            self.waiting = ordered(known(&self.control_planes, &self.state).await, self.last.as_ref());
        }
        self.last = self.waiting.pop_front();
        self.last.clone()
    }

    /// Resolves the names again and returns all replicas except the replica that was tried last.
    pub(super) fn others(&self) -> impl Future<Output = Vec<Replica>> + Send + use<> {
        let (control_planes, state, last) = (self.control_planes.clone(), Arc::clone(&self.state), self.last.clone());
        async move {
            let mut others = known(&control_planes, &state).await.concat();
            others.retain(|target| target.address.is_some() && last.as_ref().is_none_or(|last| !target.is(last)));
            others
        }
    }

    /// Warns if names depend on rules that this agent writes itself: if they are missing, nobody
    /// can tell the agent which ones.
    pub(super) async fn check_name_servers(&self) {
        if self.control_planes.iter().all(|at| at.host_and_port().0.parse::<IpAddr>().is_ok()) {
            return;
        }
        let owned = |state: &AgentState| name_servers().into_iter().find_map(|server| state.owner_of(server));
        if let Some((service, address)) = self.state.blocking(owned).await {
            warn!(%service, %address, "the name server of this agent is a Service whose rules it writes itself, so it may not find the names in --control-plane after a restart; write addresses, or let the agent use the resolver of its node (dnsPolicy: Default)");
        }
    }

    /// Makes this replica the next replica to try.
    pub(super) fn prefer(&mut self, target: Replica) {
        self.waiting.push_front(target);
    }

    /// Makes the next call of [`Replicas::next`] resolve the names again. The known addresses may
    /// be as old as the stream that has ended.
    pub(super) fn forget(&mut self) {
        self.waiting.clear();
    }
}

/// Returns a random order that takes turns between the lists, and ends with `last`.
fn ordered(mut lists: [Vec<Replica>; 2], last: Option<&Replica>) -> VecDeque<Replica> {
    lists.iter_mut().for_each(|list| fastrand::shuffle(list));
    let mut targets: Vec<_> = lists.into_iter().flat_map(|list| list.into_iter().enumerate()).collect();
    // The sort is stable, so an announced one comes before a seed.
    targets.sort_by_key(|(turn, _)| *turn);
    let targets = targets.into_iter().map(|(_, target)| target);
    let (same, mut others): (Vec<_>, Vec<_>) = targets.partition(|target| last.is_some_and(|last| target.is(last)));
    others.extend(same);
    others.into()
}

/// Resolves a name. No Service of this node gets the addresses from now on, nor the name servers.
/// Errors: the name cannot be resolved. Its last addresses stay reserved.
pub(super) async fn lookup(host: &str, port: u16, state: &Arc<AgentState>) -> io::Result<Vec<SocketAddr>> {
    if host.parse::<IpAddr>().is_err() {
        state.blocking(|state| state.depends_on("name servers", name_servers())).await;
    }
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await?.collect();
    let (name, targets) = (format!("{host}:{port}"), addresses.iter().map(|address| (Protocol::Tcp, *address)));
    let targets = targets.collect();
    state.blocking(move |state| state.depends_on(&name, targets)).await;
    Ok(addresses)
}

/// The announced replicas, and the seeds that are not among them.
async fn known(control_planes: &[ControlPlane], state: &Arc<AgentState>) -> [Vec<Replica>; 2] {
    let announced = state.replicas().borrow().clone();
    let announced: Vec<_> = announced.into_iter().filter_map(|at| Replica::at(at, control_planes)).collect();
    let limit = if announced.is_empty() { Duration::MAX } else { RESOLVE_TIMEOUT };
    let resolving = control_planes.iter().map(|control_plane| resolve(control_plane, state, limit));
    let mut seeds = join_all(resolving).await.concat();
    seeds.retain(|seed| !announced.iter().any(|known| known.is(seed)));
    [announced, seeds]
}

async fn resolve(control_plane: &ControlPlane, state: &Arc<AgentState>, limit: Duration) -> Vec<Replica> {
    let target = |address| Replica { control_plane: control_plane.clone(), address };
    let (host, port) = control_plane.host_and_port();
    let found = timeout(limit, lookup(host, port, state)).await;
    let error = match found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(addresses) if !addresses.is_empty() => return addresses.into_iter().map(Some).map(target).collect(),
        Ok(_) => io::ErrorKind::NotFound.into(),
        Err(error) => error,
    };
    warn!(%control_plane, %error, "the name of the control plane cannot be resolved; check the name, and that the node's resolver knows it");
    vec![target(None)]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    fn state() -> Arc<AgentState> {
        Arc::new(AgentState::new("node-1"))
    }

    fn replicas(urls: &[&str]) -> Replicas {
        Replicas::new(urls.iter().map(|url| ControlPlane::parse(url, true).unwrap()).collect(), state())
    }

    #[tokio::test]
    async fn each_replica_is_tried_once_per_round_and_never_twice_in_succession() {
        let mut replicas = replicas(&["http://127.0.0.1:1", "http://127.0.0.2:1", "http://127.0.0.3:1"]);
        let mut previous = String::new();
        for _ in 0..50 {
            let mut round = BTreeSet::new();
            for _ in 0..3 {
                let next = replicas.next().await.unwrap().to_string();
                assert_ne!(next, previous);
                round.insert(next.clone());
                previous = next;
            }
            assert_eq!(round.len(), 3);
        }
    }

    #[tokio::test]
    async fn agents_spread_over_the_replicas_and_the_last_is_not_the_first_after_names_are_resolved_again() {
        let mut firsts = BTreeSet::new();
        for _ in 0..100 {
            firsts.insert(replicas(&["http://127.0.0.1:1", "http://127.0.0.2:1"]).next().await.unwrap().to_string());
        }
        assert_eq!(firsts.len(), 2);
        let mut replicas = replicas(&["http://127.0.0.1:1", "http://127.0.0.2:1"]);
        let mut last = replicas.next().await.unwrap();
        for _ in 0..10 {
            replicas.forget();
            let next = replicas.next().await.unwrap();
            assert_ne!(next, last);
            last = next;
        }
    }

    #[tokio::test]
    async fn a_name_resolves_to_one_replica_per_address() {
        let control_plane = ControlPlane::parse("https://localhost:7443", false).unwrap();
        let targets = resolve(&control_plane, &state(), Duration::MAX).await;
        let address = targets[0].address.unwrap();
        assert!(address.ip().is_loopback() && address.port() == 7443);
        assert_eq!(targets[0].to_string(), format!("https://localhost:7443/ ({address})"));
        let unknown = ControlPlane::parse("https://headgate.invalid:7443", false).unwrap();
        assert_eq!(
            resolve(&unknown, &state(), Duration::MAX).await,
            [Replica { control_plane: unknown, address: None }]
        );
    }

    /// Three replicas that announce each other take the place of a seed.
    #[tokio::test]
    async fn rounds_take_turns_between_the_list_and_the_seeds() {
        let mut replicas = replicas(&["http://192.0.2.1:1", "http://192.0.2.2:1"]);
        let list = |hosts: &[u8]| hosts.iter().map(|host| ([192, 0, 2, *host], 1).into()).collect::<BTreeSet<_>>();
        replicas.state.set_replicas(list(&[2, 3, 4, 5]));
        let mut firsts = BTreeSet::new();
        for _ in 0..100 {
            let mut round = Vec::new();
            for _ in 0..5 {
                round.push(replicas.next().await.unwrap().address.unwrap());
            }
            assert!(replicas.waiting.is_empty(), "192.0.2.2 is in the list, too");
            let seed = round.iter().position(|at| *at == ([192, 0, 2, 1], 1).into()).unwrap();
            // The replica that was tried last moves to the end.
            assert!([0, 1, 4].contains(&seed), "the list keeps the agent from the seed: {round:?}");
            firsts.insert(round[0]);
            assert_eq!(round.into_iter().collect::<BTreeSet<_>>(), list(&[1, 2, 3, 4, 5]));
        }
        // One of them may be the last one of each round.
        assert!(firsts.intersection(&list(&[2, 3, 4, 5])).count() >= 3, "{firsts:?}");
        let others: BTreeSet<_> = replicas.others().await.into_iter().filter_map(|other| other.address).collect();
        assert_eq!((others.len(), others.is_subset(&list(&[1, 2, 3, 4, 5]))), (4, true));
        // A list without them removes replicas.
        replicas.state.set_replicas(list(&[6]));
        replicas.forget();
        let mut round = BTreeSet::new();
        for _ in 0..3 {
            round.insert(replicas.next().await.unwrap().address.unwrap());
        }
        assert_eq!(round, list(&[1, 2, 6]));
    }

    #[test]
    fn a_replica_cannot_send_agents_where_they_may_not_go() {
        let by = |url: &str, address: &str| Replica {
            control_plane: ControlPlane::parse(url, true).unwrap(),
            address: Some(address.parse().unwrap()),
        };
        let heard = |by: &Replica, texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            announced(&texts, by).map(|list| list.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let texts = [
            "[::]:7443",
            "10.0.0.9:7443",
            "[::ffff:10.0.0.8]:7443",
            "127.0.0.1:7443",
            "[::1]:7443",
            "169.254.169.254:80",
            "[fe80::1]:7443",
            "224.0.0.1:7443",
            "255.255.255.255:7443",
            "10.0.0.7:0",
            "replica.example:7443",
            "https://10.0.0.6:7443",
        ];
        let named = by("https://seed.example:7443", "10.0.0.1:7443");
        assert_eq!(heard(&named, &texts).unwrap(), ["10.0.0.1:7443", "10.0.0.8:7443", "10.0.0.9:7443"]);
        assert_eq!(heard(&named, &["[::]:7443", "127.0.0.1:7443", "0.0.0.0:7443"]).unwrap(), ["10.0.0.1:7443"]);
        let relayed = by("https://seed.example:443", "10.0.0.1:443");
        assert_eq!(heard(&relayed, &["192.168.0.1:7443"]).unwrap(), ["10.0.0.1:443"], "this is where it answers");
        assert_eq!(heard(&named, &[]), None, "most heartbeats carry no list");
        // Without TLS, only addresses of tests.
        let plain = by("http://192.0.2.1:7443", "192.0.2.1:7443");
        let list = heard(&plain, &["0.0.0.0:7443", "10.0.0.9:7443", "198.18.0.1:7443"]);
        assert_eq!(list.unwrap(), ["192.0.2.1:7443", "198.18.0.1:7443"]);
        // A trial on one machine.
        let here = by("http://127.0.0.1:7443", "127.0.0.1:7443");
        assert_eq!(heard(&here, &["127.0.0.1:7443", "127.0.0.2:7443"]).unwrap().len(), 2);
        let socket = by("unix:/run/headgate/agents.sock", "127.0.0.1:0");
        assert_eq!(heard(&socket, &["[::]:7443"]), None, "a program for one node has no other replica");
        let many: Vec<String> = (1..=200).map(|host| format!("10.0.0.{host}:7443")).collect();
        assert_eq!(announced(&many, &named).unwrap().len(), MAX_ANNOUNCED);
    }

    #[test]
    fn announced_replicas_get_tls_if_a_url_has_it() {
        let urls = |urls: &[&str]| urls.iter().map(|url| ControlPlane::parse(url, true).unwrap()).collect::<Vec<_>>();
        let at = |address: &str, of: &[&str]| {
            Replica::at(address.parse().unwrap(), &urls(of)).map(|replica| replica.to_string())
        };
        assert_eq!(at("10.0.0.2:7443", &["https://10.0.0.1:7443"]).unwrap(), "https://10.0.0.2:7443/");
        assert_eq!(at("[2001:db8::2]:1", &["http://192.0.2.1:1"]).unwrap(), "http://[2001:db8::2]:1/");
        // The list of an earlier run with TLS.
        assert_eq!(at("10.0.0.2:7443", &["http://192.0.2.1:7443"]), None);
    }
}
