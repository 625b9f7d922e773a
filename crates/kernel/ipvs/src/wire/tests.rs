#![allow(clippy::unwrap_used)]
use headgate_netlink::{Malformed, Protocol};
use proptest::prelude::*;

use super::*;
use crate::{Forwarding, Persistence, SchedulerFlags};

const FAMILY: u16 = 0x20;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn id(protocol: Protocol, address: &str) -> ServiceId {
    ServiceId::new(protocol, at(address))
}

fn hex(bytes: &[u8]) -> String {
    bytes.chunks(4).map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + " ").collect()
}

fn encoded(of: &Command) -> String {
    hex(command(FAMILY, of).payload())
}

/// Compares with literal bytes of a little-endian machine: most numbers are in the machine's byte
/// order.
#[cfg(target_endian = "little")]
mod golden {
    use super::*;

    const V4: &str =
        "06000100 02000000 06000200 06000000 14000300 0a60000a 00000000 00000000 00000000 06000400 00500000 ";
    const V6: &str =
        "06000100 0a000000 06000200 84000000 14000300 fd000096 00000000 00000000 0000000a 06000400 00500000 ";

    #[test]
    fn services_are_encoded_as_the_kernel_expects() {
        let service = Service::new(id(Protocol::Tcp, "10.96.0.10:80"), "rr");
        let options = "07000600 72720000 0c000700 00000000 fdffffff 08000800 00000000 08000900 ffffffff ";
        assert_eq!(encoded(&Command::AddService(service.clone())), format!("01010000 54000180 {V4}{options}"));
        assert_eq!(encoded(&Command::SetService(service.clone())), format!("02010000 54000180 {V4}{options}"));
        assert_eq!(encoded(&Command::RemoveService(service.id)), format!("03010000 30000180 {V4}"));
    }

    #[test]
    fn every_option_of_a_service_is_encoded() {
        let mut service = Service::new(id(Protocol::Sctp, "[fd00:96::a]:80"), "mh").persistent(10_800);
        service.one_packet = true;
        service.scheduler_flags = SchedulerFlags { fallback: true, port: true };
        service.persistence_engine = Some("sip".into());
        let expected = format!(
            "01010000 5c000180 {V6}07000600 6d680000 08000b00 73697000 0c000700 1d000000 fdffffff \
                 08000800 302a0000 08000900 80000000 "
        );
        assert_eq!(encoded(&Command::AddService(service)), expected);
        let mut masked = Service::new(ServiceId::FirewallMark { family: Family::V4, mark: 7 }, "rr");
        masked.persistence = Some(Persistence { timeout_seconds: 60, netmask: Netmask::V4([255, 255, 255, 0].into()) });
        assert_eq!(
            encoded(&Command::AddService(masked)),
            "01010000 38000180 06000100 02000000 08000500 07000000 07000600 72720000 0c000700 01000000 fdffffff \
             08000800 3c000000 08000900 ffffff00 "
        );
    }

    #[test]
    fn destinations_are_encoded_as_the_kernel_expects() {
        let service = id(Protocol::Tcp, "10.96.0.10:80");
        let name = "06000b00 02000000 14000100 0af40105 00000000 00000000 00000000 06000200 1f900000 ";
        let mut destination = Destination::new(at("10.244.1.5:8080")).weighing(3);
        let expected = format!(
            "05010000 30000180 {V4}48000280 {name}08000300 00000000 08000400 03000000 08000500 00000000 \
                 08000600 00000000 "
        );
        assert_eq!(encoded(&Command::AddDestination(service, destination)), expected);
        destination.forwarding = Forwarding::Tunnel;
        (destination.upper_threshold, destination.lower_threshold) = (100, 50);
        let expected = format!(
            "06010000 30000180 {V4}48000280 {name}08000300 02000000 08000400 03000000 08000500 64000000 \
                 08000600 32000000 "
        );
        assert_eq!(encoded(&Command::SetDestination(service, destination)), expected);
        let removal = encoded(&Command::RemoveDestination(service, destination.address));
        assert_eq!(removal, format!("07010000 30000180 {V4}28000280 {name}"));
    }

    #[test]
    fn queries_are_encoded_as_the_kernel_expects() {
        let service = id(Protocol::Tcp, "10.96.0.10:80");
        assert_eq!(hex(list_services(FAMILY).payload()), "04010000 ");
        assert_eq!(hex(get_service(FAMILY, service).payload()), format!("04010000 30000180 {V4}"));
        assert_eq!(hex(list_destinations(FAMILY, service).payload()), format!("08010000 30000180 {V4}"));
        let all = Timeouts { tcp_seconds: 900, tcp_fin_seconds: 120, udp_seconds: 300 };
        let expected = "0c010000 08000400 84030000 08000500 78000000 08000600 2c010000 ";
        assert_eq!(hex(set_timeouts(FAMILY, &all).payload()), expected);
    }
}

fn answer(fill: impl FnOnce(Request) -> Request) -> Vec<u8> {
    fill(request(FAMILY, 1, 0)).payload().to_vec()
}

#[test]
fn connections_are_read_and_unknown_attributes_are_ignored() {
    let bytes = answer(|all| {
        all.nested(top::DEST, |all| {
            // Kernels before 3.18 do not send the family.
            all.attribute(dest::ADDR, &[10, 0, 0, 1])
                .attribute(dest::PORT, &80_u16.to_be_bytes())
                .attribute(dest::FWD_METHOD, &9_u32.to_ne_bytes())
                .attribute(dest::ACTIVE_CONNS, &1_u32.to_ne_bytes())
                .attribute(dest::INACT_CONNS, &2_u32.to_ne_bytes())
                .attribute(dest::PERSIST_CONNS, &3_u32.to_ne_bytes())
                .attribute(999, &[1, 2, 3])
        })
        .attribute(77, &[])
    });
    let entry = destination(&bytes, Family::V4).unwrap();
    assert_eq!(entry.destination.address, at("10.0.0.1:80"));
    assert_eq!(entry.destination.forwarding, Forwarding::Other(9));
    assert_eq!((entry.active_connections, entry.inactive_connections, entry.persistent_connections), (1, 2, 3));
    assert!(destination(&bytes, Family::V6).is_err(), "four bytes are not an IPv6 address");
}

