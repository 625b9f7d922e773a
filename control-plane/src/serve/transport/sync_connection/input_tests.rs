#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

/// An event that owns its bytes. Successive events of data are merged into one.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Data(Vec<u8>),
    Other(String),
}

fn read(pieces: &[&[u8]]) -> (Vec<Seen>, Result<(), Violation>) {
    let (mut input, mut seen) = (Input::default(), Vec::new());
    for piece in [PREFACE].iter().chain(pieces) {
        let result = input.feed(piece, |event| {
            match (event, seen.last_mut()) {
                (FrameEvent::Data(bytes), Some(Seen::Data(data))) => data.extend_from_slice(bytes),
                (FrameEvent::Data(bytes), _) => seen.push(Seen::Data(bytes.to_vec())),
                (event, _) => seen.push(Seen::Other(format!("{event:?}"))),
            }
            Ok::<_, Violation>(())
        });
        if result.is_err() {
            return (seen, result);
        }
    }
    (seen, Ok(()))
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

#[test]
fn a_frame_in_small_pieces_is_copied_once_and_its_memory_is_freed() {
    let mut input = Input::default();
    input.feed(PREFACE, |_| Ok::<_, Violation>(())).unwrap();
    let bytes = [frame(kind::PRIORITY, 0, 1, &[0; 5]), frame(0xff, 0, 0, &[0; 16_000])].concat();
    let mut allocations = 0;
    for byte in &bytes {
        let before = input.partial.capacity();
        input.feed(&[*byte], |_| Ok::<_, Violation>(())).unwrap();
        allocations += u32::from(input.partial.capacity() > before);
    }
    assert!(allocations < 24, "{allocations}");
    assert_eq!(input.partial.capacity(), 0);
}

fn opened() -> Vec<u8> {
    frame(kind::HEADERS, flag::END_HEADERS, 1, b"not decoded here")
}

fn after_opening(frames: &[Vec<u8>]) -> (Vec<Seen>, Result<(), Violation>) {
    let bytes = [opened(), frames.concat()].concat();
    let (mut seen, result) = read(&[&bytes]);
    assert_eq!(seen.remove(0), Seen::Other("Opened { stream: 1 }".into()));
    (seen, result)
}

fn refused(frames: &[Vec<u8>]) -> Code {
    after_opening(frames).1.unwrap_err().code
}

fn other(text: &str) -> Seen {
    Seen::Other(text.into())
}

#[test]
fn data_is_passed_on_without_padding_and_counted_with_padding() {
    let padded = frame(kind::DATA, flag::PADDED, 1, b"\x03ab\0\0\0");
    let last = frame(kind::DATA, flag::END_STREAM, 1, b"c");
    let (seen, result) = after_opening(&[padded, last]);
    assert_eq!(result, Ok(()));
    let received = |bytes| other(&format!("Received {{ is_ours: true, bytes: {bytes} }}"));
    assert_eq!(seen, [Seen::Data(b"ab".into()), received(6), Seen::Data(b"c".into()), received(1), other("EndStream")]);
    assert_eq!(refused(&[frame(kind::DATA, flag::PADDED, 1, b"\x04abc")]), Code::ProtocolError);
    assert_eq!(refused(&[frame(kind::DATA, flag::PADDED, 1, b"")]), Code::FrameSizeError);
}

#[test]
fn trailers_end_the_stream_and_later_frames_are_refused() {
    let trailers = frame(kind::HEADERS, flag::END_STREAM, 1, b"x");
    let rest = frame(kind::CONTINUATION, flag::END_HEADERS, 1, b"y");
    assert_eq!(after_opening(&[trailers.clone(), rest.clone()]), (vec![other("EndStream")], Ok(())));
    let late = frame(kind::DATA, 0, 1, b"late");
    assert_eq!(refused(&[trailers.clone(), rest.clone(), late.clone()]), Code::StreamClosed);
    // No other frame may interrupt a header block.
    assert_eq!(refused(&[trailers.clone(), late]), Code::ProtocolError);
    assert_eq!(refused(&[trailers, frame(kind::CONTINUATION, 0, 3, b"y")]), Code::ProtocolError);
    assert_eq!(refused(&[rest]), Code::ProtocolError);
    assert_eq!(refused(&[frame(kind::HEADERS, flag::END_HEADERS, 1, b"again")]), Code::ProtocolError);
}

#[test]
fn other_streams_are_reported_and_their_data_is_counted() {
    let open = frame(kind::HEADERS, flag::END_HEADERS, 3, b"x");
    let data = frame(kind::DATA, 0, 3, b"abc");
    let (seen, result) = after_opening(&[open, data, frame(kind::RST_STREAM, 0, 3, &[0; 4])]);
    assert_eq!((seen, result), (vec![other("OtherStream"), other("Received { is_ours: false, bytes: 3 }")], Ok(())));
    for stream in [2, 0] {
        assert_eq!(refused(&[frame(kind::HEADERS, flag::END_HEADERS, stream, b"x")]), Code::ProtocolError);
    }
    for kind in [kind::DATA, kind::RST_STREAM, kind::WINDOW_UPDATE] {
        assert_eq!(refused(&[frame(kind, 0, 5, &[0, 0, 0, 1])]), Code::ProtocolError, "idle stream, {kind}");
    }
}

#[test]
fn settings_pings_and_window_updates_are_reported() {
    let settings = frame(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 1, 0, 0, 3, 0, 0, 0, 1, 0xff, 0xff, 1, 2, 3, 4]);
    let ping = frame(kind::PING, 0, 0, b"12345678");
    let frames = [
        settings,
        frame(kind::SETTINGS, flag::ACK, 0, b""),
        ping,
        frame(kind::PING, flag::ACK, 0, b"12345678"),
        frame(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 1, 0]),
        frame(kind::WINDOW_UPDATE, 0, 1, &[0x80, 0, 0, 7]),
        frame(kind::PRIORITY, 0, 1, &[0; 5]),
        frame(kind::GOAWAY, 0, 0, &[0; 12]),
        frame(0x55, 0xff, 9, b"unknown frames are ignored"),
        frame(kind::RST_STREAM, 0, 1, &[0, 0, 0, 8]),
    ];
    let expected = [
        "InitialWindow(256)",
        "Settings",
        "Ping([49, 50, 51, 52, 53, 54, 55, 56])",
        "WindowUpdate { is_ours: false, bytes: 256 }",
        "WindowUpdate { is_ours: true, bytes: 7 }",
        "Reset",
    ];
    assert_eq!(after_opening(&frames), (expected.iter().map(|text| other(text)).collect(), Ok(())));
}

