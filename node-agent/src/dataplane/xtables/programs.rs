//! Runs the iptables programs: `iptables-save` to read, `iptables-restore --noflush` to write.

use std::{
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    process::{Child, ChildStdin, Command, Output, Stdio},
};

use headgate_core::{
    Family,
    iptables::{ExistingReader, ExistingRules, RulesLedger, RulesTable, Script},
};

use super::super::{DataplaneError, ErrorKind};

/// Seconds to wait for the lock of the legacy programs. The nft variant has no lock.
const LOCK_WAIT_SECONDS: &str = "5";

/// Exit status of an iptables program that rejects its arguments (xtables.h, PARAMETER_PROBLEM).
const EXIT_PARAMETER_PROBLEM: i32 = 2;

/// Exit status of an iptables program that did not get the lock (xtables.h, RESOURCE_PROBLEM).
const EXIT_RESOURCE_PROBLEM: i32 = 4;

/// Which variant of iptables writes the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Variant {
    /// The variant that the node already uses.
    #[default]
    Auto,
    /// `iptables-legacy-restore`.
    Legacy,
    /// `iptables-nft-restore`.
    Nft,
}

#[derive(Debug, Clone)]
pub(in crate::dataplane) struct Programs {
    family: Family,
    variant: &'static str,
}

impl Programs {
    /// The programs of a variant, which must not be `Auto`.
    pub(in crate::dataplane) fn new(family: Family, variant: Variant) -> Self {
        Self { family, variant: if variant == Variant::Legacy { "legacy" } else { "nft" } }
    }

    pub(in crate::dataplane) fn family(&self) -> Family {
        self.family
    }

    /// True if a full sync may write the rules in many steps. The nft variant keeps about 1.5 KB
    /// per rule until a commit; the legacy variant reads and writes the whole table at each commit.
    pub(in crate::dataplane) fn can_write_in_parts(&self) -> bool {
        self.variant == "nft"
    }

    fn name(&self, tool: &str) -> String {
        let base = match self.family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        if tool.is_empty() { format!("{base}-{}", self.variant) } else { format!("{base}-{}-{tool}", self.variant) }
    }

    pub(in crate::dataplane) fn are_installed(&self) -> bool {
        Command::new(self.name("restore")).arg("--version").output().is_ok_and(|output| output.status.success())
    }

    /// Reads our chains in a table. The result is empty if the table does not exist yet.
    pub(in crate::dataplane) fn existing(&self, table: RulesTable) -> Result<ExistingRules, DataplaneError> {
        self.existing_by(table, ExistingReader::new(table))
    }

    /// Like [`Self::existing`], with a reader for this table.
    pub(in crate::dataplane) fn existing_by(
        &self,
        table: RulesTable,
        mut reader: ExistingReader,
    ) -> Result<ExistingRules, DataplaneError> {
        self.save(table, |line| reader.line(line))?;
        Ok(reader.finish())
    }

