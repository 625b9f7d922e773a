//! Compares Headgate's client of IPVS with `ipvsadm`. The client must list what `ipvsadm` programs,
//! and `ipvsadm` must print what the client programs.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
};

use headgate_netlink::route::{Change, Prefix, Routing};
use headgate_tests::{
    testbed::process::{output, sorted_lines},
    uml,
};
use ipvs_netlink::{
    Command, Destination, DestinationEntry, Family, Forwarding, Ipvs, Netmask, Persistence, Protocol, SchedulerFlags,
    Service, ServiceId, Timeouts,
};

use crate::connect_soon;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn tcp(address: &str) -> ServiceId {
    ServiceId::new(Protocol::Tcp, at(address))
}

fn execute_all(ipvs: &mut Ipvs, commands: &[Command]) {
    let refused = ipvs.execute(commands).unwrap();
    let explained: Vec<_> = refused.iter().map(|refused| commands[refused.index].explain(&refused.refusal)).collect();
    assert!(explained.is_empty(), "{explained:?}");
}

/// Services of every kind with their destinations, and the `ipvsadm` arguments that create them.
fn table() -> (Vec<(Service, Vec<Destination>)>, &'static str) {
    let persistent = Service::new(tcp("10.96.0.10:80"), "rr").persistent(10_800);
    let mut one_packet = Service::new(ServiceId::new(Protocol::Udp, at("[fd00:96::a]:53")), "mh");
    one_packet.one_packet = true;
    one_packet.scheduler_flags = SchedulerFlags { fallback: true, port: true };
    let mut masked = Service::new(ServiceId::new(Protocol::Sctp, at("10.96.0.11:9")), "wrr");
    masked.persistence = Some(Persistence { timeout_seconds: 60, netmask: Netmask::V4([255, 255, 255, 0].into()) });
    let mut masked_v6 = Service::new(tcp("[fd00:96::b]:80"), "lc");
    masked_v6.persistence = Some(Persistence { timeout_seconds: 120, netmask: Netmask::V6(64) });
    let mut marked = Service::new(ServiceId::FirewallMark { family: Family::V4, mark: 7 }, "sh");
    marked.scheduler_flags.port = true;
    let marked_v6 = Service::new(ServiceId::FirewallMark { family: Family::V6, mark: 8 }, "nq");
    let mut tunnel = Destination::new(at("10.244.1.5:0"));
    tunnel.forwarding = Forwarding::Tunnel;
    let mut direct = Destination::new(at("[fd00:244::5]:0")).weighing(0);
    direct.forwarding = Forwarding::Direct;
    let mut limited = Destination::new(at("10.244.2.7:8080")).weighing(65_535);
    (limited.upper_threshold, limited.lower_threshold) = (100, 50);
    let services = vec![
        (persistent, vec![Destination::new(at("10.244.1.5:8080")), limited]),
        (one_packet, vec![Destination::new(at("[fd00:244::5]:5353"))]),
        (masked, vec![]),
        (masked_v6, vec![]),
        (marked, vec![tunnel]),
        (marked_v6, vec![direct]),
    ];
    let text = "\
        -A -t 10.96.0.10:80 -s rr -p 10800\n\
        -a -t 10.96.0.10:80 -r 10.244.1.5:8080 -m -w 1\n\
        -a -t 10.96.0.10:80 -r 10.244.2.7:8080 -m -w 65535\n\
        -A -u [fd00:96::a]:53 -s mh -o -b mh-fallback,mh-port\n\
        -a -u [fd00:96::a]:53 -r [fd00:244::5]:5353 -m -w 1\n\
        -A --sctp-service 10.96.0.11:9 -s wrr -p 60 -M 255.255.255.0\n\
        -A -t [fd00:96::b]:80 -s lc -p 120 -M 64\n\
        -A -f 7 -s sh -b sh-port\n\
        -a -f 7 -r 10.244.1.5:0 -i -w 1 --tun-type ipip\n\
        -A -f 8 -6 -s nq\n\
        -a -f 8 -6 -r [fd00:244::5]:0 -g -w 0\n";
    (services, text)
}

/// All virtual servers of the kernel and their destinations, sorted.
fn listed(ipvs: &mut Ipvs) -> Vec<(Service, Vec<Destination>)> {
    let mut all = Vec::new();
    for entry in ipvs.services().unwrap() {
        let destinations = ipvs.destinations(entry.service.id).unwrap();
        let mut destinations: Vec<_> = destinations.iter().map(|entry| entry.destination).collect();
        destinations.sort_by_key(|destination| destination.address);
        all.push((entry.service, destinations));
    }
    all.sort_by_key(|(service, _)| service.id);
    all
}

fn sorted(mut all: Vec<(Service, Vec<Destination>)>) -> Vec<(Service, Vec<Destination>)> {
    all.sort_by_key(|(service, _)| service.id);
    all
}

