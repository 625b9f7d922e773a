//! Sends nearly valid bytes to all code that reads bytes from outside. The code must accept or
//! refuse each input without a panic. The size of the input must limit the memory that the code
//! uses.
//!
//! Valid inputs are in `tests/corpus`, one folder for each target. A case is one of these files
//! with a few changes that are drawn from a seed. `make test` runs a bounded number of cases. To
//! run more:
//!
//! ```sh
//! HEADGATE_FUZZ_CASES=1000000 HEADGATE_FUZZ_SEED=7 \
//!   cargo nextest run --release -p headgate-tests --test streams fuzz
//! ```
//!
//! A failing input is written to `target/fuzz`. After the fix, add the input to the corpus.

mod agents;
mod connections;
mod control_plane;
mod mutate;
mod node_agent;
mod streams;

use std::{
    alloc::System,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use fastrand::Rng;
use headgate_control_plane::objects::ObjectKind;
use headgate_proto::frame::PREFIX_BYTES;
use mutate::{mutate, mutate_sequence};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait as _};

#[global_allocator]
static ALLOCATOR: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

const CASES: u64 = 1_500;

/// The peak memory that a case may use: a base for tables that always exist, and a factor for
/// parts of the input that are kept. Code that trusts a length before its bytes arrive would exceed
/// this limit by far.
const BASE_BYTES: usize = 2 << 20;
const BYTES_PER_INPUT_BYTE: usize = 400;

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let named = files
        .into_iter()
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()));
    let named: Vec<_> = named.collect();
    assert!(!named.is_empty(), "the corpus of {target} is empty");
    named
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Runs one input. Returns the problem if the code panics or uses too much memory.
fn trial<T>(bytes: usize, run: impl FnOnce() -> T) -> Result<T, String> {
    ALLOCATOR.reset_peak_memory();
    let result = catch_unwind(AssertUnwindSafe(run)).map_err(|_| "the input causes a panic".to_owned())?;
    let peak = ALLOCATOR.get_peak_memory();
    let allowed = BASE_BYTES + bytes * BYTES_PER_INPUT_BYTE;
    if peak > allowed { Err(format!("the code used {peak} bytes, and {allowed} are allowed")) } else { Ok(result) }
}

fn keep(target: &str, input: &[u8], problem: &str) -> ! {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fuzz").join(target);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("failed");
    fs::write(&path, input).unwrap();
    panic!("{target}: {problem}; the input was written to {}", path.display());
}

/// Fuzzes one target. `run` returns whether any part of an input was valid. Every corpus file must
/// be valid in part, unless its name begins with `bad-`.
fn fuzz(target: &str, words: &[&str], run: impl Fn(&str, &[u8]) -> bool) {
    let corpus = corpus(target);
    for (name, bytes) in &corpus {
        match trial(bytes.len(), || run(name, bytes)) {
            // Files with names like `bad-*` made the code fail earlier, and may be invalid in every
            // part.
            Ok(is_good) => {
                assert!(is_good || name.starts_with("bad-"), "{target}: no part of {name} in the corpus is valid");
            }
            Err(problem) => keep(target, bytes, &problem),
        }
    }
    let others: Vec<Vec<u8>> = corpus.iter().map(|(_, bytes)| bytes.clone()).collect();
    let mut rng = Rng::with_seed(number("HEADGATE_FUZZ_SEED", 1));
    let (cases, mut good) = (number("HEADGATE_FUZZ_CASES", CASES), 0_u64);
    for _ in 0..cases {
        let (name, bytes) = &corpus[rng.usize(0..corpus.len())];
        let mut bytes = bytes.clone();
        mutate(&mut rng, &mut bytes, &others, words);
        match trial(bytes.len(), || run(name, &bytes)) {
            Ok(is_good) => good += u64::from(is_good),
            Err(problem) => keep(target, &bytes, &problem),
        }
    }
    // If every input were valid, the mutations would change nothing. If no input were valid, only
    // the first check would be tested.
    assert!(good > cases / 50 && good < cases, "{target}: {good} of {cases} inputs were valid");
}

