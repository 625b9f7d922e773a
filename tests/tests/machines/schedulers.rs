//! Real connections show that each scheduler chooses endpoints by its documented rule. The tests
//! use the kernel's IPVS inside User-Mode Linux.
//!
//! Clients, virtual servers and endpoints are addresses of one dummy device. An endpoint sends its
//! number to each client and holds the connection until the client closes it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use headgate_core::{
    Weight,
    ipvs::{Scheduler, Settings},
};
use headgate_netlink::route::{Change, Prefix, Routing};
use headgate_tests::{testbed::process::output, uml};
use ipvs_netlink::{Command, Destination, Ipvs, Protocol, Service, ServiceId};
use socket2::{Domain, Socket, Type};

const PORT: u16 = 80;

fn service_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, number)
}

fn client_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 0, number)
}

fn endpoint(number: u8) -> SocketAddr {
    (Ipv4Addr::new(192, 0, 2, number), PORT).into()
}

/// A connection and the number of its endpoint.
struct Held {
    endpoint: u8,
    stream: TcpStream,
}

struct Rig {
    ipvs: Ipvs,
    endpoints: u8,
}

impl Rig {
    /// Adds the addresses, and starts endpoints numbered from 1.
    fn new(endpoints: u8) -> Self {
        let mut routing = Routing::open().unwrap();
        routing.add_dummy("hg0").unwrap();
        let link = routing.link("hg0").unwrap().unwrap().index;
        output("ip", &["link", "set", "hg0", "up"]);
        let addresses = (1..=endpoints)
            .map(|number| endpoint(number).ip())
            .chain((1..=40).map(|number| service_address(number).into()))
            .chain((1..=40).map(|number| client_address(number).into()));
        let changes: Vec<_> =
            addresses.map(|address| Change::AddAddress { link, address: Prefix::host(address) }).collect();
        routing.change(&changes, |index, refusal| panic!("{index}: {refusal}")).unwrap();
        for number in 1..=endpoints {
            let listener = TcpListener::bind(endpoint(number)).unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    std::thread::spawn(move || answer(stream.unwrap(), number));
                }
            });
        }
        Self { ipvs: Ipvs::open().unwrap(), endpoints }
    }

    fn execute_all(&mut self, commands: &[Command]) {
        let refused = self.ipvs.execute(commands).unwrap();
        assert!(refused.is_empty(), "{:?}", commands[refused[0].index].explain(&refused[0].refusal));
    }

    /// Adds a virtual server as the agent configures it. `weights` are the weights of the endpoints
    /// in order of their numbers.
    fn serve(&mut self, number: u8, scheduler: Scheduler, weights: &[u32]) -> ServiceId {
        self.serve_with(number, scheduler, weights, |service| service)
    }

    fn serve_with(
        &mut self,
        number: u8,
        scheduler: Scheduler,
        weights: &[u32],
        change: impl Fn(Service) -> Service,
    ) -> ServiceId {
        assert!(weights.len() <= usize::from(self.endpoints));
        let id = ServiceId::new(Protocol::Tcp, (service_address(number), PORT).into());
        let mut service = Service::new(id, scheduler.as_str());
        service.scheduler_flags.port = Settings::new(scheduler).hashes_source_port;
        let mut commands = vec![Command::AddService(change(service))];
        let destinations =
            (1..).zip(weights).map(|(number, weight)| Destination::new(endpoint(number)).weighing(*weight));
        commands.extend(destinations.map(|destination| Command::AddDestination(id, destination)));
        self.execute_all(&commands);
        id
    }

    fn weigh(&mut self, id: ServiceId, number: u8, weight: u32) {
        self.execute_all(&[Command::SetDestination(id, Destination::new(endpoint(number)).weighing(weight))]);
    }

    /// Closes the connections to an endpoint, and waits until IPVS counts none of them as active.
    fn close(&mut self, id: ServiceId, number: u8, held: &mut Vec<Held>) {
        held.retain(|connection| connection.endpoint != number);
        for _ in 0..1000 {
            let found = self.ipvs.destinations(id).unwrap();
            let entry = found.iter().find(|entry| entry.destination.address == endpoint(number)).unwrap();
            if entry.active_connections == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("connections of endpoint {number} are still counted as active after 10 s");
    }
}

