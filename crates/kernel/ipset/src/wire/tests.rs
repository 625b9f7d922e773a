use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_give_an_error(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in 0..300_usize, other in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let wanted = Specification::new("set", SetType::HashIpPortNet, Family::V4).with_sizes(64, 128);
        let element = Element::IpPortNet([10, 0, 0, 1].into(), Protocol::Tcp, 80, [10, 1, 0, 0].into(), 16);
        let listed = create(7, 1, &wanted)
            .nested(top::ADT, |all| all.nested(top::DATA, |all| put_element(all, &element)));
        let mut bytes = listed.payload().to_vec();
        prop_assert!(add_part(&mut Vec::new(), &bytes).is_ok());
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut);
        for bytes in [bytes, other] {
            let _ = (protocol_versions(&bytes), revisions(&bytes), add_part(&mut Vec::new(), &bytes));
        }
    }
}
