//! The fleet in simulated time (`headgate_tests::simulate`), with the binary `simulate`: it
//! replaces clocks and random numbers, which a test program must not do.

use std::process::{Command, Output};

use headgate_tests::testbed::process::program;

fn simulate(arguments: &[&str]) -> (Output, String) {
    let output = Command::new(program("simulate").unwrap()).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

#[test]
fn no_claim_is_false_in_simulated_time() {
    let (output, text) = simulate(&["--seeds", "1000", "--stop-after", "1"]);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    // Each question is answered definitely by some seed.
    for answer in [
        "Agents: up to date",
        "Drain: drained",
        "Drain: last",
        "DrainUnready: incomplete",
        "Gate: Programmed",
        "PodAsks: drained",
        "Verify: drift",
        "Verify: verified",
        "Wait: done",
        "WaitGone: done",
    ] {
        assert!(text.contains(&format!("  {answer}\n")), "{answer} is missing in\n{text}");
    }
}

#[test]
fn no_claim_is_false_in_a_larger_world() {
    let size = ["--replicas", "4", "--nodes", "12", "--services", "60"];
    let (output, text) = simulate(&[&["--seeds", "20", "--stop-after", "1"], &size[..]].concat());
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (output, _) = simulate(&["--seed", "1", "--nodes", "2"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("3 to 100 nodes"), "{error}");
}

#[test]
fn a_seed_gives_the_same_story_twice() {
    for (seed, nodes) in [("3", "3"), ("70", "3"), ("4711", "5")] {
        let [one, other] = [1, 2].map(|_| simulate(&["--seed", seed, "--nodes", nodes]).1);
        assert!(one == other && one.contains("simulated seconds, hash "), "{one}\n{other}");
    }
}