#[test]
fn malformed_frames_are_refused_by_their_header() {
    let cases = [
        (frame(kind::SETTINGS, 0, 0, &[0; 5]), Code::FrameSizeError),
        (frame(kind::SETTINGS, flag::ACK, 0, &[0; 6]), Code::FrameSizeError),
        (frame(kind::SETTINGS, 0, 1, &[]), Code::ProtocolError),
        (frame(kind::SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]), Code::ProtocolError),
        (frame(kind::SETTINGS, 0, 0, &[0, 4, 0x80, 0, 0, 0]), Code::FlowControlError),
        (frame(kind::SETTINGS, 0, 0, &[0, 5, 0, 0, 0, 1]), Code::ProtocolError),
        (frame(kind::PING, 0, 0, &[0; 7]), Code::FrameSizeError),
        (frame(kind::PING, 0, 1, &[0; 8]), Code::ProtocolError),
        (frame(kind::GOAWAY, 0, 0, &[0; 7]), Code::FrameSizeError),
        (frame(kind::PRIORITY, 0, 1, &[0; 4]), Code::FrameSizeError),
        (frame(kind::RST_STREAM, 0, 1, &[0; 5]), Code::FrameSizeError),
        (frame(kind::WINDOW_UPDATE, 0, 1, &[0; 4]), Code::ProtocolError),
        (frame(kind::PUSH_PROMISE, 0, 1, &[0; 4]), Code::ProtocolError),
        (frame(kind::DATA, 0, 1, &[0; 16_385]), Code::FrameSizeError),
    ];
    for (frame, code) in cases {
        assert_eq!(refused(std::slice::from_ref(&frame)), code, "{frame:?}");
    }
}

#[test]
fn a_client_may_send_no_more_than_its_window() {
    let mut window = ReceiveWindow::default();
    assert_eq!(window.receive(30_000), Ok(None));
    assert_eq!(window.receive(10_000), Ok(Some(40_000)));
    assert_eq!(window.receive(65_536).unwrap_err().code, Code::FlowControlError);
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let kinds = prop_oneof![8 => 0_u8..10, 1 => any::<u8>()];
    let streams = prop_oneof![4 => Just(1_u32), 3 => Just(0), 2 => Just(3), 1 => any::<u32>()];
    let sizes = prop_oneof![Just(0_usize), Just(4), Just(5), Just(6), Just(8), 0..40_usize];
    (kinds, any::<u8>(), streams, sizes)
        .prop_flat_map(|(kind, flags, stream, size)| {
            (Just((kind, flags, stream)), prop::collection::vec(any::<u8>(), size))
        })
        .prop_map(|((kind, flags, stream), payload)| frame(kind, flags, stream, &payload))
}

proptest! {
    #[test]
    fn events_are_the_same_wherever_the_bytes_are_cut(
        frames in prop::collection::vec(any_frame(), 0..12),
        garbage in prop::collection::vec(any::<u8>(), 0..20),
        is_open in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let start = if is_open { opened() } else { Vec::new() };
        let bytes = [start, frames.concat(), garbage].concat();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
        prop_assert_eq!(read(&pieces), read(&[&bytes]));
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        prop_assert_eq!(read(&single), read(&[&bytes]));
    }
}
