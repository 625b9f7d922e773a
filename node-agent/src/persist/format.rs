//! The format of the state file: a preamble, and then records. Each record has a checksum that also
//! covers all records before it.
//!
//! ```text
//! "HEADGATE"  format version, u32
//! { kind, u8   length, u32   payload   checksum, 16 bytes }*
//! ```
//!
//! Numbers are little-endian. A checksum is the first 16 bytes of SHA-256 over the previous
//! checksum, the kind, the length and the payload. The first record uses the hash of the preamble
//! as the previous checksum. A reader therefore detects records that were changed, moved, repeated
//! or removed.

use std::io::{self, Read, Write};

use sha2::{Digest as _, Sha256};

/// First bytes of the file.
pub(super) const MAGIC: [u8; 8] = *b"HEADGATE";
/// The version of the format. The number grows with each incompatible change. Compatible changes of
/// the protobuf messages in the payloads do not change the number.
pub(super) const FORMAT_VERSION: u32 = 2;
/// Maximum length of a payload. Writers begin a new record at a fraction of this length.
pub(super) const MAX_PAYLOAD_BYTES: usize = 4 << 20;

const CHECKSUM_BYTES: usize = 16;

/// The kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The node's name as text. The first record, and only the first, is of this kind.
    Owner = 1,
    /// `v1::Changes`: resources and removals that take effect at the next point.
    Changes = 2,
    /// `v1::OwnNode`: the agent's own Node, which takes effect at the next point.
    Node = 3,
    /// `v1::Resume`: a point. The records up to a point form a state that a replica sent and that
    /// the kernel had. The first point contains the digests of the state.
    Point = 4,
}

impl Kind {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Owner, Self::Changes, Self::Node, Self::Point].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Why the file, or a part of it, cannot be read. Each text continues a sentence that begins with
/// the name of the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormatError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is not a regular file")]
    NoFile,
    #[error("is not a state file of Headgate")]
    Magic,
    #[error("has format version {0}, and this program reads version {FORMAT_VERSION}")]
    Version(u32),
    #[error("ends in the middle of the record at byte {0}")]
    CutOff(u64),
    #[error("is damaged at byte {0}: the checksum does not match")]
    Checksum(u64),
    #[error("is damaged at byte {0}: a record of kind {1} with {2} bytes is not valid")]
    Record(u64, u8, u32),
}

/// The checksum over all records so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain([u8; CHECKSUM_BYTES]);

impl Chain {
    fn start() -> Self {
        Self(first_bytes(Sha256::new().chain_update(MAGIC).chain_update(FORMAT_VERSION.to_le_bytes())))
    }

    fn next(&self, head: [u8; 5], payload: &[u8]) -> Self {
        Self(first_bytes(Sha256::new().chain_update(self.0).chain_update(head).chain_update(payload)))
    }
}

fn first_bytes(hash: Sha256) -> [u8; CHECKSUM_BYTES] {
    let mut first = [0; CHECKSUM_BYTES];
    first.copy_from_slice(&hash.finalize()[..CHECKSUM_BYTES]);
    first
}

/// Writes records and counts bytes.
#[derive(Debug)]
pub(super) struct Writer<W> {
    output: W,
    chain: Chain,
    bytes: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the preamble of a new file.
    pub(super) fn begin(mut output: W) -> io::Result<Self> {
        output.write_all(&MAGIC)?;
        output.write_all(&FORMAT_VERSION.to_le_bytes())?;
        Ok(Self { output, chain: Chain::start(), bytes: (MAGIC.len() + 4) as u64 })
    }

    /// Continues after the record with the checksum `chain`. Counts bytes from 0.
    pub(super) fn resume(output: W, chain: Chain) -> Self {
        Self { output, chain, bytes: 0 }
    }

    /// Appends a record.
    pub(super) fn record(&mut self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_PAYLOAD_BYTES);
        let length = length.ok_or_else(|| {
            io::Error::other(format!("a record of {} bytes is too long for the state file", payload.len()))
        })?;
        let head = head(kind, length);
        self.chain = self.chain.next(head, payload);
        self.output.write_all(&head)?;
        self.output.write_all(payload)?;
        self.output.write_all(&self.chain.0)?;
        self.bytes += (head.len() + payload.len() + CHECKSUM_BYTES) as u64;
        Ok(())
    }

    /// Returns the output, the checksum of the last record, and the number of bytes written.
    pub(super) fn finish(self) -> (W, Chain, u64) {
        (self.output, self.chain, self.bytes)
    }
}

fn head(kind: Kind, length: u32) -> [u8; 5] {
    let [a, b, c, d] = length.to_le_bytes();
    [kind as u8, a, b, c, d]
}

/// Reads records, one at a time.
#[derive(Debug)]
pub(super) struct Reader<R> {
    input: R,
    chain: Chain,
    offset: u64,
    payload: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// Reads the preamble.
    pub(super) fn begin(mut input: R) -> Result<Self, FormatError> {
        let mut preamble = [0; 12];
        let length = read_some(&mut input, &mut preamble)?;
        if length < preamble.len() || preamble[..8] != MAGIC {
            return Err(FormatError::Magic);
        }
        let [.., a, b, c, d] = preamble;
        let version = u32::from_le_bytes([a, b, c, d]);
        if version != FORMAT_VERSION {
            return Err(FormatError::Version(version));
        }
        Ok(Self { input, chain: Chain::start(), offset: preamble.len() as u64, payload: Vec::new() })
    }

    /// The position of the next record in the file.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The checksum of the last record.
    pub(super) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Reads the next record; `None` at the end of the file. Do not call this function again after
    /// an error.
    pub(super) fn next(&mut self) -> Result<Option<(Kind, &[u8])>, FormatError> {
        let mut head_bytes = [0; 5];
        match read_some(&mut self.input, &mut head_bytes)? {
            0 => return Ok(None),
            5 => {}
            _ => return Err(FormatError::CutOff(self.offset)),
        }
        let [kind, a, b, c, d] = head_bytes;
        let length = u32::from_le_bytes([a, b, c, d]);
        let payload_bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let known = Kind::from_byte(kind).filter(|_| payload_bytes <= MAX_PAYLOAD_BYTES);
        let known = known.ok_or(FormatError::Record(self.offset, kind, length))?;
        // The buffer grows with the bytes in the file, and not with the length that a damaged
        // record may state.
        self.payload.clear();
        let read = (&mut self.input).take(u64::from(length)).read_to_end(&mut self.payload)?;
        let mut checksum = [0; CHECKSUM_BYTES];
        if read < payload_bytes || read_some(&mut self.input, &mut checksum)? < CHECKSUM_BYTES {
            return Err(FormatError::CutOff(self.offset));
        }
        let chain = self.chain.next(head_bytes, &self.payload);
        if chain.0 != checksum {
            return Err(FormatError::Checksum(self.offset));
        }
        self.chain = chain;
        self.offset += (head_bytes.len() + payload_bytes + CHECKSUM_BYTES) as u64;
        Ok(Some((known, &self.payload)))
    }
}

/// Fills the buffer until it is full or the input ends. Returns the number of bytes read.
fn read_some(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