#[test]
fn ipvsadm_prints_what_the_client_programs() {
    uml::inside(|| {
        let (services, text) = table();
        let mut ipvs = Ipvs::open().unwrap();
        let mut commands = Vec::new();
        for (service, destinations) in &services {
            commands.push(Command::AddService(service.clone()));
            commands.extend(destinations.iter().map(|destination| Command::AddDestination(service.id, *destination)));
        }
        execute_all(&mut ipvs, &commands);
        assert_eq!(sorted_lines(&output("ipvsadm", &["-Sn"])), sorted_lines(text));
        let thresholds = output("ipvsadm", &["-Ln", "--thresholds"]);
        let limits: Vec<_> =
            thresholds.lines().find(|line| line.contains("10.244.2.7:8080")).unwrap().split_whitespace().collect();
        assert_eq!(limits[2..4], ["100", "50"], "{thresholds}");
        assert_eq!(listed(&mut ipvs), sorted(services));
    });
}

#[test]
fn the_client_lists_what_ipvsadm_programs() {
    uml::inside(|| {
        let (services, text) = table();
        for line in text.lines() {
            let mut arguments: Vec<_> = line.split_whitespace().collect();
            if line.contains("10.244.2.7") {
                arguments.extend(["-x", "100", "-y", "50"]);
            }
            output("ipvsadm", &arguments);
        }
        let mut ipvs = Ipvs::open().unwrap();
        assert_eq!(listed(&mut ipvs), sorted(services.clone()));
        for (service, _) in services {
            assert_eq!(ipvs.service(service.id).unwrap().unwrap().service, service);
        }
        assert_eq!(ipvs.service(tcp("10.96.0.99:80")).unwrap(), None);
        assert_eq!(ipvs.destinations(tcp("10.96.0.99:80")).unwrap(), []);
    });
}

#[test]
fn services_and_destinations_are_changed_and_removed() {
    uml::inside(|| {
        let mut ipvs = Ipvs::open().unwrap();
        let service = Service::new(tcp("10.96.0.10:80"), "rr");
        let destinations = [at("10.244.1.5:80"), at("10.244.2.7:80"), at("10.244.3.9:80")].map(Destination::new);
        let mut commands = vec![Command::AddService(service.clone())];
        commands.extend(destinations.map(|destination| Command::AddDestination(service.id, destination)));
        execute_all(&mut ipvs, &commands);
        let changed = Service::new(service.id, "wlc").persistent(300);
        execute_all(
            &mut ipvs,
            &[
                Command::SetService(changed.clone()),
                Command::SetDestination(service.id, destinations[1].weighing(0)),
                Command::RemoveDestination(service.id, destinations[2].address),
            ],
        );
        assert_eq!(listed(&mut ipvs), [(changed, vec![destinations[0], destinations[1].weighing(0)])]);
        execute_all(&mut ipvs, &[Command::SetService(service.clone())]);
        assert_eq!(ipvs.service(service.id).unwrap().unwrap().service, service, "the service still has persistence");
        execute_all(&mut ipvs, &[Command::RemoveService(service.id)]);
        assert_eq!(listed(&mut ipvs), []);
        assert_eq!(output("ipvsadm", &["-Sn"]), "");
    });
}

#[test]
fn timeouts_are_set_and_zero_keeps_the_current_one() {
    uml::inside(|| {
        let mut ipvs = Ipvs::open().unwrap();
        ipvs.set_timeouts(&Timeouts { tcp_seconds: 1000, tcp_fin_seconds: 100, udp_seconds: 10 }).unwrap();
        let printed = output("ipvsadm", &["-L", "--timeout"]);
        assert_eq!(printed.trim(), "Timeout (tcp tcpfin udp): 1000 100 10");
        ipvs.set_timeouts(&Timeouts { udp_seconds: 20, ..Timeouts::default() }).unwrap();
        let printed = output("ipvsadm", &["-L", "--timeout"]);
        assert_eq!(printed.trim(), "Timeout (tcp tcpfin udp): 1000 100 20");
    });
}

