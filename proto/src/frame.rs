//! gRPC framing of messages that many streams share.

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;

/// The length of the prefix: a compression flag and a 32-bit length (gRPC over HTTP/2,
/// "Length-Prefixed-Message").
pub const PREFIX_BYTES: usize = 5;

/// Encodes a message once with its gRPC prefix, uncompressed. Clones of the result share its
/// memory.
#[must_use]
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut buffer = BytesMut::with_capacity(PREFIX_BYTES + length);
    buffer.put_u8(0);
    buffer.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // `BytesMut` grows as needed, so the encoding cannot fail.
    message.encode_raw(&mut buffer);
    buffer.freeze()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::v1;

    #[test]
    fn prefix_is_flag_and_big_endian_length() {
        let message = v1::ServiceKey { namespace: "a".into(), name: "b".into() };
        let framed = frame(&message);
        assert_eq!(&framed[..PREFIX_BYTES], &[0, 0, 0, 0, 6]);
        assert_eq!(v1::ServiceKey::decode(&framed[PREFIX_BYTES..]).unwrap(), message);
    }
}
