//! Decoding of netlink attributes and their values.

use std::net::IpAddr;

use super::Malformed;

pub(super) const HEADER_BYTES: usize = 4;
/// The mask that removes the two flags in the upper bits of an attribute type.
const TYPE_MASK: u16 = libc::NLA_TYPE_MASK as u16;
/// One more than the highest attribute type that the clients of this crate read.
const MAX_TYPES: usize = 26;

pub(super) fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Declares modules with the kernel's numbers, as a table.
#[macro_export]
macro_rules! constants {
    ($($(#[$doc:meta])* $module:ident: $number:ty { $($name:ident = $value:expr),+ $(,)? })+) => { $(
        $(#[$doc])*
        pub(crate) mod $module {
            $(pub(crate) const $name: $number = $value;)+
        }
    )+ };
}

/// Iterates over the attributes after a fixed header, or inside a nested attribute, with their
/// types. A truncated attribute ends the iteration without an error.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || split(&mut bytes))
}

/// Like [`attributes`], but a truncated attribute yields an error and ends the iteration.
pub fn checked_attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), Malformed>> {
    checked(bytes, split, Malformed("a truncated attribute"))
}

/// The attributes after a fixed header, or inside a nested attribute, by their types. If a type
/// occurs several times, the last attribute counts.
#[derive(Debug)]
pub struct Fields<'a>([Option<&'a [u8]>; MAX_TYPES]);

impl<'a> Fields<'a> {
    /// Splits bytes into attributes. Ignores attributes of types above 25, which no message of the
    /// clients of this crate needs.
    ///
    /// # Errors
    /// An attribute is truncated.
    pub fn of(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = [None; MAX_TYPES];
        for attribute in checked_attributes(bytes) {
            let (kind, value) = attribute?;
            if let Some(field) = fields.get_mut(usize::from(kind)) {
                *field = Some(value);
            }
        }
        Ok(Self(fields))
    }

    /// The bytes of an attribute.
    #[must_use]
    pub fn bytes(&self, kind: u16) -> Option<&'a [u8]> {
        self.0.get(usize::from(kind)).copied().flatten()
    }

    /// The value of an attribute, which `read` decodes.
    ///
    /// # Errors
    /// The error of `read`.
    pub fn get<T>(
        &self,
        kind: u16,
        read: impl FnOnce(&'a [u8]) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        self.bytes(kind).map(read).transpose()
    }

    /// The value of an attribute that must be there.
    ///
    /// # Errors
    /// The error of `read`, or `missing` if there is no such attribute.
    pub fn need<T>(
        &self,
        kind: u16,
        read: impl FnOnce(&'a [u8]) -> Result<T, Malformed>,
        missing: &'static str,
    ) -> Result<T, Malformed> {
        read(self.bytes(kind).ok_or(Malformed(missing))?)
    }
}

/// Iterates over the parts that `split` takes from the front of `bytes`. If `split` returns `None`
/// before the end, the iterator yields the error `truncated` and ends.
pub(super) fn checked<'a, T>(
    mut bytes: &'a [u8],
    split: impl Fn(&mut &'a [u8]) -> Option<T>,
    truncated: Malformed,
) -> impl Iterator<Item = Result<T, Malformed>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let part = split(&mut bytes).ok_or(truncated);
        if part.is_err() {
            bytes = &[];
        }
        Some(part)
    })
}

fn split<'a>(bytes: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let all: &'a [u8] = bytes;
    let length = usize::from(u16::from_ne_bytes(all.get(..2)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(all.get(2..4)?.try_into().ok()?) & TYPE_MASK;
    let value = all.get(HEADER_BYTES..length)?;
    *bytes = all.get(align(length)..).unwrap_or_default();
    Some((kind, value))
}

fn array<const N: usize>(value: &[u8]) -> Result<[u8; N], Malformed> {
    value.try_into().map_err(|_| Malformed("an attribute of the wrong length"))
}

/// Defines functions that read numbers.
macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident: $number:ty = $convert:ident;)+) => { $(
        $(#[$doc])*
        ///
        /// # Errors
        /// The value has the wrong length.
        pub fn $name(value: &[u8]) -> Result<$number, Malformed> {
            array(value).map(<$number>::$convert)
        }
    )+ };
}

readers! {
    /// Reads one byte.
    read_u8: u8 = from_ne_bytes;
    /// Reads 16 bits in the machine's byte order.
    read_u16: u16 = from_ne_bytes;
    /// Reads 32 bits in the machine's byte order.
    read_u32: u32 = from_ne_bytes;
    /// Reads 16 bits in network byte order.
    read_be16: u16 = from_be_bytes;
    /// Reads 32 bits in network byte order.
    read_be32: u32 = from_be_bytes;
    /// Reads 64 bits in network byte order.
    read_be64: u64 = from_be_bytes;
}

/// Reads an IPv4 address from 4 bytes or an IPv6 address from 16 bytes.
///
/// # Errors
/// The value has the wrong length.
pub fn read_ip(value: &[u8]) -> Result<IpAddr, Malformed> {
    let address = array::<4>(value).map(IpAddr::from).or_else(|_| array::<16>(value).map(IpAddr::from));
    address.map_err(|_| Malformed("an address that is neither 4 nor 16 bytes long"))
}

/// Reads a text up to the first zero byte or the end of the value.
///
/// # Errors
/// The text is not UTF-8.
pub fn read_text(value: &[u8]) -> Result<String, Malformed> {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(text).map(str::to_owned).map_err(|_| Malformed("a text is not UTF-8"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn malformed_attributes_end_the_iteration_and_are_an_error_for_checked_attributes() {
        assert_eq!(attributes(&[0, 0, 1, 0]).count(), 0);
        assert_eq!(attributes(&[9, 0, 1, 0, 1]).count(), 0);
        let bytes = [5, 0, 1, 0, 7, 0, 0, 0, 9, 0, 2, 0, 1];
        let found: Vec<_> = checked_attributes(&bytes).collect();
        assert_eq!(found, [Ok((1, &[7][..])), Err(Malformed("a truncated attribute"))]);
        assert_eq!(checked_attributes(&[1]).collect::<Vec<_>>().len(), 1);
        assert_eq!(checked_attributes(&[]).count(), 0);
    }

    proptest! {
        #[test]
        fn the_iteration_over_any_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            prop_assert!(attributes(&bytes).count() <= 20);
            let checked: Vec<_> = checked_attributes(&bytes).collect();
            prop_assert!(checked.iter().rev().skip(1).all(Result::is_ok));
        }
    }
}