#[test]
fn refused_commands_are_named_and_the_others_are_executed() {
    uml::inside(|| {
        let mut ipvs = Ipvs::open().unwrap();
        let service = |port: u16| Service::new(ServiceId::new(Protocol::Tcp, ([10, 96, 0, 10], port).into()), "rr");
        let id = service(1).id;
        let mut crossed = Destination::new(at("10.244.0.1:1"));
        (crossed.upper_threshold, crossed.lower_threshold) = (1, 2);
        let present = Destination::new(at("10.244.0.2:1"));
        // The commands do not fit into one send. The refused commands are in the second send, and
        // the last command of this send is refused too.
        let mut commands: Vec<_> = (1..=200).map(|port| Command::AddService(service(port))).collect();
        let first = commands.len();
        let refused = [
            (Command::AddService(service(7)), libc::EEXIST),
            (Command::AddService(Service::new(tcp("10.96.0.11:1"), "nosuch")), libc::ENOENT),
            (Command::AddDestination(tcp("10.96.0.12:1"), present), libc::ESRCH),
            (Command::AddDestination(id, crossed), libc::ERANGE),
            (Command::SetDestination(id, present), libc::ENOENT),
            (Command::RemoveDestination(id, present.address), libc::ENOENT),
            (Command::RemoveService(tcp("10.96.0.13:1")), libc::ESRCH),
        ];
        commands.extend(refused.iter().map(|(command, _)| command.clone()));
        commands.push(Command::AddDestination(id, present));
        commands.push(Command::AddDestination(id, present));
        let found: Vec<_> = ipvs.execute(&commands).unwrap();
        let found: Vec<_> = found.iter().map(|refused| (refused.index, refused.refusal.code)).collect();
        let mut expected: Vec<_> = (first..).zip(refused.iter().map(|(_, code)| *code)).collect();
        expected.push((commands.len() - 1, libc::EEXIST));
        assert_eq!(found, expected);
        assert_eq!(ipvs.services().unwrap().len(), 200);
        assert_eq!(ipvs.destinations(id).unwrap()[0].destination, present);
    });
}

#[test]
fn large_tables_are_listed_completely() {
    uml::inside(|| {
        let mut ipvs = Ipvs::open().unwrap();
        let ids: Vec<_> = (0..3000_u16)
            .map(|i| ServiceId::new(Protocol::Tcp, ([10, 96, i.to_be_bytes()[0], i.to_be_bytes()[1]], 80).into()))
            .collect();
        let services = ids.iter().map(|id| Command::AddService(Service::new(*id, "wlc")));
        let destinations = (0..2000_u16).map(|port| {
            let destination = Destination::new(([10, 244, 0, 1], port).into());
            Command::AddDestination(ids[0], destination)
        });
        execute_all(&mut ipvs, &services.chain(destinations).collect::<Vec<_>>());
        let found: BTreeSet<_> = ipvs.services().unwrap().iter().map(|entry| entry.service.id).collect();
        assert_eq!(found, ids.iter().copied().collect());
        let found = ipvs.destinations(ids[0]).unwrap();
        let ports: BTreeSet<_> = found.iter().map(|entry| entry.destination.address.port()).collect();
        assert_eq!((found.len(), ports.len()), (2000, 2000));
    });
}

#[test]
fn active_and_inactive_connections_are_counted() {
    uml::inside(|| {
        for (service, endpoint) in [("10.96.0.10:80", "192.0.2.1"), ("[fd00:96::a]:80", "2001:db8::1")] {
            let mut routing = Routing::open().unwrap();
            let name = if service.starts_with('[') { "hg6" } else { "hg4" };
            routing.add_dummy(name).unwrap();
            output("ip", &["link", "set", name, "up"]);
            let link = routing.link(name).unwrap().unwrap().index;
            let addresses = [at(service).ip(), endpoint.parse().unwrap()];
            let changes = addresses.map(|address| Change::AddAddress { link, address: Prefix::host(address) });
            routing.change(&changes, |index, refusal| panic!("{index}: {refusal}")).unwrap();
            let listener = TcpListener::bind((addresses[1], 0)).unwrap();
            let id = tcp(service);
            let mut ipvs = Ipvs::open().unwrap();
            let destination = Destination::new(listener.local_addr().unwrap());
            execute_all(
                &mut ipvs,
                &[Command::AddService(Service::new(id, "rr")), Command::AddDestination(id, destination)],
            );
            let mut client = connect_soon(at(service));
            let (mut server, _) = listener.accept().unwrap();
            client.write_all(b"hello").unwrap();
            server.read_exact(&mut [0; 5]).unwrap();
            let entry = ipvs.destinations(id).unwrap()[0];
            assert_eq!((entry.active_connections, entry.inactive_connections), (1, 0), "{entry:?}");
            // A destination of weight 0 keeps its connections. Graceful removal of endpoints
            // depends on this behaviour.
            execute_all(&mut ipvs, &[Command::SetDestination(id, destination.weighing(0))]);
            client.write_all(b"again").unwrap();
            server.read_exact(&mut [0; 5]).unwrap();
            assert_eq!(ipvs.destinations(id).unwrap()[0].active_connections, 1);
            drop((client, server));
            let ended = wait_for(&mut ipvs, id, |entry| entry.active_connections == 0);
            assert_eq!(ended.inactive_connections, 1);
        }
    });
}

/// Waits until the service's only destination is as expected, and returns it.
fn wait_for(ipvs: &mut Ipvs, id: ServiceId, is_expected: impl Fn(&DestinationEntry) -> bool) -> DestinationEntry {
    let mut entry = ipvs.destinations(id).unwrap()[0];
    for _ in 0..6000 {
        if is_expected(&entry) {
            return entry;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
        entry = ipvs.destinations(id).unwrap()[0];
    }
    panic!("the destination is not as expected after 60 s: {entry:?}");
}
