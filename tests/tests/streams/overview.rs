//! What people see of the fleet (discovery.proto, sections 16 and 21): two replicas and three
//! agents, one of which is killed and returns.

use std::collections::BTreeMap;

use headgate_control_plane::model::{NodeChange, Sink as _, Transaction};
use headgate_core::{Change, Conditions, Node};
use headgate_proto::v1;
use headgate_tests::testbed::page;
use tokio::{task::spawn_blocking, time::timeout};
use tonic::Streaming;

use crate::{
    barrier::{NEVER, OTHER, POD, Pair, apply, endpoint, program, removed},
    client::{GUARD, eventually},
    replica::{Replica, key},
};

const EVERYWHERE: &str = "headgate_fleet_programmed_everywhere_seconds_count";
const ON_NODE: &str = "headgate_control_plane_programmed_on_node_seconds_count";

/// What a page knows that watches the agents of all replicas.
struct Page {
    messages: Streaming<v1::AgentsChange>,
    rows: BTreeMap<String, v1::AgentInfo>,
    changes: BTreeMap<u64, v1::ChangeTime>,
    is_complete: bool,
    /// How many rows of nodes have arrived that were up to date before, and still are.
    rows_without_news: usize,
}

impl Page {
    async fn open(replica: &Replica) -> Self {
        let messages = replica.inspect().await.watch_agents(v1::WatchAgentsRequest::default()).await.unwrap();
        let (messages, rows, changes) = (messages.into_inner(), BTreeMap::new(), BTreeMap::new());
        let mut page = Self { messages, rows, changes, is_complete: false, rows_without_news: 0 };
        page.until("the page is complete", |page| page.is_complete).await;
        page
    }

    /// Reads messages until a condition holds.
    async fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        while !is_so(self) {
            let next = timeout(GUARD, self.messages.message()).await;
            let message = next.unwrap_or_else(|_| panic!("gave up waiting until {what}: {:?}", self.rows));
            let message = message.unwrap().unwrap();
            for row in message.agents {
                let is_up_to_date = row.state == "up_to_date";
                let before = self.rows.insert(row.node.clone(), row);
                let was_up_to_date = before.is_some_and(|before| before.state == "up_to_date");
                self.rows_without_news += usize::from(was_up_to_date && is_up_to_date);
            }
            message.removed.iter().for_each(|node| drop(self.rows.remove(node)));
            self.changes.extend(message.changes.into_iter().map(|change| (change.version, change)));
            self.is_complete |= message.is_complete;
        }
    }

    async fn until_states(&mut self, wanted: [&str; 3]) {
        let states = |page: &Self| page.rows.values().map(|row| row.state.clone()).collect::<Vec<_>>();
        self.until(&format!("the nodes are {wanted:?}"), |page| states(page) == wanted).await;
    }

    /// Reads messages until a change is shown in a state.
    async fn change(&mut self, version: u64, state: &str) -> v1::ChangeTime {
        let is_shown = |page: &Self| page.changes.get(&version).is_some_and(|change| change.state == state);
        self.until(&format!("version {version} is {state}"), is_shown).await;
        self.changes[&version].clone()
    }
}

async fn metrics(replica: &Replica) -> String {
    let address = replica.running.metrics_addr.unwrap();
    spawn_blocking(move || page::get(address, "/metrics")).await.unwrap().unwrap()
}

/// The sum of a metric over both replicas.
fn sum(pair: &Pair, sample: &str) -> u64 {
    pair.replicas.iter().map(|replica| replica.metric(sample)).sum()
}

