//! Turns valid bytes into nearly valid bytes. The changes are drawn from a seed, so that a failure
//! can be repeated.

use fastrand::Rng;

/// Numbers at which lengths and counters often fail.
const EDGES: [u64; 10] =
    [0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];

/// Changes `bytes` in one to eight places. Parts may be copied from `others`. `words` are pieces of
/// the format's grammar.
pub fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>, others: &[Vec<u8>], words: &[&str]) {
    for _ in 0..1 << rng.u8(0..4) {
        let at = rng.usize(0..=bytes.len());
        let end = (at + (1 << rng.u32(0..10))).min(bytes.len());
        match rng.u8(0..11) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(0..8),
            1 if at < bytes.len() => bytes[at] = rng.u8(..),
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let part = bytes[at..end].to_vec();
                let to = rng.usize(0..=bytes.len());
                bytes.splice(to..to, part);
            }
            5 => drop(bytes.splice(at..at, (0..rng.u8(1..9)).map(|_| rng.u8(..)).collect::<Vec<_>>())),
            6 => drop(bytes.splice(at..end.min(at + 1), varint(EDGES[rng.usize(0..EDGES.len())]))),
            7 => {
                let number = EDGES[rng.usize(0..EDGES.len())].to_string();
                bytes.splice(at..at, number.into_bytes());
            }
            8 if !words.is_empty() => {
                let word = words[rng.usize(0..words.len())].as_bytes().to_vec();
                bytes.splice(at..end.min(at + word.len()), word);
            }
            9 if !others.is_empty() => {
                let other = &others[rng.usize(0..others.len())];
                let from = rng.usize(0..=other.len());
                let to = (from + (1 << rng.u32(0..10))).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            // Repeats one piece, so that nested formats nest deeply.
            10 => {
                let part = bytes[at..end.min(at + 8)].to_vec();
                bytes.splice(at..at, part.repeat(1 << rng.u32(0..9)));
            }
            _ => {}
        }
    }
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

/// Changes a sequence: messages are mutated, removed, repeated and swapped.
pub fn mutate_sequence(rng: &mut Rng, messages: &mut Vec<Vec<u8>>) {
    let all = messages.clone();
    for _ in 0..rng.u8(1..5) {
        if messages.is_empty() {
            return;
        }
        let at = rng.usize(0..messages.len());
        match rng.u8(0..8) {
            0 => drop(messages.remove(at)),
            1 => messages.insert(at, all[rng.usize(0..all.len())].clone()),
            2 => {
                let other = rng.usize(0..messages.len());
                messages.swap(at, other);
            }
            _ => mutate(rng, &mut messages[at], &all, &[]),
        }
    }
}
