//! The protocol stays compatible: field numbers keep their meaning, and the numbers and names of
//! removed fields are reserved.
//!
//! `proto/headgate/v1/descriptor.binpb` is the committed protocol. A change of the `.proto` files
//! passes this test if the change is compatible with the committed protocol, and if
//! `make descriptor` has rewritten `descriptor.binpb`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet, ServiceDescriptorProto};

fn committed_path() -> PathBuf {
    super::root().join("proto/headgate/v1/descriptor.binpb")
}

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

/// All messages, enums and services by full name.
#[derive(Default)]
struct Index<'a> {
    messages: BTreeMap<String, &'a DescriptorProto>,
    enums: BTreeMap<String, &'a EnumDescriptorProto>,
    services: BTreeMap<String, &'a ServiceDescriptorProto>,
}

impl<'a> Index<'a> {
    fn of(set: &'a FileDescriptorSet) -> Self {
        let mut index = Self::default();
        for file in &set.file {
            file.message_type.iter().for_each(|message| index.add_message(file.package(), message));
            file.enum_type.iter().for_each(|found| index.add_enum(file.package(), found));
            for service in &file.service {
                index.services.insert(format!("{}.{}", file.package(), service.name()), service);
            }
        }
        index
    }

    fn add_message(&mut self, scope: &str, message: &'a DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        message.nested_type.iter().for_each(|nested| self.add_message(&name, nested));
        message.enum_type.iter().for_each(|found| self.add_enum(&name, found));
        self.messages.insert(name, message);
    }

    fn add_enum(&mut self, scope: &str, found: &'a EnumDescriptorProto) {
        self.enums.insert(format!("{scope}.{}", found.name()), found);
    }
}

/// The incompatible changes from `old` to `new`, one sentence each.
fn breaks(old: &FileDescriptorSet, new: &FileDescriptorSet) -> Vec<String> {
    let (old, new) = (Index::of(old), Index::of(new));
    let mut breaks = Vec::new();
    for (name, before) in &old.messages {
        match new.messages.get(name) {
            Some(now) => message_breaks(name, before, now, &mut breaks),
            None => breaks.push(format!("message {name} was removed")),
        }
    }
    for (name, before) in &old.enums {
        match new.enums.get(name) {
            Some(now) => enum_breaks(name, before, now, &mut breaks),
            None => breaks.push(format!("enum {name} was removed")),
        }
    }
    for (name, before) in &old.services {
        let methods = new.services.get(name).map(|service| service.method.as_slice()).unwrap_or_default();
        for method in &before.method {
            let is_equal = methods.iter().any(|now| {
                now.name == method.name
                    && now.input_type == method.input_type
                    && now.output_type == method.output_type
                    && now.client_streaming() == method.client_streaming()
                    && now.server_streaming() == method.server_streaming()
            });
            if !is_equal {
                breaks.push(format!("rpc {name}.{} was removed, or its messages have other types", method.name()));
            }
        }
    }
    breaks
}

fn message_breaks(name: &str, before: &DescriptorProto, now: &DescriptorProto, breaks: &mut Vec<String>) {
    for field in &before.field {
        let (number, field_name) = (field.number(), field.name());
        match now.field.iter().find(|candidate| candidate.number() == number) {
            Some(found) => {
                let meaning = |field: &prost_types::FieldDescriptorProto| {
                    (
                        field.name.clone(),
                        field.r#type,
                        field.type_name.clone(),
                        field.label,
                        field.oneof_index.is_some(),
                    )
                };
                if meaning(field) != meaning(found) {
                    breaks.push(format!(
                        "{name}: number {number} was {field_name} and is now another field: {}",
                        found.name()
                    ));
                }
            }
            None => {
                let number_kept = now.reserved_range.iter().any(|range| (range.start()..range.end()).contains(&number));
                if !number_kept || !now.reserved_name.iter().any(|reserved| reserved == field_name) {
                    breaks
                        .push(format!("{name}: {field_name} = {number} was removed: reserve its number and its name"));
                }
            }
        }
    }
    for range in &before.reserved_range {
        for number in range.start()..range.end() {
            if now.field.iter().any(|field| field.number() == number) {
                breaks.push(format!("{name}: number {number} was reserved and is used again"));
            }
        }
    }
}

fn enum_breaks(name: &str, before: &EnumDescriptorProto, now: &EnumDescriptorProto, breaks: &mut Vec<String>) {
    for value in &before.value {
        let (number, value_name) = (value.number(), value.name());
        match now.value.iter().find(|candidate| candidate.number() == number) {
            Some(found) if found.name() == value_name => {}
            Some(found) => breaks.push(format!("{name}: {number} was {value_name} and is now {}", found.name())),
            None => {
                // The end of a reserved range is inclusive in an enum, and exclusive in a message.
                let kept = now.reserved_range.iter().any(|range| (range.start()..=range.end()).contains(&number));
                if !kept || !now.reserved_name.iter().any(|reserved| reserved == value_name) {
                    breaks
                        .push(format!("{name}: {value_name} = {number} was removed: reserve its number and its name"));
                }
            }
        }
    }
}

#[test]
fn the_protocol_is_compatible_with_the_committed_descriptor() {
    let now = compiled();
    let path = committed_path();
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

#[test]
fn incompatible_changes_are_found() {
    let old = compiled();
    let changed = |change: &dyn Fn(&mut DescriptorProto)| {
        let mut new = old.clone();
        let messages = new.file.iter_mut().flat_map(|file| &mut file.message_type);
        change(messages.into_iter().find(|message| message.name() == "Hello").unwrap());
        breaks(&old, &new)
    };
    assert!(changed(&|_| {}).is_empty());
    assert!(changed(&|hello| hello.field[0].name = Some("host".into()))[0].contains("number 1 was node_name"));
    assert!(changed(&|hello| hello.field[0].r#type = Some(12))[0].contains("number 1 was node_name"));
    assert!(changed(&|hello| hello.field[0].label = Some(3))[0].contains("number 1 was node_name"));
    let removed = |hello: &mut DescriptorProto| drop(hello.field.remove(0));
    assert!(changed(&removed)[0].contains("reserve its number and its name"));
    let reserved = |hello: &mut DescriptorProto| {
        hello.field.remove(0);
        hello.reserved_name.push("node_name".into());
        hello.reserved_range.push(prost_types::descriptor_proto::ReservedRange { start: Some(1), end: Some(2) });
    };
    assert!(changed(&reserved).is_empty());
    assert!(!changed(&|hello| hello.name = Some("Greeting".into())).is_empty());

    let mut without_rpc = old.clone();
    without_rpc.file.iter_mut().for_each(|file| file.service.clear());
    assert!(breaks(&old, &without_rpc).iter().any(|text| text.contains("rpc headgate.v1.Discovery.Sync")));
    let mut other_value = old.clone();
    let protocol =
        other_value.file.iter_mut().flat_map(|file| &mut file.enum_type).find(|found| found.name() == "Protocol");
    protocol.unwrap().value[2].name = Some("DCCP".into());
    assert!(breaks(&old, &other_value).iter().any(|text| text.contains("2 was SCTP and is now DCCP")));
}