#[test]
fn errors_name_the_missing_attribute() {
    let of = |fill: fn(Request) -> Request| service(&answer(|all| all.nested(top::SERVICE, fill)));
    assert_eq!(service(&[1, 1, 0]), Err(Malformed("a generic netlink message is shorter than its header")));
    assert_eq!(service(&[1, 1, 0, 0]), Err(Malformed("a message without its virtual service")));
    assert_eq!(of(|all| all), Err(Malformed("a virtual service without an address family")));
    let unknown_family = of(|all| all.attribute(svc::AF, &77_u16.to_ne_bytes()));
    assert_eq!(unknown_family, Err(Malformed("an address family that is neither IPv4 nor IPv6")));
    let no_scheduler =
        of(|all| all.attribute(svc::AF, &2_u16.to_ne_bytes()).attribute(svc::FWMARK, &1_u32.to_ne_bytes()));
    assert_eq!(no_scheduler, Err(Malformed("a virtual service without a scheduler")));
    assert_eq!(of(|all| all.attribute(svc::AF, &[2])), Err(Malformed("an attribute of the wrong length")));
}

#[test]
fn refusals_are_described_in_words() {
    let service = Service::new(id(Protocol::Tcp, "10.96.0.10:80"), "no such");
    let refusal = headgate_netlink::Refusal::of_code;
    assert_eq!(
        Command::AddService(service.clone()).explain(&refusal(libc::ENOENT)),
        "virtual service TCP 10.96.0.10:80 with scheduler \"no such\": the kernel has neither this scheduler nor a module \
         ip_vs_NAME for it"
    );
    assert_eq!(
        Command::AddDestination(service.id, crate::Destination::new(at("10.0.0.255:1")))
            .explain(&refusal(libc::EINVAL)),
        "destination 10.0.0.255:1 of virtual service TCP 10.96.0.10:80: this node does not route the address as a unicast address (see ip route get)"
    );
    let absent = Command::RemoveDestination(service.id, at("10.0.0.1:1")).explain(&refusal(libc::ENOENT));
    assert_eq!(absent, "destination 10.0.0.1:1 of virtual service TCP 10.96.0.10:80: there is no such destination");
    let busy = Command::RemoveService(service.id).explain(&refusal(libc::EBUSY));
    assert_eq!(busy, "virtual service TCP 10.96.0.10:80: Device or resource busy (os error 16)");
}

fn any_id() -> impl Strategy<Value = ServiceId> {
    let protocol =
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Sctp), Just(Protocol::Other(3))];
    let address = (any::<IpAddr>(), any::<u16>()).prop_map(SocketAddr::from);
    let family = prop_oneof![Just(Family::V4), Just(Family::V6)];
    prop_oneof![
        (protocol, address).prop_map(|(protocol, address)| ServiceId::new(protocol, address)),
        (family, any::<u32>()).prop_map(|(family, mark)| ServiceId::FirewallMark { family, mark }),
    ]
}

prop_compose! {
    fn any_service()(
        id in any_id(),
        scheduler in "[a-z]{1,15}",
        persistence in any::<Option<(u32, u32)>>(),
        (one_packet, fallback, port) in any::<(bool, bool, bool)>(),
        persistence_engine in prop::option::of("[a-z]{1,15}"),
    ) -> Service {
        let persistence = persistence.map(|(timeout_seconds, mask)| Persistence {
            timeout_seconds,
            netmask: match id.family() {
                Family::V4 => Netmask::V4(mask.into()),
                Family::V6 => Netmask::V6(mask),
            },
        });
        let scheduler_flags = SchedulerFlags { fallback, port };
        Service { id, scheduler, persistence, one_packet, scheduler_flags, persistence_engine }
    }
}

proptest! {
    #[test]
    fn encoded_services_are_decoded_unchanged(expected in any_service()) {
        let entry = service(command(FAMILY, &Command::AddService(expected.clone())).payload()).unwrap();
        prop_assert_eq!(entry.service, expected);
    }

    #[test]
    fn encoded_destinations_are_decoded_unchanged(
        of in any_id(), ip in any::<IpAddr>(), port in any::<u16>(), weight in any::<u32>(), forwarding in 0_u32..8,
        thresholds in any::<(u32, u32)>(),
    ) {
        let expected = Destination {
            address: SocketAddr::new(ip, port),
            forwarding: Forwarding::of_number(forwarding),
            weight,
            upper_threshold: thresholds.0,
            lower_threshold: thresholds.1,
        };
        let sent = command(FAMILY, &Command::AddDestination(of, expected));
        prop_assert_eq!(destination(sent.payload(), of.family()).unwrap().destination, expected);
    }

    #[test]
    fn any_bytes_are_decoded_or_give_an_error(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
        let _ = (service(&bytes), destination(&bytes, Family::V4));
    }

    #[test]
    fn changed_bytes_are_decoded_or_give_an_error(
        expected in any_service(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in 0..200_usize,
    ) {
        let mut bytes = command(FAMILY, &Command::AddService(expected)).payload().to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut);
        let _ = (service(&bytes), destination(&bytes, Family::V6));
    }
}
