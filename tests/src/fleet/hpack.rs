//! HPACK (RFC 7541) for a client that allows the server no dynamic table. The client encodes only
//! literals. It decodes every representation that needs no dynamic table.

/// The header block cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a header block is malformed, or uses a dynamic table")]
pub(super) struct Malformed;

/// The indices of `:status` in the static table (RFC 7541, appendix A).
const STATIC_STATUS: std::ops::RangeInclusive<usize> = 8..=14;
const STATIC_ENTRIES: usize = 61;

/// The lengths in bits of the Huffman codes of the bytes 0 to 255 (RFC 7541, appendix B). The code
/// is canonical, so the lengths determine it: codes of equal length are consecutive, in the order
/// of their bytes.
#[rustfmt::skip]
const CODE_LENGTHS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28,
    28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6,
    12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15,
    5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20,
    22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22,
    23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26,
    27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];
const LONGEST_CODE: u8 = 30;

/// The status fields in a response's headers or trailers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Status {
    pub(super) grpc_status: Option<u32>,
    pub(super) grpc_message: String,
    /// The value of `:status`.
    pub(super) http_status: Option<u16>,
}

/// Appends a field with a name from the static table, without indexing.
pub(super) fn put_indexed_name(block: &mut Vec<u8>, index: u8, value: &str) {
    put_number(block, 0, 4, index.into());
    put_text(block, value);
}

/// Appends a field with a literal name, without indexing.
pub(super) fn put_literal(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    put_text(block, name);
    put_text(block, value);
}

fn put_text(block: &mut Vec<u8>, text: &str) {
    put_number(block, 0, 7, text.len());
    block.extend_from_slice(text.as_bytes());
}

/// Appends an integer with a prefix of `prefix_bits` bits (RFC 7541, section 5.1).
fn put_number(block: &mut Vec<u8>, pattern: u8, prefix_bits: u8, number: usize) {
    let most = (1_usize << prefix_bits) - 1;
    // No bits are lost: the prefix and each following group have at most 7 bits.
    let byte = |value: usize| u8::try_from(value & 0xff).unwrap_or_default();
    if number < most {
        block.push(pattern | byte(number));
        return;
    }
    block.push(pattern | byte(most));
    let mut rest = number - most;
    while rest >= 128 {
        block.push(byte(rest % 128) | 128);
        rest /= 128;
    }
    block.push(byte(rest));
}

/// Whether a header block begins with an update that sets the size of the dynamic table to 0. If
/// the receiver allows no dynamic table, the first block must begin with this update (RFC 9113,
/// 4.3.1).
pub(super) fn disables_dynamic_table(block: &[u8]) -> bool {
    block.first() == Some(&0x20)
}

/// Decodes a header block.
pub(super) fn read(block: &[u8]) -> Result<Status, Malformed> {
    let mut reader = Reader(block);
    let mut status = Status::default();
    // Size updates of the dynamic table may come before all fields (RFC 7541, 4.2 and 6.3). The
    // size must be 0.
    while reader.0.first().is_some_and(|first| first & 0xe0 == 0x20) {
        if reader.number(5)? != 0 {
            return Err(Malformed);
        }
    }
    while let Some(first) = reader.0.first().copied() {
        if first & 0x80 != 0 {
            status.take_static(reader.number(7)?)?;
            continue;
        }
        if first & 0xe0 == 0x20 {
            return Err(Malformed);
        }
        let index = reader.number(if first & 0xc0 == 0x40 { 6 } else { 4 })?;
        let name = match index {
            0 => Some(reader.text()?),
            1..=STATIC_ENTRIES => None,
            _ => return Err(Malformed),
        };
        let value = reader.text()?;
        match name.as_deref() {
            Some(b"grpc-status") => status.grpc_status = Some(parse(&value)?),
            Some(b"grpc-message") => status.grpc_message = String::from_utf8_lossy(&value).into_owned(),
            None if STATIC_STATUS.contains(&index) => status.http_status = Some(parse(&value)?),
            _ => {}
        }
    }
    Ok(status)
}

fn parse<T: std::str::FromStr>(text: &[u8]) -> Result<T, Malformed> {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(Malformed)
}

