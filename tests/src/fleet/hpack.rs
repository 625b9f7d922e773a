//! HPACK (RFC 7541) as replicas and this client use it: without a dynamic table and Huffman codes.
//! Everything else in a header block of a replica is an error.

/// The header block cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a header block is malformed, has another status than 200, or uses a dynamic table or a Huffman code")]
pub(super) struct Malformed;

/// The update that sets the size of the dynamic table to 0.
const EMPTY_TABLE: u8 = 0x20;
/// The field `:status: 200` of the static table.
const STATUS_200: u8 = 0x88;

/// The status fields in trailers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Status {
    pub(super) grpc_status: Option<u32>,
    pub(super) grpc_message: String,
}

/// Appends the fields of the request for `Sync`.
pub(super) fn put_request(block: &mut Vec<u8>, authority: &str) {
    // `:method: POST` and `:scheme: https`.
    block.extend_from_slice(&[0x83, 0x87]);
    // Names are numbers of the static table, or texts with their lengths.
    let fields: [(&[u8], &str); 4] = [
        (&[4], "/headgate.v1.Discovery/Sync"),
        (&[1], authority),
        (&[15, 31 - 15], "application/grpc"),
        (b"\x00\x02te", "trailers"),
    ];
    for (name, value) in fields {
        block.extend_from_slice(name);
        // A length below 127 is one byte.
        block.push(u8::try_from(value.len()).unwrap_or_default());
        block.extend_from_slice(value.as_bytes());
    }
}

/// Whether a header block begins with an update that sets the size of the dynamic table to 0. If
/// the receiver allows no dynamic table, the first block must begin with this update (RFC 9113,
/// 4.3.1).
pub(super) fn disables_dynamic_table(block: &[u8]) -> bool {
    block.first() == Some(&EMPTY_TABLE)
}

/// Decodes a header block.
pub(super) fn read(block: &[u8]) -> Result<Status, Malformed> {
    let mut reader = Reader(block.strip_prefix(&[EMPTY_TABLE]).unwrap_or(block));
    let mut status = Status::default();
    while let Some(first) = reader.0.first().copied() {
        match first {
            STATUS_200 => reader.0 = &reader.0[1..],
            // A literal that is not indexed.
            0..0x20 => {
                let name = if reader.number(4)? == 0 { reader.text()? } else { b"" };
                let value = std::str::from_utf8(reader.text()?).map_err(|_| Malformed)?;
                match name {
                    b"grpc-status" => status.grpc_status = Some(value.parse().map_err(|_| Malformed)?),
                    b"grpc-message" => value.clone_into(&mut status.grpc_message),
                    _ => {}
                }
            }
            _ => return Err(Malformed),
        }
    }
    Ok(status)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Reads an integer with a prefix of `prefix_bits` bits (RFC 7541, section 5.1).
    fn number(&mut self, prefix_bits: u8) -> Result<usize, Malformed> {
        let most = (1_usize << prefix_bits) - 1;
        let mut number = usize::from(self.take(1)?[0]) & most;
        if number < most {
            return Ok(number);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.take(1)?[0];
            number += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed)
    }

    fn text(&mut self) -> Result<&'a [u8], Malformed> {
        // The first bit stands for a Huffman code.
        if self.0.first().is_none_or(|first| first & 0x80 != 0) {
            return Err(Malformed);
        }
        let length = self.number(7)?;
        self.take(length)
    }
}
