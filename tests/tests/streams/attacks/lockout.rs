//! Services that take the addresses of replicas and API servers.

use std::collections::BTreeSet;

use headgate_control_plane::{
    model::{NodeChange, Sink as _},
    serve::{Security, Settings},
};
use headgate_core::{Change, Endpoint, EndpointPort, Node, Protocol, Service, ServiceKey, ServicePort};
use headgate_proto::v1;

use crate::{
    client::Client,
    replica::{Replica, cluster, key, node, remove_endpoint, settings},
};

/// The fields of the hostile Service that are problems, and whether the messages name these
/// addresses and ports.
async fn problems(replica: &Replica) -> Vec<(String, String)> {
    let status = replica.status().await;
    let of_service = status.problems.into_iter().filter(|problem| problem.object == "Service tenant/hostile");
    of_service.map(|problem| (problem.field, problem.message)).collect()
}

/// What the agent knows to be reserved, as addresses and ports; a NodePort has no address.
fn reserved(client: &Client) -> BTreeSet<(Vec<u8>, u32)> {
    let last = client.nodes.last().map(|own| own.reserved.clone()).unwrap_or_default();
    last.into_iter().map(|v1::ReservedFrontend { address, port, .. }| (address.to_vec(), port)).collect()
}

/// The Service of the replicas has an endpoint on a node, and the options name an API server. The
/// Service of the API servers has an endpoint too. What they need is reserved as long as they are
/// there, and agents hear of each change.
#[tokio::test]
async fn what_replicas_and_api_servers_need_is_reserved_while_they_need_it() {
    let api_server = Some(("198.51.100.7".to_owned(), 6443));
    let settings = Settings { api_server, balance_service: Some(key(1)), ..settings() };
    let replica = Replica::start_with(settings, Security::Plaintext).await;
    replica.put(cluster(1));
    let of_node = Node { addresses: vec![[10, 0, 1, 1].into()], ..node("node-1", None) };
    replica.put_nodes([NodeChange::Apply(of_node)]);
    replica.store.synced();
    let port = replica.running.local_addr.port();
    let mut client = replica.open("node-1").await;
    let expected = [(vec![198, 51, 100, 7], 6443), (vec![10, 0, 1, 1], port.into()), (vec![10, 0, 1, 2], port.into())];
    client.until(|client| expected.iter().all(|one| reserved(client).contains(one))).await;
    assert!(reserved(&client).contains(&(Vec::new(), port.into())), "the NodePort of the node");

    let kubernetes = ServiceKey::new("default", "kubernetes");
    let api_port = [EndpointPort::new("https", Protocol::Tcp, 6443)];
    let server = Endpoint::new([192, 0, 2, 9].into(), api_port.into());
    replica.put([Change::Endpoint(kubernetes.clone(), server)]);
    client.until(|client| reserved(client).contains(&(vec![192, 0, 2, 9], 6443))).await;

    let ports = [(6443, 0), (port, 0), (80, port)];
    let ports = ports.map(|(port, node_port)| {
        let name = format!("p{port}");
        ServicePort { name: name.as_str().into(), protocol: Protocol::Tcp, port, node_port }
    });
    // The ClusterIP of a Service is never left out.
    let cluster_ip = [198, 51, 100, 7].into();
    let mut hostile = Service::new(ServiceKey::new("tenant", "hostile"), vec![cluster_ip], ports.into());
    hostile.external_ips = vec![[192, 0, 2, 9].into()];
    replica.put([Change::from(hostile.clone())]);
    let found = problems(&replica).await;
    let [(field, message)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(field, "spec.externalIPs");
    assert!(message.starts_with("192.0.2.9 port 6443/TCP is reserved, because"), "{message}");
    assert!(message.contains("give this Service another address or port"), "{message}");

    hostile.external_ips.clear();
    replica.put([Change::from(hostile.clone())]);
    let found = problems(&replica).await;
    let [(field, message)] = &found[..] else { panic!("{found:?}") };
    assert!(field == "spec.ports" && message.contains(&format!("node port {port}/TCP is reserved")), "{found:?}");

    // The replica and the API server move.
    replica.put([remove_endpoint(1, 1), Change::RemoveEndpoint(kubernetes, [192, 0, 2, 9].into())]);
    client.until(|client| reserved(client).len() < 4 && !reserved(client).contains(&(Vec::new(), port.into()))).await;
    assert_eq!(problems(&replica).await, []);
    assert!(reserved(&client).contains(&(vec![198, 51, 100, 7], 6443)), "the options still name it");
}
