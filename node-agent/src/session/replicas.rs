//! Chooses the replica to connect to. Each address of a URL's host is one. The order is random,
//! with the previous replica at the end. Names are resolved again after all were tried. No Service
//! of this node gets the addresses that are found.

use std::{
    collections::VecDeque,
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use headgate_core::Protocol;
use headgate_listener::name_servers;
use tracing::warn;

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
            self.waiting = ordered(resolve(&self.control_planes, &self.state).await, self.last.as_ref());
        }
        self.last = self.waiting.pop_front();
        self.last.clone()
    }

    /// Resolves the names again and returns all replicas except the replica that was tried last.
    pub(super) fn others(&self) -> impl Future<Output = Vec<Replica>> + Send + use<> {
        let (control_planes, state, last) = (self.control_planes.clone(), Arc::clone(&self.state), self.last.clone());
        async move {
            let mut others = resolve(&control_planes, &state).await;
            others.retain(|target| target.address.is_some() && Some(target) != last.as_ref());
            others
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

/// Returns a random order that ends with `last`.
fn ordered(mut targets: Vec<Replica>, last: Option<&Replica>) -> VecDeque<Replica> {
    fastrand::shuffle(&mut targets);
    let (same, mut others): (Vec<_>, Vec<_>) = targets.into_iter().partition(|target| Some(target) == last);
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

async fn resolve(control_planes: &[ControlPlane], state: &Arc<AgentState>) -> Vec<Replica> {
    let mut targets = Vec::new();
    for control_plane in control_planes {
        let target = |address| Replica { control_plane: control_plane.clone(), address };
        let before = targets.len();
        let (host, port) = control_plane.host_and_port();
        match lookup(host, port, state).await {
            Ok(addresses) => targets.extend(addresses.into_iter().map(|address| target(Some(address)))),
            Err(error) => {
                warn!(%control_plane, %error, "the name of the control plane cannot be resolved; check the name, and that the node's resolver knows it");
            }
        }
        if targets.len() == before {
            targets.push(target(None));
        }
    }
    targets
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
        let targets = resolve(&[control_plane], &state()).await;
        let address = targets[0].address.unwrap();
        assert!(address.ip().is_loopback() && address.port() == 7443);
        assert_eq!(targets[0].to_string(), format!("https://localhost:7443/ ({address})"));
        let unknown = ControlPlane::parse("https://headgate.invalid:7443", false).unwrap();
        assert_eq!(
            resolve(std::slice::from_ref(&unknown), &state()).await,
            [Replica { control_plane: unknown, address: None }]
        );
    }
}
