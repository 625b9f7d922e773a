//! Checks that the kernel makes when a rule's expressions are created.

use std::collections::HashSet;

use super::{
    apply::{Applied, Rejection, reject, require},
    elements::check_jump,
    state::{FakeSet, FakeTable},
};
use crate::{
    AddressFamily, CtKey, Direction, DynamicSet, Expression, Family, FibResult, LookupResult, MetaKey, Register,
    RegisterRange, Rule, SetData, SetName, SocketKey,
};

/// The number of register words.
const WORDS: u32 = 16;

/// The register words that an earlier expression has written.
struct Registers(HashSet<u32>);

impl Registers {
    fn store(&mut self, to: Register, length: u32) -> Applied {
        require(length > 0, libc::EINVAL)?;
        let words = to.index()..to.after(length).index();
        require(words.end <= WORDS, libc::ERANGE)?;
        self.0.extend(words);
        Ok(())
    }

    /// Since Linux 6.12, and in later stable releases of some older kernels, the kernel rejects
    /// reads of registers that no expression has written (`nft_parse_register_load`).
    fn load(&self, from: Register, length: u32) -> Applied {
        require(length > 0, libc::EINVAL)?;
        let mut words = from.index()..from.after(length).index();
        require(words.end <= WORDS, libc::ERANGE)?;
        require(words.all(|word| self.0.contains(&word)), libc::ENODATA)
    }

    fn load_range(&self, range: Option<RegisterRange>, length: u32) -> Applied {
        range.map_or(Ok(()), |range| self.load(range.first, length).and_then(|()| self.load(range.last, length)))
    }
}

/// Checks a rule, and replaces references to anonymous sets by the names of the sets.
pub(super) fn check_rule(table: &FakeTable, rule: &mut Rule) -> Applied {
    let mut registers = Registers(HashSet::new());
    for expression in &mut rule.expressions {
        check(table, &mut registers, expression)?;
    }
    Ok(())
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

fn check(table: &FakeTable, registers: &mut Registers, expression: &mut Expression) -> Applied {
    match expression {
        Expression::Payload { length, to, .. } => registers.store(*to, *length),
        Expression::SetPayload { length, from, .. } => registers.load(*from, *length),
        Expression::Meta { key, to } => registers.store(*to, meta_length(*key)),
        Expression::SetMeta { key, from } => registers.load(*from, meta_length(*key)),
        Expression::Conntrack { key, direction, to } => {
            let family = table.table.name.family;
            registers.store(*to, ct_length(*key, *direction, family)?)
        }
        Expression::SetConntrack { key, from } => {
            require(*key == CtKey::Mark, libc::EOPNOTSUPP)?;
            registers.load(*from, 4)
        }
        Expression::Compare { register, value, .. } => registers.load(*register, length(&value.0)),
        Expression::Range { register, first, last, .. } => {
            require(first.0.len() == last.0.len(), libc::EINVAL)?;
            registers.load(*register, length(&first.0))
        }
        Expression::Bitwise { from, to, mask, xor } => {
            require(mask.0.len() == xor.0.len(), libc::EINVAL)?;
            registers.load(*from, length(&mask.0))?;
            registers.store(*to, length(&mask.0))
        }
        Expression::ByteOrder { from, to, length, size, .. } => {
            require(matches!(size, 2 | 4 | 8), libc::EINVAL)?;
            registers.load(*from, *length)?;
            registers.store(*to, *length)
        }
        Expression::Lookup { set, key, result } => {
            let found = bind(table, set)?;
            registers.load(*key, found.set.key.length_bytes)?;
            match (*result, found.set.data) {
                (LookupResult::Present | LookupResult::Absent, None) => Ok(()),
                (LookupResult::Present | LookupResult::Absent, Some(_)) => {
                    require(!found.set.flags.anonymous, libc::EINVAL)
                }
                (LookupResult::Into(to), Some(SetData::Values(data))) => registers.store(to, data.length_bytes),
                (LookupResult::Verdict, Some(SetData::Verdicts)) => Ok(()),
                _ => reject(libc::EINVAL),
            }
        }
        Expression::Immediate { to, value } => registers.store(*to, length(&value.0)),
        Expression::Verdict(verdict) => verdict.chain().map_or(Ok(()), |chain| check_jump(table, chain)),
        Expression::NumberGenerator { modulus, offset, to, .. } => {
            require(*modulus > 0, libc::ERANGE)?;
            require(offset.checked_add(*modulus - 1).is_some(), libc::EOVERFLOW)?;
            registers.store(*to, 4)
        }
        Expression::Hash { from, length, modulus, offset, to, .. } => {
            require(*length > 0 && *length <= 255, libc::ERANGE)?;
            registers.load(*from, *length)?;
            require(*modulus > 0, libc::ERANGE)?;
            require(offset.checked_add(*modulus - 1).is_some(), libc::EOVERFLOW)?;
            registers.store(*to, 4)
        }
        Expression::Fib { result, flags, to } => {
            let both = crate::FibFlags::SOURCE | crate::FibFlags::DESTINATION;
            let asked = flags.0 & both.0;
            require(asked != 0 && asked != both.0, libc::EINVAL)?;
            registers.store(*to, fib_length(*result))
        }
        Expression::Nat { family, address, port, .. } => {
            let addresses = address_length(*family);
            let of_table = table.table.name.family;
            let fits = of_table == Family::Inet || u32::from(of_table.number()) == family.number();
            require(fits, libc::EOPNOTSUPP)?;
            require(address.is_none() || addresses > 0, libc::EAFNOSUPPORT)?;
            registers.load_range(*address, addresses)?;
            registers.load_range(*port, 2)
        }
        Expression::Masquerade { port, .. } | Expression::Redirect { port, .. } => registers.load_range(*port, 2),
        Expression::DynamicSet(change) => check_dynamic(table, registers, change),
        Expression::TransparentProxy { family, address, port } => {
            address.map_or(Ok(()), |address| registers.load(address, address_length(*family)))?;
            port.map_or(Ok(()), |port| registers.load(port, 2))
        }
        Expression::Socket { key, to } => registers.store(*to, if *key == SocketKey::Mark { 4 } else { 1 }),
        Expression::Limit { rate, seconds, .. } => require(*rate > 0 && *seconds > 0, libc::EINVAL),
        Expression::Reject(_)
        | Expression::Counter { .. }
        | Expression::Log { .. }
        | Expression::NoTrack
        | Expression::Unknown { .. } => Ok(()),
    }
}

/// Binds the rule to a set. Replaces a reference to an anonymous set by the name of the set.
fn bind<'a>(table: &'a FakeTable, name: &mut SetName) -> Result<&'a FakeSet, Rejection> {
    let Some(found) = table.set_of(name) else { return reject(libc::ENOENT) };
    require(!(found.set.flags.anonymous && table.uses_of_set(found) > 0), libc::EBUSY)?;
    *name = found.set.name.as_str().into();
    Ok(found)
}