async fn status(replica: &Replica) -> v1::GetStatusResponse {
    let request = v1::GetStatusRequest { last_changes: 256, ..v1::GetStatusRequest::default() };
    replica.inspect().await.get_status(request).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_follows_all_nodes_and_the_time_of_each_change_until_it_is_everywhere() {
    let mut pair = Pair::start(NEVER).await;
    let mut agents = [pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await];
    let mut page = Page::open(&pair.replicas[0]).await;
    let mut other = Page::open(&pair.replicas[1]).await;
    for page in [&mut page, &mut other] {
        page.until_states(["up_to_date"; 3]).await;
        let replicas: Vec<_> = page.rows.values().map(|row| row.replica.as_str()).collect();
        assert_eq!(replicas, ["replica-1", "replica-2", "replica-2"]);
        assert!(page.rows.values().all(|row| row.agent_version == "test" && row.programmed_version == 0));
    }

    // A change that all nodes have. ACKs are no news about the nodes. On a slow machine, nodes may
    // be behind for a moment, which is news.
    let (without_news, everywhere, on_node) = (page.rows_without_news, sum(&pair, EVERYWHERE), sum(&pair, ON_NODE));
    pair.change_both([removed()]);
    for (client, replica) in agents.iter_mut().zip([0, 1, 1]) {
        program(&pair.replicas[replica], client).await;
    }
    let version = pair.replicas[0].store.version();
    let done = page.change(version, "done").await;
    assert_eq!((done.nodes, done.missing, done.trigger.as_str()), (3, 0, "arrival"), "{done:?}");
    assert_eq!((done.service.as_str(), done.endpoint), ("default/service-1", POD.to_string()));
    assert_eq!(page.rows_without_news, without_news);
    assert_eq!(sum(&pair, ON_NODE), on_node + 3);
    eventually("one replica has recorded the change", async || sum(&pair, EVERYWHERE) == everywhere + 1).await;
    let last = status(&pair.replicas[1]).await.fleet.unwrap().last_changes;
    assert_eq!((last[0].state.as_str(), last[0].nodes, last[0].missing), ("done", 3, 0), "{last:?}");

    // A node of the other replica holds up a change.
    let [a, b, c] = &mut agents;
    pair.change_both([endpoint(POD, "a", Conditions::READY)]);
    let version = pair.replicas[0].store.version();
    program(&pair.replicas[0], a).await;
    program(&pair.replicas[1], b).await;
    let is_held_up = |page: &Page| page.changes.get(&version).is_some_and(|change| change.slowest == "c");
    page.until("c holds up the change", is_held_up).await;
    let running = &page.changes[&version];
    assert_eq!((running.state.as_str(), running.nodes, running.missing), ("running", 2, 1), "{running:?}");
    page.until_states(["up_to_date", "up_to_date", "behind"]).await;
    assert!(page.rows["c"].lag_ms >= 1_000);
    program(&pair.replicas[1], c).await;
    let done = page.change(version, "done").await;
    assert!(done.slowest == "c" && done.everywhere_after_ms >= 1_000, "{done:?}");
    page.until_states(["up_to_date"; 3]).await;

    // The agent of b is killed, and returns.
    let [mut a, b, mut c] = agents;
    drop(b);
    for page in [&mut page, &mut other] {
        page.until_states(["up_to_date", "no_agent", "up_to_date"]).await;
        let row = &page.rows["b"];
        assert!(row.departed_ms > 0 && row.reason.contains("lost its stream"), "{row:?}");
    }
    for replica in &pair.replicas {
        let fleet = status(replica).await.fleet.unwrap();
        assert_eq!((fleet.no_agent, fleet.nodes, fleet.agent_versions[0].agents), (1, 3, 2));
        assert!(metrics(replica).await.contains("headgate_control_plane_nodes_absent{reason=\"lost\"} 1"));
    }
    let everywhere = sum(&pair, EVERYWHERE);
    pair.change_both([removed()]);
    program(&pair.replicas[0], &mut a).await;
    program(&pair.replicas[1], &mut c).await;
    let done = page.change(pair.replicas[0].store.version(), "done").await;
    assert_eq!((done.nodes, done.missing), (2, 1), "{done:?}");
    eventually("one replica has recorded the change", async || sum(&pair, EVERYWHERE) == everywhere + 1).await;
    let _b = pair.agent(0, "b").await;
    for page in [&mut page, &mut other] {
        page.until_states(["up_to_date"; 3]).await;
        assert_eq!((page.rows["b"].replica.as_str(), page.rows["b"].departed_ms), ("replica-1", 0));
    }
    for replica in &pair.replicas {
        assert_eq!(status(replica).await.fleet.unwrap().no_agent, 0);
        let metrics = metrics(replica).await;
        assert!(metrics.contains("headgate_control_plane_nodes_absent{reason=\"lost\"} 0"), "{metrics}");
        assert!(metrics.contains("headgate_build_info{version=") && metrics.contains("\nprocess_open_fds "));
        let others = replica.metric("headgate_control_plane_agents_of_other_version");
        assert_eq!(others, replica.metric("headgate_streams"), "the version of all agents is \"test\"");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_name_zone_and_pool_also_of_nodes_without_an_agent() {
    let pair = Pair::start(NEVER).await;
    let _a = pair.agent(0, "a").await;
    let mut page = Page::open(&pair.replicas[0]).await;
    page.until_states(["up_to_date", "no_agent", "no_agent"]).await;
    let NodeChange::Apply(node) = apply("a") else { panic!("not a Node") };
    for name in ["a", "b"] {
        let node = Node { name: name.into(), zone: Some("zone-1".into()), ..node.clone() };
        let nodes = vec![NodeChange::Apply(node)];
        let pools = vec![(name.into(), Some("large".into()))];
        for replica in &pair.replicas {
            replica.store.commit(Transaction { nodes: nodes.clone(), pools: pools.clone(), ..Transaction::default() });
        }
    }
    let place = |page: &Page, node: &str| (page.rows[node].zone.clone(), page.rows[node].pool.clone());
    let expected = ("zone-1".to_owned(), "large".to_owned());
    page.until("a and b have a place", |page| ["a", "b"].iter().all(|node| place(page, node) == expected)).await;
    let listed = pair.replicas[1].agents().await;
    let pools: Vec<_> = listed.iter().map(|agent| agent.pool.as_str()).collect();
    assert_eq!(pools, ["large", "large", ""]);
    assert_eq!(status(&pair.replicas[0]).await.services_without_ready_endpoints, 0);
    for replica in &pair.replicas {
        let gone = [POD, OTHER].map(|address| Change::RemoveEndpoint(key(1), address.into()));
        replica.put(gone);
    }
    assert_eq!(status(&pair.replicas[0]).await.services_without_ready_endpoints, 1);
}