    /// Reads a table with `iptables-save`, and calls `take` with each line.
    pub(in crate::dataplane) fn save(
        &self,
        table: RulesTable,
        mut take: impl FnMut(&str),
    ) -> Result<(), DataplaneError> {
        if !self.may_have(table) {
            return Ok(());
        }
        let program = self.name("save");
        let mut child = Command::new(&program)
            .args(["-t", table.as_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| start_error(&program, &error))?;
        let mut read = Ok(());
        if let Some(stdout) = child.stdout.take() {
            let mut lines = BufReader::with_capacity(64 << 10, stdout);
            let mut line = Vec::new();
            read = loop {
                line.clear();
                match lines.read_until(b'\n', &mut line) {
                    Ok(0) => break Ok(()),
                    Ok(_) => take(String::from_utf8_lossy(&line).trim_end()),
                    Err(error) => break Err(error),
                }
            };
        }
        let output = child.wait_with_output().map_err(|error| start_error(&program, &error))?;
        if !output.status.success() {
            return Err(failure(&program, &format!("cannot read table {table}"), &output));
        }
        read.map_err(|error| DataplaneError::new(ErrorKind::Retry, format!("{program}: cannot read rules: {error}")))
    }

    /// False for a legacy table that does not exist yet: reading would create it. Reads
    /// `/proc/thread-self/net`, because programs run in the network namespace of their thread.
    pub(super) fn may_have(&self, table: RulesTable) -> bool {
        let names = match self.family {
            Family::V4 => "/proc/thread-self/net/ip_tables_names",
            Family::V6 => "/proc/thread-self/net/ip6_tables_names",
        };
        // Without the kernel module, neither the file nor the table exists.
        let exists =
            || std::fs::read_to_string(names).is_ok_and(|names| names.lines().any(|name| name == table.as_str()));
        self.variant != "legacy" || exists()
    }

    /// Runs a script. The changes of one table are applied completely or not at all.
    pub(in crate::dataplane) fn restore(&self, script: &Script) -> Result<(), DataplaneError> {
        let mut restore = self.start()?;
        restore.write(script);
        restore.finish(Some(script))
    }

    pub(in crate::dataplane) fn start(&self) -> Result<Restore, DataplaneError> {
        let program = self.name("restore");
        let mut child = Command::new(&program)
            .args(["--noflush", "-w", LOCK_WAIT_SECONDS])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| start_error(&program, &error))?;
        let stdin = child.stdin.take().map(|stdin| BufWriter::with_capacity(64 << 10, stdin));
        Ok(Restore { program, child, stdin, written: Ok(()) })
    }

    /// Tries a script that writes only to canary chains, which packets do not reach, and then
    /// empties these chains. Returns the reason if the script is rejected.
    pub(in crate::dataplane) fn try_out(&self, trial: &Script) -> Result<Option<String>, DataplaneError> {
        let tried = self.restore(trial);
        self.restore(&RulesLedger::end_of_trials())?;
        match tried {
            Ok(()) => Ok(None),
            Err(error) if error.kind == ErrorKind::Rejected => Ok(Some(error.message)),
            Err(error) => Err(error),
        }
    }

    pub(in crate::dataplane) fn has_chain(&self, table: RulesTable, chain: &str) -> Result<bool, DataplaneError> {
        let output = self.test(table, &["-S", chain, "1"])?;
        self.is_found(table, &output)
    }

    /// True when a rule exists in a chain. `rule` has the form that `iptables-save` prints.
    pub(in crate::dataplane) fn has_rule(
        &self,
        table: RulesTable,
        chain: &str,
        rule: &str,
    ) -> Result<bool, DataplaneError> {
        let words = split_rule(rule);
        let mut arguments = vec!["-C", chain];
        arguments.extend(words.iter().map(String::as_str));
        let output = self.test(table, &arguments)?;
        // Without the target chain there is no rule, and the programs exit with the status for an
        // invalid argument.
        let target = words.iter().skip_while(|word| *word != "-j").nth(1);
        if output.status.code() == Some(EXIT_PARAMETER_PROBLEM)
            && let Some(target) = target
            && !self.has_chain(table, target)?
        {
            return Ok(false);
        }
        self.is_found(table, &output)
    }

    fn test(&self, table: RulesTable, arguments: &[&str]) -> Result<Output, DataplaneError> {
        let program = self.name("");
        let mut command = Command::new(&program);
        command.args(["-w", LOCK_WAIT_SECONDS, "-t", table.as_str()]).args(arguments);
        command.output().map_err(|error| start_error(&program, &error))
    }

    fn is_found(&self, table: RulesTable, output: &Output) -> Result<bool, DataplaneError> {
        match output.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(failure(&self.name(""), &format!("cannot read table {table}"), output)),
        }
    }
}

/// A program that runs one script after the other.
pub(in crate::dataplane) struct Restore {
    program: String,
    child: Child,
    stdin: Option<BufWriter<ChildStdin>>,
    written: io::Result<()>,
}

impl Restore {
    /// Passes a script to the program.
    pub(in crate::dataplane) fn write(&mut self, script: &Script) {
        tracing::trace!(program = self.program, %script, "restoring");
        if let (Some(stdin), Ok(())) = (&mut self.stdin, &self.written) {
            self.written = script.pieces().try_for_each(|piece| stdin.write_all(piece.as_bytes()));
        }
    }

