//! What agents send that is no message.

use super::{Garbage, http2::Http2};

/// Appends garbage of a layer: to `plain` what is to be encrypted, to `cipher` what is not.
pub(super) fn garbage(layer: Garbage, http2: &mut Http2, plain: &mut Vec<u8>, cipher: &mut Vec<u8>) {
    let noise: Vec<u8> = (0..256).map(|_| fastrand::u8(..)).collect();
    match layer {
        // No content type of TLS has the first bit set.
        Garbage::Tls => cipher.extend(noise.iter().map(|byte| byte | 0x80)),
        // A frame that claims 16 MiB, where 16 KiB are allowed.
        Garbage::Http2 => plain.extend([0xff; 9].into_iter().chain(noise)),
        // Neither compressed nor not, and longer than any message may be. The windows of a
        // connection that has sent little take it.
        Garbage::Grpc => {
            http2.send_data(&[0x7f, 0xff, 0xff, 0xff, 0xff], &noise, plain);
        }
        // Field 0, which does not exist.
        Garbage::Message => {
            http2.send(&[0x02; 64], plain);
        }
    }
}
