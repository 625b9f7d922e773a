#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.chunks(4).map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + " ").collect()
}

/// Compares with literal bytes of a little-endian machine: attribute types and lengths are in the
/// machine's byte order.
#[cfg(target_endian = "little")]
#[test]
fn requests_are_encoded_as_the_kernel_expects() {
    let set = "02000000 05000100 07000000 06000200 61000000 ";
    let wanted = Specification::new("a", SetType::HashIpPort, Family::V6).with_sizes(1024, 65536);
    let expected = format!(
        "{set}11000300 68617368 3a69702c 706f7274 00000000 05000400 05000000 05000500 0a000000 \
             14000780 08001240 00000400 08001340 00010000 "
    );
    assert_eq!(hex(create(7, 5, &wanted).payload()), expected);
    let ports = Specification::new("a", SetType::BitmapPort, Family::V4);
    let expected = format!(
        "{set}10000300 6269746d 61703a70 6f727400 05000400 03000000 05000500 00000000 \
             14000780 06000440 00000000 06000540 ffff0000 "
    );
    assert_eq!(hex(create(7, 3, &ports).payload()), expected);
    let element = Element::IpPortNet([10, 0, 0, 1].into(), Protocol::Tcp, 80, [10, 1, 0, 0].into(), 16);
    let expected = format!(
        "{set}34000780 0c000180 08000140 0a000001 06000440 00500000 05000700 06000000 \
             0c001480 08000140 0a010000 05001500 10000000 "
    );
    assert_eq!(hex(change(7, &Change::add("a", element)).payload()), expected);
    let deletion = change(7, &Change::delete("a", Element::Port(53)));
    assert_eq!(hex(deletion.payload()), format!("{set}0c000780 06000440 00350000 "));
    assert_eq!(hex(swap(7, "a", "b").payload()), format!("{set}06000300 62000000 "));
    assert_eq!(hex(list(7, "a", false).payload()), format!("{set}08000640 00000004 "));
}

fn listed(set_type: SetType, family: Family, entries: &[Entry]) -> Vec<u8> {
    let wanted = Specification::new("set", set_type, family).with_sizes(64, 128);
    create(7, 1, &wanted)
        .nested(top::ADT, |all| {
            entries.iter().fold(all, |all, entry| {
                all.nested(top::DATA, |all| {
                    let all = put_element(all, &entry.element);
                    if entry.nomatch { put_u32(all, data::CADT_FLAGS, NOMATCH) } else { all }
                })
            })
        })
        .payload()
        .to_vec()
}

fn read_one(payload: &[u8]) -> Result<Set, Malformed> {
    let mut sets = Vec::new();
    add_part(&mut sets, payload).map(|()| sets.remove(0))
}

fn any_entry() -> impl Strategy<Value = (SetType, Entry)> {
    let protocol =
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Sctp), Just(Protocol::Other(1))];
    let ip = any::<IpAddr>;
    (0..SetType::ALL.len(), ip(), protocol, any::<u16>(), ip(), any::<u8>(), any::<bool>()).prop_map(
        |(of, ip, protocol, port, other, length, nomatch)| {
            let set_type = SetType::ALL[of];
            let element = match set_type {
                SetType::HashIp => Element::Ip(ip),
                SetType::HashIpPort => Element::IpPort(ip, protocol, port),
                SetType::HashIpPortIp => Element::IpPortIp(ip, protocol, port, other),
                SetType::HashIpPortNet => Element::IpPortNet(ip, protocol, port, other, length),
                SetType::HashNet => Element::Net(ip, length),
                SetType::BitmapPort => Element::Port(port),
            };
            (set_type, Entry { element, nomatch })
        },
    )
}

#[test]
fn sets_of_other_types_are_listed_by_their_headers() {
    let bytes = request(commands::LIST, 0, 7)
        .text(top::SETNAME, "macs")
        .text(top::TYPENAME, "hash:mac")
        .attribute(top::REVISION, &[7])
        .attribute(top::FAMILY, &[Family::V6.number()])
        .nested(top::DATA, |all| put_u32(put_u32(all, data::ELEMENTS, 9), data::REFERENCES, 2));
    let Set { header, entries } = read_one(bytes.payload()).unwrap();
    assert_eq!(entries, []);
    assert_eq!((header.type_name.as_str(), header.family, header.revision), ("hash:mac", Some(Family::V6), 7));
    assert_eq!((header.elements, header.references), (Some(9), 2));
    assert_eq!(SetType::of_name(&header.type_name), None);
}

#[test]
fn protocol_versions_are_decoded() {
    let answer = request(commands::PROTOCOL, 0, 7).attribute(top::MINIMUM, &[6]);
    assert_eq!(protocol_versions(answer.payload()), Ok((6, 7)));
    assert_eq!(protocol_versions(request(commands::PROTOCOL, 0, 6).payload()), Ok((6, 6)));
    assert!(revisions(answer.payload()).is_err() && revisions(&[1]).is_err());
}

proptest! {
    #[test]
    fn encoded_entries_are_decoded_unchanged((set_type, entry) in any_entry()) {
        let bytes = listed(set_type, Family::V4, std::slice::from_ref(&entry));
        let set = read_one(&bytes).unwrap();
        prop_assert_eq!(&set.header.type_name, set_type.name());
        prop_assert_eq!(set.entries, [entry]);
    }

    #[test]
    fn any_bytes_are_decoded_or_give_an_error(
        (set_type, entry) in any_entry(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in 0..300_usize, other in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut bytes = listed(set_type, Family::V6, &[entry]);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut);
        for bytes in [bytes, other] {
            let _ = (protocol_versions(&bytes), revisions(&bytes), read_one(&bytes));
        }
    }
}
