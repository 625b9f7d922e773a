//! Sends nearly valid bytes to all code that reads bytes from outside. The code must accept or
//! refuse each input without a panic. The size of the input must limit the memory that the code
//! uses.
//!
//! Valid inputs are in `tests/corpus`, one folder for each target. A case is one of these files
//! with a few changes that are drawn from a seed. `make test` runs a bounded number of cases. This
//! command runs each target for ten minutes, two at a time, and prints the number of inputs and of
//! findings:
//!
//! ```sh
//! HEADGATE_FUZZ_SECONDS=600 HEADGATE_FUZZ_SEED=7 \
//!   cargo nextest run --release --locked -p headgate-tests --test streams --test programs \
//!   --profile fuzz
//! ```
//!
//! A failing input is written to `target/fuzz`. After the fix, add the input to the corpus.
//!
//! | bytes | come from | target |
//! | --- | --- | --- |
//! | HTTP/2 frames, HPACK, gRPC requests | whoever reaches a port | `connection` |
//! | requests to enrol, with tokens and signing requests | whoever reaches the port | `enrolment` |
//! | requests to the pages of the agent | pods | `programs/fuzz.rs` |
//! | Services, slices, Nodes, pods as JSON | tenants | `list`, `watch` |
//! | the same as YAML and JSON files | tenants | `manifest` |
//! | annotations | tenants | `annotation` |
//! | messages of agents | nodes | `agent_stream` |
//! | answers to queries | nodes | `query_answer` |
//! | rosters, answers to questions | replicas | `peer_stream` |
//! | names in certificates | nodes, readers | `certificate` |
//! | messages of replicas | replicas | `server_stream` |
//! | state files | other versions of the agent | `state` |
//! | configurations of kube-proxy | operators | `configuration` |
//! | rules in the kernel | other programs on the node | `iptables_save`, `netlink` |
//!
//! Tokens are no format to Headgate: the API server reads them, and the enrolment target sends any
//! bytes in their place.

mod agents;
mod connections;
mod control_plane;
mod enrolment;
mod kernel;
mod node_agent;
mod queries;
mod streams;

use std::{
    alloc::System,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use headgate_control_plane::objects::ObjectKind;
use headgate_proto::PREFIX_BYTES;
use headgate_tests::fuzz::{Run, corpus, mutate, mutate_sequence};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait as _};

#[global_allocator]
static ALLOCATOR: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

const CASES: u64 = 1_500;

/// The peak memory that a case may use: a base for tables that always exist, and a factor for
/// parts of the input that are kept. Code that trusts a length before its bytes arrive would exceed
/// this limit by far.
const BASE_BYTES: usize = 2 << 20;
const BYTES_PER_INPUT_BYTE: usize = 400;

/// Runs one input. Returns the problem if the code panics or uses too much memory.
fn trial<T>(bytes: usize, run: impl FnOnce() -> T) -> Result<T, String> {
    ALLOCATOR.reset_peak_memory();
    let result = catch_unwind(AssertUnwindSafe(run)).map_err(|_| "the input causes a panic".to_owned())?;
    within_bounds(bytes).map(|()| result)
}

/// Checks the peak of the memory since it was reset, for an input of this size.
fn within_bounds(bytes: usize) -> Result<(), String> {
    let (peak, allowed) = (ALLOCATOR.get_peak_memory(), BASE_BYTES + bytes * BYTES_PER_INPUT_BYTE);
    if peak > allowed { Err(format!("the code used {peak} bytes, and {allowed} are allowed")) } else { Ok(()) }
}

/// Counts the panics of all threads from now on. A panic of a server ends only its task.
fn count_panics() -> Arc<AtomicUsize> {
    let panics = Arc::new(AtomicUsize::new(0));
    let (counter, usual) = (Arc::clone(&panics), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        counter.fetch_add(1, Ordering::SeqCst);
        usual(panic);
    }));
    panics
}

/// Checks what a server did with an input: no panic, and bounded memory.
fn served(panics: &AtomicUsize, bytes: usize) -> Result<(), String> {
    if panics.swap(0, Ordering::SeqCst) > 0 {
        return Err("the input causes a panic".to_owned());
    }
    within_bounds(bytes)
}

/// Fuzzes one target. `run` returns whether any part of an input was valid. Every corpus file must
/// be valid in part, unless its name begins with `bad-`.
fn fuzz(target: &str, words: &[&str], run: impl Fn(&str, &[u8]) -> bool) {
    let corpus = corpus(target);
    for (name, bytes) in &corpus {
        let is_good =
            trial(bytes.len(), || run(name, bytes)).unwrap_or_else(|problem| panic!("{target}/{name}: {problem}"));
        // Files with names like `bad-*` made the code fail earlier, and may be invalid in every
        // part.
        assert!(is_good || name.starts_with("bad-"), "{target}: no part of {name} in the corpus is valid");
    }
    let others: Vec<Vec<u8>> = corpus.iter().map(|(_, bytes)| bytes.clone()).collect();
    let mut cases = Run::new(target, CASES);
    while cases.goes_on() {
        let (name, bytes) = &corpus[cases.rng.usize(0..corpus.len())];
        let mut bytes = bytes.clone();
        mutate(&mut cases.rng, &mut bytes, &others, words);
        let began = Instant::now();
        let result = trial(bytes.len(), || run(name, &bytes));
        cases.count(&bytes, began, result);
    }
    cases.finish();
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

/// The values of annotations that another actor may write, one file for each.
#[test]
fn mutated_annotations_are_read_safely() {
    fuzz("annotation", &["=", ",", "=0", "=100", "=101", "10.244.1.7", "fd00::1", "ms", "h", "65536"], |key, value| {
        std::str::from_utf8(value).is_ok_and(|value| control_plane::annotation(key, value))
    });
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
    let mut cases = Run::new(target, CASES);
    while cases.goes_on() {
        let mut messages = corpus[cases.rng.usize(0..corpus.len())].clone();
        mutate_sequence(&mut cases.rng, &mut messages);
        let began = Instant::now();
        let result = trial(messages.iter().map(Vec::len).sum(), || run(&messages) > 0);
        cases.count(&messages.concat(), began, result);
    }
    cases.finish();
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
fn mutated_streams_of_other_replicas_are_read_safely() {
    let channel = control_plane::unused_channel();
    fuzz_messages("peer_stream", |messages| control_plane::peer_stream(&channel, messages.iter().map(Vec::as_slice)));
}

#[test]
fn mutated_certificates_are_read_safely() {
    fuzz("certificate", &["headgate://node/", "headgate://reader/", "system:node:", "system:nodes"], |_, der| {
        control_plane::certificate(der)
    });
}
