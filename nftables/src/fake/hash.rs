//! The kernel's `jhash` (Bob Jenkins' lookup3, `linux/jhash.h`).

/// Computes the hash of bytes.
pub(super) fn jhash(key: &[u8], seed: u32) -> u32 {
    let length = u32::try_from(key.len()).unwrap_or(u32::MAX);
    let start = 0xdead_beef_u32.wrapping_add(length).wrapping_add(seed);
    let mut state = [start; 3];
    let mut rest = key;
    while rest.len() > 12 {
        let (block, after) = rest.split_at(12);
        add(&mut state, block);
        mix(&mut state);
        rest = after;
    }
    if !rest.is_empty() {
        add_last(&mut state, rest);
        finish(&mut state);
    }
    state[2]
}

/// Scales a hash to the range from 0 to `modulus - 1`.
pub(super) fn scale(hash: u32, modulus: u32) -> u32 {
    u32::try_from((u64::from(hash) * u64::from(modulus)) >> 32).unwrap_or_default()
}

/// Adds a whole block, which is read in the machine's byte order.
fn add(state: &mut [u32; 3], block: &[u8]) {
    for (word, bytes) in state.iter_mut().zip(block.chunks_exact(4)) {
        *word = word.wrapping_add(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    }
}

/// Adds the last bytes, which are read in little-endian order on every machine.
fn add_last(state: &mut [u32; 3], bytes: &[u8]) {
    for (word, bytes) in state.iter_mut().zip(bytes.chunks(4)) {
        let number = bytes.iter().rev().fold(0, |number: u32, byte| number << 8 | u32::from(*byte));
        *word = word.wrapping_add(number);
    }
}

fn mix([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: &mut u32, z: u32, bits: u32| {
        *x = x.wrapping_sub(*y) ^ y.rotate_left(bits);
        *y = y.wrapping_add(z);
    };
    step(a, c, *b, 4);
    step(b, a, *c, 6);
    step(c, b, *a, 8);
    step(a, c, *b, 16);
    step(b, a, *c, 19);
    step(c, b, *a, 4);
}

fn finish([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: u32, bits: u32| *x = (*x ^ y).wrapping_sub(y.rotate_left(bits));
    step(c, *b, 14);
    step(a, *c, 11);
    step(b, *a, 25);
    step(c, *b, 16);
    step(a, *c, 4);
    step(b, *a, 14);
    step(c, *b, 24);
}
