//! Counts the instructions of hot paths in valgrind, which does not depend on the load of the
//! machine, and compares them with `tests/counts.txt`.
//!
//! valgrind runs this program again for each path and counts only what [`measured`] calls. Counts
//! depend on what [`tools`] names, so they are compared only if the file names the same. Hash
//! tables of std have random seeds, which change counts by less than
//! 0.1 %.

pub mod baseline;
mod paths;

use std::{collections::BTreeMap, path::Path, process::Command, thread};

use anyhow::{Context as _, Result, bail, ensure};

pub use self::paths::PATHS;

/// One path: its name, what is measured, and the function that prepares and measures it.
pub type Counted = (&'static str, &'static str, fn() -> Result<()>);

/// The name of [`measured`] in the program.
const MEASURED: &str = "headgate_tests::count::measured";

/// Calls the section of a path whose instructions count.
#[inline(never)]
pub fn measured(section: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let result = section();
    // The call above must not be the last thing here: valgrind counts until this function returns.
    std::hint::black_box(&result);
    result
}

/// Features of processors for which libraries have code of their own.
const FEATURES: [&str; 7] = ["avx2", "avx512f", "bmi2", "erms", "fsrm", "sha_ni", "vaes"];

/// The tools on which counts depend, and the features of the processor.
///
/// # Errors
/// A tool is missing.
pub fn tools() -> Result<String> {
    let first_line = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().with_context(|| format!("running {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok::<_, anyhow::Error>(text.lines().next().unwrap_or_default().to_owned())
    };
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let tools =
        [first_line(&rustc, "-V")?, first_line("valgrind", "--version")?, first_line("getconf", "GNU_LIBC_VERSION")?];
    // Other architectures have no such line, and then the list is empty.
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = processor.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |feature: &&str| flags.split_whitespace().any(|flag| flag == *feature);
    let features: Vec<&str> = FEATURES.into_iter().filter(has).collect();
    Ok(format!("{} on {} with {}", tools.join(", "), std::env::consts::ARCH, features.join(" ")))
}

/// Counts the instructions of paths, two at a time. valgrind writes the profile of each path into
/// `folder`, where `callgrind_annotate` reads it.
///
/// # Errors
/// A path cannot be measured.
pub fn count(chosen: &[Counted], folder: &Path) -> Result<BTreeMap<String, u64>> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut counts = BTreeMap::new();
    for pair in chosen.chunks(2) {
        let results = thread::scope(|scope| {
            let started: Vec<_> = pair.iter().map(|(name, ..)| scope.spawn(move || count_one(name, folder))).collect();
            let ended = started.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a panic"))?);
            ended.collect::<Result<Vec<u64>>>()
        })?;
        counts.extend(pair.iter().map(|(name, ..)| (*name).to_owned()).zip(results));
    }
    Ok(counts)
}

fn count_one(name: &str, folder: &Path) -> Result<u64> {
    let profile = folder.join(format!("{name}.callgrind"));
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", &format!("--toggle-collect={MEASURED}*")]);
    valgrind.arg(format!("--callgrind-out-file={}", profile.display()));
    valgrind.arg(std::env::current_exe()?).args(["--inside", name]);
    let output = valgrind.output().context("starting valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("the path {name} failed:\n{text}");
    }
    let collected = text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    let instructions = collected.with_context(|| format!("valgrind printed no count for {name}:\n{text}"))?;
    ensure!(instructions > 0, "valgrind found no function {MEASURED} for {name}");
    Ok(instructions)
}