fn answer(mut stream: TcpStream, number: u8) {
    use std::io::Write;
    if stream.write_all(&[number]).is_ok() {
        // The read returns when the client closes the connection.
        let _ = stream.read(&mut [0]);
    }
}

/// Connects from a client's address to a virtual server. Port 0 means any source port.
fn connect(client: u8, port: u16, service: u8) -> Held {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((client_address(client), port)).into()).unwrap();
    let to = SocketAddr::from((service_address(service), PORT));
    socket.connect_timeout(&to.into(), Duration::from_secs(20)).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut number = [0];
    stream.read_exact(&mut number).unwrap();
    Held { endpoint: number[0], stream }
}

/// Opens `count` connections from one client, one after the other, and holds them all.
fn hold(service: u8, count: usize) -> Vec<Held> {
    (0..count).map(|_| connect(1, 0, service)).collect()
}

fn order(held: &[Held]) -> Vec<u8> {
    held.iter().map(|connection| connection.endpoint).collect()
}

/// The number of connections of each endpoint.
fn shares(held: &[Held]) -> BTreeMap<u8, usize> {
    held.iter().fold(BTreeMap::new(), |mut shares, connection| {
        *shares.entry(connection.endpoint).or_default() += 1;
        shares
    })
}

#[test]
fn rr_uses_endpoints_in_turn() {
    uml::inside(|| {
        let mut rig = Rig::new(4);
        rig.serve(1, Scheduler::RoundRobin, &[1, 1, 1, 1]);
        let order = order(&hold(1, 12));
        let first: BTreeSet<u8> = order[..4].iter().copied().collect();
        assert_eq!(first, (1..=4).collect());
        assert!(order.chunks(4).all(|round| *round == order[..4]), "{order:?}");
    });
}

#[test]
fn wrr_uses_endpoints_in_turn_by_weight() {
    uml::inside(|| {
        let mut rig = Rig::new(3);
        rig.serve(1, Scheduler::WeightedRoundRobin, &[3, 2, 1]);
        let held = hold(1, 24);
        assert_eq!(shares(&held), [(1, 12), (2, 8), (3, 4)].into());
        let order = order(&held);
        assert!(order.chunks(6).all(|round| *round == order[..6]), "{order:?}");
    });
}

#[test]
fn lc_uses_the_endpoint_with_the_fewest_connections_and_ignores_weights() {
    uml::inside(|| {
        let mut rig = Rig::new(2);
        let id = rig.serve(1, Scheduler::LeastConnection, &[9, 1]);
        let mut held = hold(1, 6);
        assert_eq!(shares(&held), [(1, 3), (2, 3)].into());
        rig.close(id, 2, &mut held);
        assert_eq!(order(&hold(1, 3)), [2, 2, 2]);
    });
}

#[test]
fn wlc_uses_the_endpoint_with_the_fewest_connections_for_its_weight() {
    uml::inside(|| {
        let mut rig = Rig::new(2);
        let id = rig.serve(1, Scheduler::WeightedLeastConnection, &[3, 1]);
        let mut held = hold(1, 12);
        assert_eq!(shares(&held), [(1, 9), (2, 3)].into());
        rig.close(id, 1, &mut held);
        assert_eq!(order(&hold(1, 5)), [1; 5]);
    });
}

#[test]
fn lblc_keeps_an_endpoint_until_its_connections_exceed_its_weight() {
    uml::inside(|| {
        let mut rig = Rig::new(3);
        let id = rig.serve(1, Scheduler::LocalityBasedLeastConnection, &[2, 2, 2]);
        let mut held = hold(1, 6);
        let order_before = order(&held);
        let (first, second) = (order_before[0], order_before[3]);
        assert_eq!(
            order_before,
            [first, first, first, second, second, second],
            "expected a second endpoint after more than two connections"
        );
        assert_ne!(first, second);
        rig.close(id, first, &mut held);
        let third = 6 - first - second;
        assert_eq!(
            order(&hold(1, 1)),
            [third],
            "expected the third endpoint: lblc forgets the first, and the third has the fewest connections"
        );
    });
}