impl Status {
    fn take_static(&mut self, index: usize) -> Result<(), Malformed> {
        const STATUSES: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
        match index {
            1..=STATIC_ENTRIES => {
                if STATIC_STATUS.contains(&index) {
                    self.http_status = STATUSES.get(index - STATIC_STATUS.start()).copied();
                }
                Ok(())
            }
            _ => Err(Malformed),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, Malformed> {
        let (first, rest) = self.0.split_first().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    fn number(&mut self, prefix_bits: u8) -> Result<usize, Malformed> {
        let most = (1_usize << prefix_bits) - 1;
        let mut number = usize::from(self.byte()?) & most;
        if number < most {
            return Ok(number);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.byte()?;
            number += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed)
    }

    fn text(&mut self) -> Result<Vec<u8>, Malformed> {
        let is_huffman = self.0.first().ok_or(Malformed)? & 0x80 != 0;
        let length = self.number(7)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        if is_huffman { unpack(bytes) } else { Ok(bytes.to_vec()) }
    }
}

/// Decodes a Huffman-coded string bit by bit. Such strings are few and short.
fn unpack(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    let mut text = Vec::with_capacity(bytes.len() * 2);
    let (mut code, mut length, mut first, mut before) = (0_u32, 0_u8, 0_u32, 0_usize);
    for bit in bytes.iter().flat_map(|byte| (0..8).rev().map(move |shift| u32::from(byte >> shift & 1))) {
        code = code << 1 | bit;
        length += 1;
        first <<= 1;
        let count = CODE_LENGTHS.iter().filter(|of| **of == length).count();
        let index = usize::try_from(code.wrapping_sub(first)).unwrap_or(usize::MAX);
        if index < count {
            let symbol = CODE_LENGTHS.iter().enumerate().filter(|(_, of)| **of == length).nth(index);
            text.extend(symbol.and_then(|(symbol, _)| u8::try_from(symbol).ok()));
            (code, length, first, before) = (0, 0, 0, 0);
            continue;
        }
        before += count;
        first += u32::try_from(count).unwrap_or_default();
        if length > LONGEST_CODE || before > CODE_LENGTHS.len() {
            return Err(Malformed);
        }
    }
    // The remaining bits are padding: fewer than 8 bits, all ones (section 5.2).
    if length >= 8 || code != (1 << length) - 1 {
        return Err(Malformed);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_examples_of_the_standard_are_decoded() {
        // RFC 7541, C.4.1, C.4.2 and C.6.1.
        assert_eq!(
            unpack(&[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff]).unwrap(),
            b"www.example.com"
        );
        assert_eq!(unpack(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]).unwrap(), b"no-cache");
        let date = [
            0xd0, 0x7a, 0xbe, 0x94, 0x10, 0x54, 0xd4, 0x44, 0xa8, 0x20, 0x05, 0x95, 0x04, 0x0b, 0x81, 0x66, 0xe0, 0x82,
            0xa6, 0x2d, 0x1b, 0xff,
        ];
        assert_eq!(unpack(&date).unwrap(), b"Mon, 21 Oct 2013 20:13:21 GMT");
        assert_eq!(Reader(&[0x1f, 0x9a, 0x0a]).number(5), Ok(1337));
        assert_eq!(unpack(&[0x00]), Err(Malformed), "padding with zeros");
    }

    #[test]
    fn trailers_are_decoded_in_every_representation() {
        let mut block = vec![0x20, 0x88];
        put_literal(&mut block, "grpc-status", "14");
        put_literal(&mut block, "grpc-message", &"x".repeat(200));
        put_indexed_name(&mut block, 31, "application/grpc");
        let status = read(&block).unwrap();
        assert_eq!((status.http_status, status.grpc_status), (Some(200), Some(14)));
        assert_eq!(status.grpc_message.len(), 200);
        assert_eq!(read(&[0xbe]), Err(Malformed), "an entry of the dynamic table");
        assert_eq!(read(&block[..block.len() - 1]), Err(Malformed));
        assert_eq!(read(&[0x21, 0x88]), Err(Malformed), "a dynamic table of one byte");
        assert_eq!(read(&[0x88, 0x20]), Err(Malformed), "a size update after a field");
    }
}
