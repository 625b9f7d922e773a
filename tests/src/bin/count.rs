//! Counts the instructions of hot paths: `make count`.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use headgate_tests::count::{PATHS, baseline::Baseline, count, tools};

/// Counts the instructions of hot paths with valgrind, and compares them with the baseline
#[derive(Debug, Parser)]
struct Arguments {
    /// Count only this path
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Write the baseline, with the reason
    #[arg(long, requires = "reason")]
    write: bool,
    /// Why paths cost more or less than before
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// The baseline
    #[arg(long, default_value = "tests/counts.txt", value_name = "FILE")]
    baseline: PathBuf,
    /// Folder for the profiles, which `callgrind_annotate` reads
    #[arg(long, default_value = "target/count", value_name = "DIR")]
    profiles: PathBuf,
    /// Run this path once, under valgrind
    #[arg(long, hide = true, value_name = "NAME")]
    inside: Option<String>,
}

fn main() -> Result<ExitCode> {
    let Arguments { only, write, reason, baseline: file, profiles, inside } = Arguments::parse();
    if let Some(name) = inside {
        let (.., run) = PATHS.into_iter().find(|(known, ..)| *known == name).context("no such path")?;
        return run().map(|()| ExitCode::SUCCESS);
    }
    ensure!(!cfg!(debug_assertions), "this program is not optimized: run `make count`");
    let chosen: Vec<_> =
        PATHS.into_iter().filter(|(name, ..)| only.as_deref().is_none_or(|only| only == *name)).collect();
    ensure!(!chosen.is_empty(), "no such path; the paths are {}", PATHS.map(|(name, ..)| name).join(", "));
    let text = fs::read_to_string(&file).unwrap_or_default();
    let mut baseline = Baseline::parse(&text).with_context(|| format!("reading {}", file.display()))?;
    let (tools, counts) = (tools()?, count(&chosen, &profiles)?);
    let compared = baseline.compare(&tools, &counts);
    print!("{}", compared.table);
    if write {
        let reason = reason.map(|reason| reason.trim().to_owned()).filter(|reason| !reason.is_empty());
        baseline.write(&tools, &counts, &reason.context("REASON=\"...\" must say why")?);
        fs::write(&file, baseline.text()).with_context(|| format!("writing {}", file.display()))?;
        println!("wrote {}", file.display());
    } else if compared.is_failed {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}
