//! Sets and their elements.

use super::{
    apply::{Applied, Rejection, Running, reject, require},
    state::{FakeSet, FakeTable, Stored, element_key},
};
use crate::{
    Element, ElementData, Set, SetData, ValueType,
    wire::{EXCLUSIVE, decode::Elements},
};

/// `NFT_DATA_VALUE_MAXLEN`
const MOST_BYTES: u32 = 64;
/// The maximum number of elements in dynamic sets created without a size.
const DYNAMIC_SIZE: u32 = 65_535;

/// Checks whether the kernel accepts the properties of a set.
pub(super) fn check_set(wanted: &Set) -> Applied {
    let fits = |of: ValueType| (1..=MOST_BYTES).contains(&of.length_bytes);
    let data_fits = match wanted.data {
        Some(SetData::Values(data)) => fits(data),
        Some(SetData::Verdicts) | None => true,
    };
    require(fits(wanted.key) && data_fits, libc::EINVAL)?;
    require(wanted.timeout_ms.is_none() || wanted.flags.timeout, libc::EINVAL)
}

/// Adds the elements of a message, up to the first rejected element.
pub(super) fn add(running: &mut Running<'_>, flags: u16, all: Elements) -> Applied {
    let table = running.table(&all.table)?;
    let Some(set) = table.set_of(&all.set).cloned() else { return reject(libc::ENOENT) };
    let is_used = table.uses_of_set(&set) > 0;
    require(!(is_used && (set.set.flags.constant || set.set.flags.anonymous)), libc::EBUSY)?;
    let is_exclusive = flags & EXCLUSIVE != 0;
    for (index, element) in all.list.unwrap_or_default().into_iter().enumerate() {
        let checked = check(running.table(&all.table)?, &set.set, &element);
        let added = checked.and_then(|()| add_one(running, &set, element, is_exclusive));
        added.map_err(|Rejection { code, .. }| Rejection { code, element: Some(index) })?;
    }
    if set.set.data == Some(SetData::Verdicts) {
        running.needs_validation = true;
    }
    Ok(())
}

fn check(table: &FakeTable, set: &Set, element: &Element) -> Applied {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let has_length = |bytes: &[u8]| length(bytes) == set.key.length_bytes;
    require(element.catch_all || has_length(&element.key.0), libc::EINVAL)?;
    require(element.key_end.as_ref().is_none_or(|end| has_length(&end.0)), libc::EINVAL)?;
    let is_range = element.interval_end || element.key_end.is_some();
    require(!is_range || set.flags.interval, libc::EINVAL)?;
    require(element.timeout_ms.is_none() || set.flags.timeout, libc::EINVAL)?;
    match (set.data, &element.data) {
        (None, None) => Ok(()),
        (Some(_), None) => require(element.interval_end, libc::EINVAL),
        (Some(SetData::Values(data)), Some(ElementData::Value(value))) => {
            require(length(&value.0) == data.length_bytes, libc::EINVAL)
        }
        (Some(SetData::Verdicts), Some(ElementData::Verdict(verdict))) => match verdict.chain() {
            None => Ok(()),
            Some(name) => check_jump(table, name),
        },
        _ => reject(libc::EINVAL),
    }
}

/// Checks whether a verdict may jump to a chain.
pub(super) fn check_jump(table: &FakeTable, name: &str) -> Applied {
    match table.chain(name) {
        None => reject(libc::ENOENT),
        Some(chain) => require(chain.chain.base.is_none(), libc::EOPNOTSUPP),
    }
}

fn add_one(running: &mut Running<'_>, set: &FakeSet, mut element: Element, is_exclusive: bool) -> Applied {
    let key = element_key(&element);
    let contents = running.state.contents.entry(set.handle).or_default();
    if let Some(found) = contents.get(&key) {
        return require(!is_exclusive && found.element.data == element.data, libc::EEXIST);
    }
    let most = set.set.size.or(set.set.flags.dynamic.then_some(DYNAMIC_SIZE));
    let count = u32::try_from(contents.len()).unwrap_or(u32::MAX);
    require(element.catch_all || most.is_none_or(|most| count < most), libc::ENFILE)?;
    if element.expressions.is_empty() {
        element.expressions.clone_from(&set.set.expressions);
    }
    let timeout = element.timeout_ms.or(set.set.timeout_ms);
    let expires_at_ms = element.expires_in_ms.or(timeout).map(|after| running.state.now_ms + after);
    element.expires_in_ms = None;
    running.put_element(set.handle, key, Stored::new(element, expires_at_ms));
    Ok(())
}

/// Deletes the elements of a message, or all elements of the set.
pub(super) fn delete(running: &mut Running<'_>, all: Elements) -> Applied {
    let table = running.table(&all.table)?;
    let Some(set) = table.set_of(&all.set).cloned() else { return reject(libc::ENOENT) };
    require(!set.set.flags.anonymous, libc::EOPNOTSUPP)?;
    require(!(set.set.flags.constant && table.uses_of_set(&set) > 0), libc::EBUSY)?;
    let Some(list) = all.list else {
        let keys: Vec<_> = running.state.contents_of(&set).map(|stored| element_key(&stored.element)).collect();
        for key in keys {
            running.take_element(set.handle, &key);
        }
        return Ok(());
    };
    let length = set.set.key.length_bytes;
    for (index, element) in list.into_iter().enumerate() {
        let is_key = element.catch_all || u32::try_from(element.key.0.len()) == Ok(length);
        let code = if is_key { libc::ENOENT } else { libc::EINVAL };
        if !is_key || !running.take_element(set.handle, &element_key(&element)) {
            return Err(Rejection { code, element: Some(index) });
        }
    }
    Ok(())
}