    /// Waits until all scripts have run. If `script` is the only one, the error names the line.
    pub(in crate::dataplane) fn finish(mut self, script: Option<&Script>) -> Result<(), DataplaneError> {
        let flushed = self.stdin.take().map_or(Ok(()), |mut stdin| stdin.flush());
        let output = self.child.wait_with_output().map_err(|error| start_error(&self.program, &error))?;
        if !output.status.success() {
            return Err(classify(failure(&self.program, &offending_line(script, &output), &output)));
        }
        // If the program did not read the whole script, the rules may be incomplete.
        self.written.and(flushed).map_err(|error| {
            DataplaneError::new(ErrorKind::NeedsFullSync, format!("{}: cannot write rules: {error}", self.program))
        })
    }
}

/// Splits a rule into words. A quoted comment is one word.
fn split_rule(rule: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (i, part) in rule.split('"').enumerate() {
        if i % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

fn start_error(program: &str, error: &io::Error) -> DataplaneError {
    if error.kind() == io::ErrorKind::NotFound {
        let message = format!("{program} is not installed; install the package iptables, or choose --iptables-variant");
        return DataplaneError::new(ErrorKind::Unavailable, message);
    }
    DataplaneError::new(ErrorKind::Retry, format!("cannot run {program}: {error}"))
}

/// Messages of iptables programs when the rules are not the cause of a failed write. The exit
/// status does not show it: the nft variant exits with 4 for everything.
const OTHER_CAUSES: [&str; 7] = [
    "xtables lock",
    "Resource temporarily unavailable",
    "Device or resource busy",
    "Cannot allocate memory",
    "No buffer space available",
    "Permission denied",
    "Operation not permitted",
];

/// Makes an error of `iptables-restore` [`ErrorKind::Rejected`] if the rules are the cause.
fn classify(error: DataplaneError) -> DataplaneError {
    let is_rejection = !OTHER_CAUSES.iter().any(|words| error.message.contains(words));
    DataplaneError { kind: if is_rejection { ErrorKind::Rejected } else { error.kind }, ..error }
}

fn failure(program: &str, what: &str, output: &Output) -> DataplaneError {
    let code = output.status.code();
    let kind = if code == Some(EXIT_RESOURCE_PROBLEM) { ErrorKind::Retry } else { ErrorKind::NeedsFullSync };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).take(5).collect();
    DataplaneError::new(kind, format!("{program} ({}): {what}: {}", output.status, lines.join("; ")))
}

/// Describes the line of the script that the program rejects. The program prints the number of this
/// line, such as `line 17 failed` or `Error occurred at line: 17`.
fn offending_line(script: Option<&Script>, output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let number = stderr.lines().find_map(|line| {
        let (_, rest) = line.split_once("line")?;
        let digits: String =
            rest.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        digits.parse::<usize>().ok()
    });
    let line = number.and_then(|number| script?.pieces().flat_map(str::lines).nth(number.checked_sub(1)?));
    line.map_or_else(|| "rules rejected".to_owned(), |line| format!("rejected `{line}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_rules_are_distinguished_from_temporary_errors() {
        let kind = |said: &str| classify(DataplaneError::new(ErrorKind::Retry, said)).kind;
        for said in [
            "iptables-nft-restore (exit status: 4): line 3: RULE_APPEND failed (Invalid argument): rule in chain A",
            "iptables-restore (exit status: 2): Couldn't load match `recent':No such file or directory",
            "iptables-restore (exit status: 1): iptables-restore: line 4 failed",
        ] {
            assert_eq!(kind(said), ErrorKind::Rejected, "{said}");
        }
        for said in [
            "Another app is currently holding the xtables lock; still 1s 0us time ahead to have a chance to grab the lock...",
            "line 9: CHAIN_DEL failed (Device or resource busy): chain A",
            "iptables-restore: Resource temporarily unavailable.",
            "Could not fetch rule set generation id: Permission denied (you must be root)",
        ] {
            assert_eq!(kind(said), ErrorKind::Retry, "{said}");
        }
    }
}
