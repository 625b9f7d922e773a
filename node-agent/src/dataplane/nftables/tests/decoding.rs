//! Elements of the kernel that this agent did not write.

use headgate_core::{Change, Family};
use nftables_netlink::{Element, ElementData, Value};

use super::{
    super::{elements::decode, layout::table_name, read::has_elements_of_services},
    rig::{Rig, endpoint, is_kept, key, shapes},
};

/// Every element of the agent is read as it was written. The same element with another byte or with
/// another attribute is not read.
#[test]
fn only_elements_that_the_agent_writes_are_read() {
    for family in Family::BOTH {
        let mut rig = Rig::new(family);
        for (number, service) in (1..).zip(shapes(family)) {
            let endpoints =
                (0..number % 3).map(|n| Change::Endpoint(key(number), endpoint(family, number * 8 + n, "here")));
            rig.apply([Change::from(service)].into_iter().chain(endpoints));
        }
        let table = table_name(family);
        let mut read = 0;
        let sets = rig.kernel.sets(&table).unwrap().into_iter().map(|set| set.object);
        for set in sets.filter(has_elements_of_services) {
            for element in rig.elements(&set.name) {
                assert!(decode(family, &set.name, &element).is_some(), "{}: {element:?}", set.name);
                read += 1;
                let foreign = |element: &Element| assert_eq!(decode(family, &set.name, element), None, "{element:?}");
                foreign(&Element { catch_all: true, ..element.clone() });
                foreign(&Element { timeout_ms: Some(1), ..element.clone() });
                let longer = |value: &Value| Value([value.0.as_slice(), &[0; 4]].concat());
                foreign(&Element { key: longer(&element.key), ..element.clone() });
                if let Some(ElementData::Value(value)) = &element.data {
                    foreign(&Element { data: Some(ElementData::Value(longer(value))), ..element.clone() });
                    if value.0.len() == 20 && set.name.ends_with("services") {
                        // The first word is always 0.
                        let first = [&[1, 0, 0, 0], &value.0[4..]].concat();
                        foreign(&Element { data: Some(ElementData::Value(Value(first))), ..element.clone() });
                    }
                }
            }
        }
        assert_eq!(read, rig.ledger.elements().filter(is_kept).count());
    }
}
