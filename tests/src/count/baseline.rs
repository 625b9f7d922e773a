//! The counts in the repository, and the comparison with new ones.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

/// The largest growth that needs no reason, in percent.
pub const MOST_PERCENT: f64 = 2.0;
/// A smaller change, in percent, may be noise and is not written.
const NOISE_PERCENT: f64 = 0.5;

const HEAD: &str = "\
# Counted instructions of hot paths. `make count WRITE=1 REASON=\"...\"` writes this file: the reason
# is the last column of each line that changes (docs/benchmarks.md). The first line names the tools.
";

/// The file of counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Baseline {
    /// The tools with which the instructions were counted.
    pub tools: String,
    /// For each path: its instructions, and the reason for the last change.
    pub paths: BTreeMap<String, (u64, String)>,
}

/// The comparison of all paths.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Comparison {
    /// A table for people.
    pub table: String,
    /// Whether the counts are not acceptable.
    pub is_failed: bool,
}

impl Baseline {
    /// Reads the text of the file.
    ///
    /// # Errors
    /// A line is not a path, a number and a reason.
    pub fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let tools = lines.next().unwrap_or_default().to_owned();
        let path = |line: &str| {
            let (name, rest) = line.split_once(' ')?;
            let (number, reason) = rest.trim_start().split_once(' ')?;
            Some((name.to_owned(), (number.parse().ok()?, reason.trim().to_owned())))
        };
        let paths = lines.map(|line| path(line).with_context(|| format!("not a path, a number and a reason: {line}")));
        Ok(Self { tools, paths: paths.collect::<Result<_>>()? })
    }

    /// The text of the file.
    #[must_use]
    pub fn text(&self) -> String {
        let line = |(name, (count, reason)): (&String, &(u64, String))| format!("{name:<20} {count:>12}  {reason}\n");
        format!("{HEAD}{}\n{}", self.tools, self.paths.iter().map(line).collect::<String>())
    }

    /// Takes new counts that differ, with the reason.
    pub fn write(&mut self, tools: &str, counts: &BTreeMap<String, u64>, reason: &str) {
        let is_other = self.tools != tools;
        for (name, count) in counts {
            let known = self.paths.get(name).map(|(known, _)| *known);
            if is_other || known.is_none_or(|known| percent(known, *count).abs() > NOISE_PERCENT) {
                self.paths.insert(name.clone(), (*count, reason.to_owned()));
            }
        }
        tools.clone_into(&mut self.tools);
    }

    /// Compares new counts. With other tools than those of the file, nothing fails.
    #[must_use]
    pub fn compare(&self, tools: &str, counts: &BTreeMap<String, u64>) -> Comparison {
        let is_other = self.tools != tools;
        let mut table = format!("{:<20} {:>12} {:>12} {:>8}\n", "path", "baseline", "now", "change");
        let (mut dearer, mut cheaper) = (false, false);
        for (name, now) in counts {
            let Some((known, _)) = self.paths.get(name) else {
                table += &format!("{name:<20} {:>12} {now:>12} {:>8}  NEW\n", "-", "-");
                dearer = true;
                continue;
            };
            let change = percent(*known, *now);
            let verdict = match change {
                _ if is_other => "",
                change if change > MOST_PERCENT => "  DEARER",
                change if change < -MOST_PERCENT => "  cheaper",
                _ => "",
            };
            dearer |= verdict == "  DEARER";
            cheaper |= verdict == "  cheaper";
            table += &format!("{name:<20} {known:>12} {now:>12} {change:>+7.2}%{verdict}\n");
        }
        if is_other {
            table += &format!("not compared: counted with {tools}, and the baseline with {}\n", self.tools);
            return Comparison { table, is_failed: false };
        }
        if dearer {
            table += "A path has become dearer, or is new. Make it cheaper, or say why it costs more:\n";
        } else if cheaper {
            table += "A path has become cheaper. Keep that:\n";
        }
        if dearer || cheaper {
            table += "  make count WRITE=1 REASON=\"...\"    (writes tests/counts.txt)\n";
        }
        Comparison { table, is_failed: dearer }
    }
}

fn percent(before: u64, now: u64) -> f64 {
    (now as f64 / before as f64 - 1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &str = "rustc 1";

    fn counts(count: u64) -> BTreeMap<String, u64> {
        [("commit".to_owned(), count)].into()
    }

    /// A baseline of one path with 1,000 instructions, as the file has it.
    fn baseline() -> Baseline {
        let mut baseline = Baseline::default();
        baseline.write(TOOLS, &counts(1_000), "the first count");
        let read = Baseline::parse(&baseline.text()).expect("the file cannot be read");
        assert_eq!(read, baseline);
        read
    }

    #[test]
    fn only_a_path_that_costs_over_two_percent_more_fails() {
        let baseline = baseline();
        for (count, is_failed, verdict) in [
            (1_050, true, "DEARER"),
            (1_021, true, "DEARER"),
            (1_019, false, ""),
            (1_000, false, ""),
            (981, false, ""),
            (950, false, "cheaper"),
        ] {
            let Comparison { table, is_failed: found } = baseline.compare(TOOLS, &counts(count));
            assert_eq!(found, is_failed, "{table}");
            assert!(table.contains(verdict) && table.contains("WRITE=1") != verdict.is_empty(), "{table}");
        }
        let new = [("resume".to_owned(), 1)].into();
        assert!(baseline.compare(TOOLS, &new).is_failed, "a path without a baseline");
        let other = baseline.compare("rustc 2", &counts(1_050));
        assert!(!other.is_failed && other.table.contains("not compared"), "{}", other.table);
    }

    #[test]
    fn noise_is_not_written_and_a_change_has_its_reason() {
        let mut baseline = baseline();
        baseline.write(TOOLS, &counts(1_004), "noise");
        assert_eq!(baseline, self::baseline());
        baseline.write(TOOLS, &counts(1_050), "a check more");
        assert_eq!(baseline.paths["commit"], (1_050, "a check more".to_owned()));
        assert!(!baseline.compare(TOOLS, &counts(1_050)).is_failed);
    }
}