fn check_dynamic(table: &FakeTable, registers: &Registers, change: &mut DynamicSet) -> Applied {
    let set = &bind(table, &mut change.set)?.set;
    // A set with a size that is neither dynamic nor has timeouts uses fixed buckets, which packets
    // cannot change.
    require(set.flags.dynamic || set.flags.timeout || set.size.is_none(), libc::EOPNOTSUPP)?;
    require(!set.flags.constant, libc::EBUSY)?;
    require(change.timeout_ms.is_none() || set.flags.timeout, libc::EOPNOTSUPP)?;
    registers.load(change.key, set.key.length_bytes)?;
    match (set.data, change.data) {
        (None, None) => Ok(()),
        (None, Some(_)) | (Some(SetData::Verdicts), Some(_)) => reject(libc::EOPNOTSUPP),
        (Some(SetData::Values(data)), Some(from)) => registers.load(from, data.length_bytes),
        (Some(_), None) => reject(libc::EINVAL),
    }
}

pub(super) fn meta_length(key: MetaKey) -> u32 {
    match key {
        MetaKey::InputInterfaceName | MetaKey::OutputInterfaceName => 16,
        MetaKey::NfProtocol | MetaKey::L4Protocol | MetaKey::PacketType => 1,
        MetaKey::Protocol => 2,
        _ => 4,
    }
}

fn ct_length(key: CtKey, direction: Option<Direction>, family: Family) -> Result<u32, Rejection> {
    let (length, needs_direction) = match key {
        CtKey::Direction | CtKey::L3Protocol | CtKey::Protocol => (1, false),
        CtKey::State | CtKey::Status | CtKey::Mark | CtKey::Expiration | CtKey::Id => (4, false),
        CtKey::SourcePort | CtKey::DestinationPort => (2, true),
        CtKey::SourceIp | CtKey::DestinationIp => (4, true),
        CtKey::SourceIp6 | CtKey::DestinationIp6 => (16, true),
        CtKey::Source | CtKey::Destination if family == Family::Ip => (4, true),
        CtKey::Source | CtKey::Destination => (16, true),
    };
    let is_optional = matches!(key, CtKey::L3Protocol | CtKey::Protocol);
    require(is_optional || direction.is_some() == needs_direction, libc::EINVAL)?;
    Ok(length)
}

pub(super) fn fib_length(result: FibResult) -> u32 {
    if result == FibResult::InterfaceName { 16 } else { 4 }
}

pub(super) fn address_length(family: AddressFamily) -> u32 {
    match family {
        AddressFamily::Ip => 4,
        AddressFamily::Ip6 => 16,
        AddressFamily::Inet => 0,
    }
}
