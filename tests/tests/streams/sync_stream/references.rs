//! Tests with references (discovery.proto, section 13) that collide.

use std::collections::HashMap;

use headgate_core::{Change, Service, ServiceKey, reference::Referrer};

use crate::replica::Replica;

use super::{assert_same, endpoint, open, service};

#[tokio::test]
async fn names_with_colliding_references_end_no_stream() {
    let replica = Replica::start().await;
    let mut client = open(&replica, "n1").await;
    // Any node can compute collisions, since `Welcome` contains the epoch.
    let referrer = Referrer::new(client.welcome.epoch);
    let key = |number: u32| ServiceKey::new("default", &format!("s{number}"));
    let mut seen = HashMap::new();
    let mut found = (0..).find_map(|number| Some([seen.insert(referrer.service(&key(number)), number)?, number]));
    let [one, other] = found.take().unwrap().map(key);
    let named = |key: &ServiceKey, change: Change| match change {
        Change::Service(service) => Change::from(Service { key: key.clone(), ..*service }),
        Change::Endpoint(_, endpoint) => Change::Endpoint(key.clone(), endpoint),
        other => other,
    };
    replica.put([named(&one, service(1, 80)), named(&other, service(2, 80))]);
    client.reach(1).await;
    replica.put([Change::RemoveService(other)]);
    client.reach(2).await;
    replica.put([named(&one, endpoint(1, 1, 80))]);
    client.reach(3).await;
    assert_same(&client, &replica);
    replica.running.stop().await;
}
