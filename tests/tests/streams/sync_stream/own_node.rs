//! Tests of `OwnNode`: each agent receives its own Node, and never an older version of this Node.

use headgate_control_plane::{
    model::{NodeChange, Sink as _, Transaction},
    objects::SourceKind,
};
use headgate_proto::v1::{self, source_position::Kind};

use crate::{
    client::{Client, Held},
    replica::{self, Replica, service},
};

fn node(name: &str, zone: &str) -> NodeChange {
    NodeChange::Apply(replica::node(name, Some(zone)))
}

fn put_nodes(replica: &Replica, position: u64, nodes: Vec<NodeChange>) {
    let positions = vec![(SourceKind::Nodes, position)];
    replica.store.commit(Transaction { nodes, positions, ..Transaction::default() });
}

/// The state of an agent whose Node was read at this position of the source.
fn held_at(nodes_position: u64) -> Held {
    let positions = [(Kind::Services.into(), 10), (Kind::Nodes.into(), nodes_position)];
    Held { positions: positions.into(), ..Held::default() }
}

/// The position of the source for each Node that was sent.
fn positions(client: &Client) -> Vec<u64> {
    let position = |own: &v1::OwnNode| {
        let position = own.position.unwrap();
        assert_eq!(position.kind(), Kind::Nodes);
        position.position
    };
    client.nodes.iter().map(position).collect()
}

/// The zone of each Node that was sent; `None` if the source has no such Node.
fn zones(client: &Client) -> Vec<Option<String>> {
    client.nodes.iter().map(|own| own.node.as_ref().map(|node| node.zone.clone())).collect()
}

#[tokio::test]
async fn an_older_node_is_withheld_until_the_replica_has_caught_up() {
    for known in [Some("a"), None] {
        let replica = Replica::start().await;
        replica.put_at(Some(10), [service(1, 80)]);
        put_nodes(&replica, 10, known.map(|zone| node("n1", zone)).into_iter().collect());
        let mut client = replica.resume("n1", held_at(20)).await;
        // The replica withholds only the Node, and sends all other resources.
        client.reach(1).await;
        replica.put_at(Some(11), [service(1, 81)]);
        client.reach(2).await;
        assert_eq!(zones(&client), [], "a Node of position 10 was sent to an agent with a Node of position 20");
        put_nodes(&replica, 19, vec![node("n2", "a")]);
        put_nodes(&replica, 20, vec![node("n1", "b")]);
        client.until(|client| !client.nodes.is_empty()).await;
        assert_eq!(zones(&client), [Some("b".to_owned())]);
        assert_eq!(positions(&client), [20]);
    }
}

#[tokio::test]
async fn each_agent_receives_its_own_node_with_the_position_of_the_source() {
    let replica = Replica::start().await;
    put_nodes(&replica, 10, vec![node("n1", "a")]);
    let (mut first, mut second) = (replica.open("n1").await, replica.open("n2").await);
    first.until(|client| client.nodes.len() == 1).await;
    second.until(|client| client.nodes.len() == 1).await;
    put_nodes(&replica, 11, vec![node("n1", "b")]);
    put_nodes(&replica, 12, vec![node("n2", "c")]);
    first.until(|client| client.nodes.len() == 2).await;
    second.until(|client| client.nodes.len() == 2).await;
    put_nodes(&replica, 13, vec![NodeChange::Remove("n1".into())]);
    first.until(|client| client.nodes.len() == 3).await;
    assert_eq!(zones(&first), [Some("a".into()), Some("b".into()), None]);
    assert_eq!(zones(&second), [None, Some("c".into())]);
    assert_eq!((positions(&first), positions(&second)), (vec![10, 11, 13], vec![10, 12]));
    for client in [&first, &second] {
        let revisions: Vec<u64> = client.nodes.iter().map(|own| own.revision).collect();
        assert_eq!(revisions, (1..=client.nodes.len() as u64).collect::<Vec<_>>());
    }
    // Batches, which every agent receives, contain no position of Nodes.
    replica.put_at(Some(14), [service(1, 80)]);
    first.until(|client| client.held.version == 1).await;
    assert_eq!(first.held.positions, [(Kind::Services.into(), 14)].into());
}
