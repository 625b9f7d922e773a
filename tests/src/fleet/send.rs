//! Garbage that misbehaving agents send.

use super::{Garbage, http2::Http2};

/// Appends garbage for a layer. Garbage instead of TLS records is appended to `cipher`. All other
/// garbage is appended to `plain`, which is encrypted later.
pub(super) fn garbage(layer: Garbage, http2: &mut Http2, plain: &mut Vec<u8>, cipher: &mut Vec<u8>) {
    let noise: Vec<u8> = (0..256).map(|_| fastrand::u8(..)).collect();
    match layer {
        // No content type of TLS has its first bit set.
        Garbage::Tls => cipher.extend(noise.iter().map(|byte| byte | 0x80)),
        // The first bytes announce a frame of 16 MiB, but at most 16 KiB are allowed.
        Garbage::Http2 => plain.extend([0xff; 9].into_iter().chain(noise)),
        // The prefix contains an invalid compression flag and a length above the limit. The garbage
        // fits into the server's windows, because the agent has sent few bytes before.
        Garbage::Grpc => {
            http2.send_data(&[0x7f, 0xff, 0xff, 0xff, 0xff], &noise, plain);
        }
        // The first field has the number 0, which is invalid.
        Garbage::Message => {
            http2.send(&[0x02; 64], plain);
        }
    }
}