#[test]
fn lblcr_returns_to_an_endpoint_of_its_server_set() {
    uml::inside(|| {
        let mut rig = Rig::new(3);
        let id = rig.serve(1, Scheduler::LocalityBasedLeastConnectionWithReplication, &[2, 2, 2]);
        let mut held = hold(1, 6);
        let order_before = order(&held);
        let (first, second) = (order_before[0], order_before[3]);
        assert_eq!(order_before, [first, first, first, second, second, second]);
        assert_ne!(first, second);
        rig.close(id, first, &mut held);
        assert_eq!(
            order(&hold(1, 1)),
            [first],
            "expected the first endpoint, which is still in the set and has the fewest connections"
        );
    });
}

#[test]
fn sh_chooses_by_the_address_of_the_client() {
    uml::inside(|| {
        let mut rig = Rig::new(4);
        rig.serve(1, Scheduler::SourceHashing, &[1; 4]);
        let mut used = BTreeSet::new();
        for client in 1..=20 {
            let numbers: BTreeSet<u8> = (0..4).map(|_| connect(client, 0, 1).endpoint).collect();
            assert_eq!(numbers.len(), 1, "client {client}: {numbers:?}");
            used.extend(numbers);
        }
        assert_eq!(used.len(), 4, "{used:?}");
    });
}

#[test]
fn dh_chooses_by_the_address_of_the_virtual_server() {
    uml::inside(|| {
        let mut rig = Rig::new(4);
        let mut used = BTreeSet::new();
        for service in 1..=20 {
            rig.serve(service, Scheduler::DestinationHashing, &[1; 4]);
            let numbers: BTreeSet<u8> = (1..=4).map(|client| connect(client, 0, service).endpoint).collect();
            assert_eq!(numbers.len(), 1, "service {service}: {numbers:?}");
            used.extend(numbers);
        }
        assert_eq!(used.len(), 4, "{used:?}");
    });
}

#[test]
fn sed_uses_the_endpoint_with_the_shortest_expected_delay() {
    uml::inside(|| {
        let mut rig = Rig::new(2);
        rig.serve(1, Scheduler::ShortestExpectedDelay, &[4, 1]);
        // The expected delay is (connections + 1) / weight. The idle second endpoint has the longer
        // delay until the first endpoint has three connections. If both delays are equal, IPVS may
        // use either endpoint.
        let held = hold(1, 10);
        assert_eq!(order(&held)[..3], [1, 1, 1]);
        assert_eq!(shares(&held), [(1, 8), (2, 2)].into());
    });
}

#[test]
fn nq_uses_an_idle_endpoint_and_ignores_weights() {
    uml::inside(|| {
        let mut rig = Rig::new(2);
        let id = rig.serve(1, Scheduler::NeverQueue, &[4, 1]);
        let mut held = hold(1, 5);
        let first: BTreeSet<u8> = order(&held)[..2].iter().copied().collect();
        assert_eq!(first, [1, 2].into(), "an idle endpoint got no connection");
        assert_eq!(order(&held)[2..4], [1, 1], "the next connections do not follow the expected delay");
        rig.close(id, 2, &mut held);
        assert_eq!(order(&hold(1, 1)), [2]);
    });
}