const YAML_WORDS: &[&str] = &[
    "---\n",
    "...\n",
    "&a ",
    "*a",
    "!!binary ",
    "|\n ",
    ">-\n ",
    "? ",
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "#",
    "null",
    "~",
    "<<: *a\n",
    "\t",
    "apiVersion: v1\n",
    "kind: List\nitems:\n",
    "kind: Service\n",
    "metadata:\n  name: ",
    "clusterIP: None\n",
    "255.255.255.255",
    "::ffff:1.2.3.4",
    "\u{feff}",
    "\u{85}",
    "\u{2028}",
    "1e999",
    ".inf",
    "0x7fffffffffffffff",
    "-1",
    "65536",
];

const JSON_WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "null",
    "true",
    "1e999",
    "-1",
    "\\u0000",
    "\\ud800",
    "\n",
    "\"metadata\":",
    "\"items\":null,",
    "\"object\":",
    "\"type\":\"DELETED\"",
    "\"type\":\"ERROR\"",
    "\"resourceVersion\":\"\"",
    "\"addresses\":[\"fe80::1%eth0\"]",
    "\"clusterIP\":\"None\"",
    "65536",
];

#[test]
fn mutated_manifests_are_read_safely() {
    fuzz("manifest", YAML_WORDS, |name, bytes| control_plane::manifest(bytes, name.ends_with(".json")) > 0);
}

fn kind_of(name: &str) -> ObjectKind {
    let kinds = ObjectKind::ALL.into_iter().chain([ObjectKind::Pod]);
    kinds.max_by_key(|kind| usize::from(name.contains(kind.name())) * kind.name().len()).unwrap()
}

#[test]
fn mutated_watches_are_read_safely() {
    fuzz("watch", JSON_WORDS, |name, bytes| control_plane::watch(kind_of(name), bytes) > 0);
}

#[test]
fn mutated_lists_are_read_safely() {
    fuzz("list", JSON_WORDS, |name, bytes| control_plane::list(kind_of(name), bytes) > 0);
}

#[test]
fn mutated_configurations_are_read_safely() {
    fuzz("configuration", YAML_WORDS, |_, bytes| std::str::from_utf8(bytes).is_ok_and(node_agent::configuration));
}

/// Fuzzes what precedes the checksum in a state file. The checksums are correct.
#[test]
fn mutated_state_files_are_read_safely() {
    fuzz("state", &[], |_, content| node_agent::state_file(content));
}

/// Splits a stream into messages by their gRPC prefixes. The prefixes are removed.
fn messages_of(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let Some((prefix, rest)) = bytes.split_at_checked(PREFIX_BYTES) {
        let length = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
        let (message, rest) = rest.split_at(length);
        messages.push(message.to_vec());
        bytes = rest;
    }
    messages
}

/// Fuzzes a target that takes a sequence of messages. `run` returns the number of messages that
/// took effect.
fn fuzz_messages(target: &str, run: impl Fn(&[Vec<u8>]) -> usize) {
    let corpus: Vec<Vec<Vec<u8>>> = corpus(target).iter().map(|(_, bytes)| messages_of(bytes)).collect();
    for messages in &corpus {
        assert!(run(messages) > 0, "{target}: a stream of the corpus has no effect");
    }
    let mut rng = Rng::with_seed(number("HEADGATE_FUZZ_SEED", 1));
    let (cases, mut good) = (number("HEADGATE_FUZZ_CASES", CASES), 0_u64);
    for _ in 0..cases {
        let mut messages = corpus[rng.usize(0..corpus.len())].clone();
        mutate_sequence(&mut rng, &mut messages);
        match trial(messages.iter().map(Vec::len).sum(), || run(&messages)) {
            Ok(effects) => good += u64::from(effects > 0),
            Err(problem) => keep(target, &messages.concat(), &problem),
        }
    }
    assert!(good > cases / 50 && good < cases, "{target}: {good} of {cases} streams had an effect");
}

#[test]
fn mutated_server_streams_are_read_safely() {
    fuzz_messages("server_stream", |messages| node_agent::server_stream(messages.iter().map(Vec::as_slice)));
}

#[test]
fn mutated_agent_streams_are_read_safely() {
    fuzz_messages("agent_stream", |messages| control_plane::agent_stream(messages.iter().map(Vec::as_slice)));
}

#[test]
fn mutated_certificates_are_read_safely() {
    fuzz("certificate", &["headgate://node/", "headgate://reader/", "system:node:", "system:nodes"], |_, der| {
        control_plane::certificate(der)
    });
}
