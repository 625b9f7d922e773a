//! Assembles gRPC messages from the bytes of a stream. The bytes may arrive in pieces of any size.

use headgate_proto::{MAX_AGENT_MESSAGE_BYTES, frame::PREFIX_BYTES};

/// Why bytes are not valid messages of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Malformed {
    /// A message is longer than discovery.proto allows.
    TooLarge,
    /// A message is compressed, which the server does not support.
    Compressed,
    /// The stream ended in the middle of a message.
    Incomplete,
}

/// Assembles messages. This type stores only the received part of an incomplete message.
#[derive(Debug, Default)]
pub(super) struct Messages(Vec<u8>);

impl Messages {
    /// Adds bytes, and passes each message that they complete to `take`.
    ///
    /// # Errors
    ///
    /// The error of `take`, or [`Malformed`]. `feed` must not be called again after an error.
    pub(super) fn feed<E: From<Malformed>>(
        &mut self,
        bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut arrived = std::mem::take(&mut self.0);
        arrived.extend_from_slice(bytes);
        let mut taken = 0;
        while let Some(([compressed, length @ ..], rest)) = arrived[taken..].split_first_chunk::<PREFIX_BYTES>() {
            let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
            if length > MAX_AGENT_MESSAGE_BYTES {
                return Err(Malformed::TooLarge.into());
            }
            if *compressed != 0 {
                return Err(Malformed::Compressed.into());
            }
            let Some(message) = rest.get(..length) else { break };
            take(message)?;
            taken += PREFIX_BYTES + length;
        }
        if taken < arrived.len() {
            arrived.drain(..taken);
            self.0 = arrived;
        }
        Ok(())
    }

    /// Checks that the stream may end here.
    ///
    /// # Errors
    ///
    /// [`Malformed::Incomplete`] in the middle of a message.
    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Incomplete) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0][..], &length.to_be_bytes(), message].concat()
    }

    fn read(pieces: &[&[u8]]) -> (Vec<Vec<u8>>, Result<(), Malformed>) {
        let (mut messages, mut taken) = (Messages::default(), Vec::new());
        for piece in pieces {
            let result = messages.feed(piece, |message| {
                taken.push(message.to_vec());
                Ok::<_, Malformed>(())
            });
            if result.is_err() {
                return (taken, result);
            }
        }
        (taken, messages.end())
    }

    #[test]
    fn large_and_compressed_messages_are_refused_by_their_prefix() {
        let large = u32::try_from(MAX_AGENT_MESSAGE_BYTES + 1).unwrap().to_be_bytes();
        assert_eq!(read(&[&[0], &large]).1, Err(Malformed::TooLarge));
        assert_eq!(read(&[&[1, 0, 0, 0, 4]]).1, Err(Malformed::Compressed));
        assert_eq!(read(&[&framed(b"ab"), &[0, 0]]), (vec![b"ab".to_vec()], Err(Malformed::Incomplete)));
    }

    proptest! {
        #[test]
        fn messages_are_the_same_wherever_the_bytes_are_cut(
            sent in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|message| framed(message)).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            prop_assert_eq!(read(&pieces), (sent, Ok(())));
        }

        #[test]
        fn memory_is_proportional_to_the_bytes_that_arrived(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..16),
        ) {
            let mut messages = Messages::default();
            let mut total = 0;
            for piece in &pieces {
                total += piece.len();
                if messages.feed(piece, |_| Ok::<_, Malformed>(())).is_err() {
                    break;
                }
                prop_assert!(messages.0.capacity() <= 2 * total.max(64));
            }
        }
    }
}