#[test]
fn mh_chooses_by_client_and_port_and_moves_few_clients_when_an_endpoint_is_removed() {
    uml::inside(|| {
        let mut rig = Rig::new(4);
        // The choice depends only on the client and the endpoints, so two virtual servers with
        // equal endpoints make the same choice.
        for (service, weights) in [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 1]), (3, [1, 1, 1, 0])] {
            rig.serve(service, Scheduler::MaglevHashing, &weights);
        }
        let clients = (1..=4).flat_map(|client| (30_000..30_025).map(move |port| (client, port)));
        let (mut used, mut stayed, mut asked) = (BTreeMap::<u8, u32>::new(), 0, 0);
        for (client, port) in clients {
            let chosen = connect(client, port, 1).endpoint;
            assert_eq!(connect(client, port, 2).endpoint, chosen, "client {client}, port {port}");
            *used.entry(chosen).or_default() += 1;
            let without_the_last = connect(client, port, 3).endpoint;
            assert_ne!(without_the_last, 4);
            if chosen != 4 {
                asked += 1;
                stayed += u32::from(without_the_last == chosen);
            }
        }
        assert!(used.len() == 4 && used.values().all(|count| *count >= 10), "{used:?}");
        // With a hash modulo the number of endpoints, about two of three clients would move.
        assert!(stayed * 10 >= asked * 8, "{stayed} of {asked} clients kept their endpoint");
    });
}

#[test]
fn fo_uses_the_endpoint_with_the_highest_weight() {
    uml::inside(|| {
        let mut rig = Rig::new(3);
        let scheduler = Scheduler::WeightedFailover;
        let weights: Vec<u32> = (0..3).map(|position| scheduler.weight(position, 3, Weight::default())).collect();
        let id = rig.serve(1, scheduler, &weights);
        assert_eq!(order(&hold(1, 5)), [1; 5]);
        rig.weigh(id, 1, 0);
        assert_eq!(order(&hold(1, 5)), [2; 5]);
        rig.weigh(id, 2, 0);
        assert_eq!(order(&hold(1, 5)), [3; 5]);
        rig.weigh(id, 1, weights[0]);
        assert_eq!(order(&hold(1, 5)), [1; 5]);
    });
}

#[test]
fn ovf_fills_one_endpoint_before_the_next() {
    uml::inside(|| {
        let mut rig = Rig::new(3);
        let scheduler = Scheduler::WeightedOverflow;
        let weights: Vec<u32> = (0..3).map(|position| scheduler.weight(position, 3, Weight::default())).collect();
        let id = rig.serve(1, scheduler, &weights);
        // An endpoint is full when it has more connections than its weight.
        let first = usize::try_from(weights[0]).unwrap() + 1;
        let mut held = hold(1, first + 10);
        assert_eq!(shares(&held), [(1, first), (2, 10)].into());
        assert_eq!(weights[2], Scheduler::OVERFLOW_CONNECTIONS);
        rig.close(id, 1, &mut held);
        assert_eq!(order(&hold(1, 1)), [1], "expected the first endpoint, which is no longer full");
    });
}

#[test]
fn persistence_keeps_each_client_on_its_endpoint() {
    uml::inside(|| {
        let mut rig = Rig::new(4);
        let id = rig.serve_with(1, Scheduler::RoundRobin, &[1; 4], |service| service.persistent(300));
        let mut chosen = BTreeMap::new();
        for client in 1..=8 {
            let numbers: BTreeSet<u8> = (0..4).map(|_| connect(client, 0, 1).endpoint).collect();
            assert_eq!(numbers.len(), 1, "client {client}: {numbers:?}");
            chosen.insert(client, numbers.into_iter().next().unwrap());
        }
        // Clients in the same network have separate records, so round robin spreads them.
        let used: Vec<u8> = chosen.values().copied().collect();
        assert_eq!(used[..4].iter().collect::<BTreeSet<_>>().len(), 4, "{used:?}");
        assert_eq!(used[..4], used[4..]);
        let counted = rig.ipvs.destinations(id).unwrap();
        let templates: u32 = counted.iter().map(|entry| entry.persistent_connections).sum();
        assert_eq!(templates, 8, "{counted:?}");
    });
}

#[test]
fn held_connections_stay_open() {
    uml::inside(|| {
        let mut rig = Rig::new(1);
        rig.serve(1, Scheduler::RoundRobin, &[1]);
        for connection in hold(1, 3) {
            connection.stream.set_nonblocking(true).unwrap();
            let error = (&connection.stream).read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        }
    });
}
