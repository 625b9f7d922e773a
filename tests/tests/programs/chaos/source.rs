//! The objects at the API server, and their random changes.

use fastrand::Rng;
use headgate_control_plane::{
    model::{Event, Model},
    objects::{Object, ObjectKind},
};
use headgate_core::{Dirty, State};
use headgate_tests::apiserver::{
    ApiServer, Kind,
    objects::{endpoint_slice, node, service, service_cidr},
};
use serde_json::{Value, json};

const NAMESPACE: &str = "chaos";
const SERVICES: u32 = 30;
const SLICES: u32 = 2;

/// A Service with one endpoint. The port of this endpoint counts the steps. If an agent sees the
/// port decrease, the agent has returned to an older state.
pub(crate) const CLOCK: (&str, &str) = (NAMESPACE, "clock");

pub(crate) struct Churn {
    pub(crate) api: ApiServer,
    pub(crate) rng: Rng,
    time: u16,
}

fn address(rng: &mut Rng, index: u32) -> String {
    format!("10.{}.{}.{}", index % 200, rng.u8(0..4), rng.u8(1..40))
}

impl Churn {
    pub(crate) fn new(seed: u64, nodes: &[String]) -> Self {
        let mut source = Self { api: ApiServer::start().unwrap(), rng: Rng::with_seed(seed), time: 0 };
        let (namespace, name) = CLOCK;
        let clock = service(namespace, name).cluster_ip("10.96.255.1").port("", "TCP", 80, 80).build();
        source.api.apply(clock).unwrap();
        source.api.apply(service_cidr("kubernetes", &["10.96.0.0/16"]).build()).unwrap();
        for name in nodes {
            source.put_node(name);
        }
        for index in 0..SERVICES {
            source.put_service(index);
            (0..SLICES).for_each(|slice| source.put_slice(index, slice));
        }
        source.tick();
        source
    }

    fn put_node(&mut self, name: &str) {
        let zone = format!("zone-{}", self.rng.u8(0..3));
        self.api.apply(node(name).address("InternalIP", "192.0.2.1").zone(&zone).build()).unwrap();
    }

    fn put_service(&mut self, index: u32) {
        let web = service(NAMESPACE, &format!("web-{index}")).cluster_ip(&format!("10.96.1.{}", index + 1));
        let web = web.port("http", "TCP", self.rng.u16(80..90), 8080).node_port(30_000 + u16::try_from(index).unwrap());
        let web = if self.rng.bool() { web.client_ip_affinity(self.rng.u32(1..100)) } else { web };
        self.api.apply(web.build()).unwrap();
    }

    fn put_slice(&mut self, index: u32, slice: u32) {
        let name = format!("web-{index}-{slice}");
        let mut object = endpoint_slice(NAMESPACE, &name, &format!("web-{index}")).port("http", "TCP", 8080);
        // One Service has many endpoints, so that a snapshot needs several packets.
        let count = if index == 0 { self.rng.u8(20..100) } else { self.rng.u8(0..6) };
        let mut addresses: Vec<String> = (0..count).map(|_| address(&mut self.rng, index)).collect();
        addresses.sort();
        addresses.dedup();
        for address in addresses {
            let ready = self.rng.u8(0..8) > 0;
            object = object.endpoint_json(json!({
                "addresses": [address], "nodeName": format!("node-{}", self.rng.u8(0..6)), "zone": "zone-1",
                "conditions": {"ready": ready, "serving": self.rng.bool(), "terminating": !ready},
            }));
        }
        self.api.apply(object.build()).unwrap();
    }

    fn tick(&mut self) {
        self.time += 1;
        let (namespace, name) = CLOCK;
        let slice = endpoint_slice(namespace, "clock-1", name).port("", "TCP", self.time);
        self.api.apply(slice.endpoint("10.250.0.1", "node-0").build()).unwrap();
    }

    /// Changes a few objects at random. Some deletions name missing objects.
    pub(crate) fn churn(&mut self, nodes: &[String]) {
        for _ in 0..self.rng.u8(1..6) {
            let index = self.rng.u32(0..SERVICES);
            let slice = self.rng.u32(0..SLICES);
            match self.rng.u8(0..10) {
                0 => drop(self.api.delete(Kind::Service, NAMESPACE, &format!("web-{index}"))),
                1 => drop(self.api.delete(Kind::EndpointSlice, NAMESPACE, &format!("web-{index}-{slice}"))),
                2 => self.put_service(index),
                3 => {
                    let name = nodes[self.rng.usize(0..nodes.len())].clone();
                    self.put_node(&name);
                }
                _ => self.put_slice(index, slice),
            }
        }
        self.tick();
    }

    /// The state that the objects produce, computed without a watch or stream.
    pub(crate) fn state(&self) -> State {
        let mut model = Model::default();
        for value in Kind::ALL.into_iter().flat_map(|kind| self.api.list(kind)) {
            let kind = ObjectKind::ALL.into_iter().find(|kind| of_kind(*kind, &value)).unwrap();
            model.event(Event::Apply(Box::new(Object::deserialize(kind, &value).unwrap())), "");
        }
        let mut state = State::default();
        for change in model.take_changes().0 {
            state.apply(change.change, &mut Dirty::default());
        }
        state
    }
}

fn of_kind(kind: ObjectKind, value: &Value) -> bool {
    kind.name() == value["kind"]
}
