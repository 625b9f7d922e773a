//! The protocol stays compatible: field numbers keep their meaning, and the numbers and names of
//! removed fields are reserved.
//!
//! `proto/headgate/v1/descriptor.binpb` is the committed protocol. A change of the `.proto` files
//! passes this test if the change is compatible with the committed protocol, and if
//! `make descriptor` has rewritten `descriptor.binpb`.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

/// The compiled protocol, without the files of other packages. Comments and positions are removed,
/// since they may change freely.
fn compiled() -> FileDescriptorSet {
    let mut set = FileDescriptorSet::decode(headgate_proto::FILE_DESCRIPTOR_SET).unwrap();
    set.file.retain(|file| file.package().starts_with("headgate."));
    for file in &mut set.file {
        file.source_code_info = None;
    }
    set
}

/// The parts of a protocol. Fields and values have names such as `headgate.v1.Hello = 1`.
#[derive(Default)]
struct Parts {
    /// What each part means, and the name that must be reserved when the part is removed. Only
    /// fields and values have such a name.
    meanings: BTreeMap<String, (String, Option<String>)>,
    /// Reserved numbers as names of parts, and reserved names.
    reserved: BTreeSet<String>,
}

impl Parts {
    fn of(set: &FileDescriptorSet) -> Self {
        let mut parts = Self::default();
        for file in &set.file {
            file.message_type.iter().for_each(|message| parts.add_message(file.package(), message));
            file.enum_type.iter().for_each(|found| parts.add_enum(file.package(), found));
            for service in &file.service {
                for method in &service.method {
                    let name = format!("rpc {}.{}.{}", file.package(), service.name(), method.name());
                    let streams = (method.client_streaming(), method.server_streaming());
                    let meaning = format!("{} to {}, streams {streams:?}", method.input_type(), method.output_type());
                    parts.meanings.insert(name, (meaning, None));
                }
            }
        }
        parts
    }

    fn add_message(&mut self, scope: &str, message: &DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        message.nested_type.iter().for_each(|nested| self.add_message(&name, nested));
        message.enum_type.iter().for_each(|found| self.add_enum(&name, found));
        self.meanings.insert(name.clone(), ("a message".to_owned(), None));
        for field in &message.field {
            let (kind, is_in_oneof) = ((field.r#type(), field.label()), field.oneof_index.is_some());
            let meaning = format!("{} {kind:?} {} {is_in_oneof}", field.name(), field.type_name());
            let reserved = Some(format!("{name}.{}", field.name()));
            self.meanings.insert(format!("{name} = {}", field.number()), (meaning, reserved));
        }
        let numbers = message.reserved_range.iter().flat_map(|range| range.start()..range.end());
        self.reserved.extend(numbers.map(|number| format!("{name} = {number}")));
        self.reserved.extend(message.reserved_name.iter().map(|reserved| format!("{name}.{reserved}")));
    }

    fn add_enum(&mut self, scope: &str, found: &EnumDescriptorProto) {
        let name = format!("{scope}.{}", found.name());
        self.meanings.insert(name.clone(), ("an enum".to_owned(), None));
        for value in &found.value {
            let reserved = Some(format!("{name}.{}", value.name()));
            self.meanings.insert(format!("{name} = {}", value.number()), (value.name().to_owned(), reserved));
        }
        // The end of a reserved range is inclusive in an enum, and exclusive in a message.
        let numbers = found.reserved_range.iter().flat_map(|range| range.start()..=range.end());
        self.reserved.extend(numbers.map(|number| format!("{name} = {number}")));
        self.reserved.extend(found.reserved_name.iter().map(|reserved| format!("{name}.{reserved}")));
    }
}

/// The incompatible changes from `old` to `new`, one sentence each.
fn breaks(old: &FileDescriptorSet, new: &FileDescriptorSet) -> Vec<String> {
    let (old, new) = (Parts::of(old), Parts::of(new));
    let mut breaks = Vec::new();
    for (part, (before, reserved)) in &old.meanings {
        let is_reserved = |name: &String| new.reserved.contains(part) && new.reserved.contains(name);
        match new.meanings.get(part) {
            Some((now, _)) if now == before => {}
            Some((now, _)) => breaks.push(format!("{part} was {before} and is now {now}")),
            None if reserved.as_ref().is_some_and(is_reserved) => {}
            None => breaks.push(format!("{part} ({before}) was removed: reserve its number and its name")),
        }
    }
    let used = old.reserved.iter().filter(|part| new.meanings.contains_key(*part));
    breaks.extend(used.map(|part| format!("{part} was reserved and is used again")));
    breaks
}

#[test]
fn the_protocol_is_compatible_with_the_committed_descriptor() {
    let now = compiled();
    let path = super::root().join("proto/headgate/v1/descriptor.binpb");
    let writes = std::env::var_os("HEADGATE_WRITE_DESCRIPTOR").is_some();
    if writes && !path.exists() {
        // To break compatibility on purpose, remove the file first.
        std::fs::write(&path, now.encode_to_vec()).unwrap();
        return;
    }
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}: run make descriptor", path.display()));
    let committed = FileDescriptorSet::decode(bytes.as_slice()).unwrap();
    let breaks = breaks(&committed, &now);
    assert!(breaks.is_empty(), "the protocol is not compatible with the committed one:\n  {}", breaks.join("\n  "));
    if writes {
        std::fs::write(&path, now.encode_to_vec()).unwrap();
    } else {
        assert!(
            committed == now,
            "the protocol has changed and is compatible: run make descriptor and commit the file"
        );
    }
}
