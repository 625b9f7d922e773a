#![allow(clippy::unwrap_used)]
use headgate_netlink::Protocol;
use proptest::prelude::*;

use super::*;

const FAMILY: u16 = 0x20;

fn web() -> Service {
    Service::new(ServiceId::new(Protocol::Tcp, "10.96.0.10:80".parse().unwrap()), "no such").persistent(10_800)
}

#[test]
fn refusals_are_described_in_words() {
    let (service, refusal) = (web(), headgate_netlink::Refusal::of_code);
    let scheduler = Command::AddService(service.clone()).explain(&refusal(libc::ENOENT));
    let expected = "virtual service TCP 10.96.0.10:80 with scheduler \"no such\": the kernel has neither this scheduler \
                    nor a module ip_vs_NAME for it";
    assert_eq!(scheduler, expected);
    let absent = Command::RemoveDestination(service.id, "10.0.0.1:1".parse().unwrap()).explain(&refusal(libc::ENOENT));
    assert_eq!(absent, "destination 10.0.0.1:1 of virtual service TCP 10.96.0.10:80: there is no such destination");
}

proptest! {
    #[test]
    fn changed_bytes_are_decoded_or_give_an_error(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut in 0..200_usize,
        other in prop::collection::vec(any::<u8>(), 0..160),
    ) {
        let mut bytes = command(FAMILY, &Command::AddService(web())).payload().to_vec();
        prop_assert_eq!(service(&bytes).unwrap().service, web());
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut);
        for bytes in [bytes, other] {
            let _ = (service(&bytes), destination(&bytes, Family::V6));
        }
    }
}
