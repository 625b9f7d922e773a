//! HPACK (RFC 7541) for a client that allows the server no dynamic table. The client encodes only
//! literals. It decodes every representation that needs neither a dynamic table nor Huffman codes,
//! which replicas do not use.

/// The header block cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a header block is malformed, or uses a dynamic table or a Huffman code")]
pub(super) struct Malformed;

/// The indices of `:status` in the static table (RFC 7541, appendix A).
const STATIC_STATUS: std::ops::RangeInclusive<usize> = 8..=14;
const STATIC_ENTRIES: usize = 61;

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
        // Replicas do not compress texts.
        if self.0.first().ok_or(Malformed)? & 0x80 != 0 {
            return Err(Malformed);
        }
        let length = self.number(7)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes.to_vec())
    }
}
