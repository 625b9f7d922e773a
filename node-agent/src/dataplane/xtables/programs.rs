//! The programs: `iptables-save` to read, `iptables-restore --noflush` to write.

use std::{
    borrow::Cow,
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    process::{Command, Output, Stdio},
    sync::Arc,
};

use headgate_core::{
    Family, ServiceKey,
    iptables::{
        Existing, ExistingReader, Ledger, Script, Table,
        script::{Piece, Writing},
    },
};

use super::super::{DataplaneError, ErrorKind};

/// Seconds to wait for the lock that all iptables programs share (legacy only; nft ignores it).
const LOCK_WAIT_SECONDS: &str = "5";

/// Exit status of an iptables program that cannot do anything with what it was asked (xtables.h,
/// PARAMETER_PROBLEM).
const EXIT_PARAMETER_PROBLEM: i32 = 2;

/// Exit status of an iptables program that did not get the lock (xtables.h, RESOURCE_PROBLEM).
const EXIT_RESOURCE_PROBLEM: i32 = 4;

/// Writes what a script leaves for later: the chains of services.
pub(in crate::dataplane) type Render<'a> = dyn FnMut(&[Arc<ServiceKey>], &mut String) + 'a;

/// Which iptables the rules are written with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Variant {
    /// The one that the node uses already.
    #[default]
    Auto,
    /// `iptables-legacy-restore`.
    Legacy,
    /// `iptables-nft-restore`.
    Nft,
}

/// The programs of one family and variant.
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

    /// The family.
    pub(in crate::dataplane) fn family(&self) -> Family {
        self.family
    }

    /// How these programs are given all services at once. The nft variant holds what it has read
    /// until it commits, some 1.5 KB a rule, and gets slower as that grows; the legacy variant
    /// reads and writes the whole table at each commit, so that steps would cost the square of
    /// their number.
    pub(in crate::dataplane) fn writing(&self) -> Writing {
        if self.variant == "nft" { Writing::LateInSteps } else { Writing::Late }
    }

    fn name(&self, tool: &str) -> String {
        let base = match self.family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        if tool.is_empty() { format!("{base}-{}", self.variant) } else { format!("{base}-{}-{tool}", self.variant) }
    }

    /// True when the programs are installed.
    pub(in crate::dataplane) fn are_installed(&self) -> bool {
        Command::new(self.name("restore")).arg("--version").output().is_ok_and(|output| output.status.success())
    }

    /// What of ours the kernel has in a table. Empty where the table does not exist yet.
    pub(in crate::dataplane) fn existing(&self, table: Table) -> Result<Existing, DataplaneError> {
        let mut reader = ExistingReader::new(table);
        self.save(table, |line| reader.line(line))?;
        Ok(reader.finish())
    }

    /// Reads a table line by line.
    pub(in crate::dataplane) fn save(&self, table: Table, mut take: impl FnMut(&str)) -> Result<(), DataplaneError> {
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
        read.map_err(|error| DataplaneError::new(ErrorKind::Retry, format!("{program}: reading rules: {error}")))
    }

    /// False for a legacy table that nobody has used yet: looking at it by program would create it.
    /// `/proc/net` is of the process, and programs run in the network namespace of the thread that
    /// starts them.
    fn may_have(&self, table: Table) -> bool {
        let names = match self.family {
            Family::V4 => "/proc/thread-self/net/ip_tables_names",
            Family::V6 => "/proc/thread-self/net/ip6_tables_names",
        };
        // Without the kernel's module there is no such file, and no table.
        let exists =
            || std::fs::read_to_string(names).is_ok_and(|names| names.lines().any(|name| name == table.as_str()));
        self.variant != "legacy" || exists()
    }

    /// Runs a script that holds all its text. Each table's part takes effect as a whole or not at
    /// all.
    pub(in crate::dataplane) fn restore(&self, script: &Script) -> Result<(), DataplaneError> {
        self.restore_with(script, &mut |_, _| {})
    }

    /// Runs a script, with what it leaves for later as `render` writes it.
    pub(in crate::dataplane) fn restore_with(
        &self,
        script: &Script,
        render: &mut Render<'_>,
    ) -> Result<(), DataplaneError> {
        let program = self.name("restore");
        tracing::trace!(%program, %script, "restoring");
        let mut child = Command::new(&program)
            .args(["--noflush", "-w", LOCK_WAIT_SECONDS])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| start_error(&program, &error))?;
        let mut late_lines = Vec::new();
        let written =
            child.stdin.take().map_or(Ok(()), |stdin| write_pieces(stdin, script, &mut *render, &mut late_lines));
        let output = child.wait_with_output().map_err(|error| start_error(&program, &error))?;
        if !output.status.success() {
            return Err(rejection(failure(&program, &offending_line(script, render, &late_lines, &output), &output)));
        }
        // A program that succeeds has read everything; had it not, success would mean nothing.
        written.map_err(|error| {
            DataplaneError::new(ErrorKind::NeedsFullSync, format!("{program}: writing rules: {error}"))
        })
    }

    /// Tries a script that changes nothing for packets, and empties the canary chains again.
    /// Returns why it is rejected, if it is.
    pub(in crate::dataplane) fn try_out(&self, trial: &Script) -> Result<Option<String>, DataplaneError> {
        let tried = self.restore(trial);
        self.restore(&Ledger::end_of_trials())?;
        match tried {
            Ok(()) => Ok(None),
            Err(error) if error.kind == ErrorKind::Rejected => Ok(Some(error.message)),
            Err(error) => Err(error),
        }
    }

    /// True when a chain exists.
    pub(in crate::dataplane) fn has_chain(&self, table: Table, chain: &str) -> Result<bool, DataplaneError> {
        let output = self.test(table, &["-S", chain, "1"])?;
        self.is_found(table, &output)
    }

    /// True when a rule exists in a chain. `rule` is as `iptables-save` prints it.
    pub(in crate::dataplane) fn has_rule(&self, table: Table, chain: &str, rule: &str) -> Result<bool, DataplaneError> {
        let words = split_rule(rule);
        let mut arguments = vec!["-C", chain];
        arguments.extend(words.iter().map(String::as_str));
        let output = self.test(table, &arguments)?;
        // A rule cannot lead to a chain that does not exist. Each variant complains about it in
        // words of its own, as it does about what is wrong with the question itself.
        let target = words.iter().skip_while(|word| *word != "-j").nth(1);
        if output.status.code() == Some(EXIT_PARAMETER_PROBLEM)
            && let Some(target) = target
            && !self.has_chain(table, target)?
        {
            return Ok(false);
        }
        self.is_found(table, &output)
    }

    fn test(&self, table: Table, arguments: &[&str]) -> Result<Output, DataplaneError> {
        let program = self.name("");
        let mut command = Command::new(&program);
        command.args(["-w", LOCK_WAIT_SECONDS, "-t", table.as_str()]).args(arguments);
        command.output().map_err(|error| start_error(&program, &error))
    }

    fn is_found(&self, table: Table, output: &Output) -> Result<bool, DataplaneError> {
        match output.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(failure(&self.name(""), &format!("cannot look at table {table}"), output)),
        }
    }
}

/// Writes a script. `late_lines` takes the number of lines that each call of `render` made.
fn write_pieces(
    stdin: impl io::Write,
    script: &Script,
    render: &mut Render<'_>,
    late_lines: &mut Vec<usize>,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(64 << 10, stdin);
    let mut late = String::new();
    for piece in script.pieces() {
        match piece {
            Piece::Text(text) => writer.write_all(text.as_bytes())?,
            Piece::Services(services) => {
                late.clear();
                render(services, &mut late);
                late_lines.push(late.lines().count());
                writer.write_all(late.as_bytes())?;
            }
        }
    }
    writer.flush()
}

/// Splits a rule into words; quotes enclose a comment.
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
    DataplaneError::new(ErrorKind::Retry, format!("{program} did not run: {error}"))
}

/// What iptables programs say when a write failed for what the machine was in the middle of, or for
/// what this process may do, and not for what was written. Their exit status does not tell: the nft
/// variant ends with 4 for everything that the kernel rejects.
const NOT_FOR_THE_RULES: [&str; 7] = [
    "xtables lock",
    "Resource temporarily unavailable",
    "Device or resource busy",
    "Cannot allocate memory",
    "No buffer space available",
    "Permission denied",
    "Operation not permitted",
];

/// The error of a restore that failed, as what it is.
fn rejection(error: DataplaneError) -> DataplaneError {
    let is_rejection = !NOT_FOR_THE_RULES.iter().any(|words| error.message.contains(words));
    DataplaneError { kind: if is_rejection { ErrorKind::Rejected } else { error.kind }, ..error }
}

fn failure(program: &str, what: &str, output: &Output) -> DataplaneError {
    let code = output.status.code();
    let kind = if code == Some(EXIT_RESOURCE_PROBLEM) { ErrorKind::Retry } else { ErrorKind::NeedsFullSync };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).take(5).collect();
    DataplaneError::new(kind, format!("{program} ({}): {what}: {}", output.status, said.join("; ")))
}

/// The line of the script that the program complained about, such as `line 17 failed` or `Error
/// occurred at line: 17`.
fn offending_line(script: &Script, render: &mut Render<'_>, late_lines: &[usize], output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let number = stderr.lines().find_map(|line| {
        let (_, rest) = line.split_once("line")?;
        let digits: String =
            rest.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        digits.parse::<usize>().ok()
    });
    let line = number.and_then(|number| nth_line(script, render, late_lines, number.checked_sub(1)?));
    line.map_or_else(|| "rules rejected".to_owned(), |line| format!("rejected `{line}`"))
}

/// A line of a script, counted from 0. What was rendered while the script was written is rendered
/// again, unless it has become something else.
fn nth_line(script: &Script, render: &mut Render<'_>, late_lines: &[usize], mut index: usize) -> Option<String> {
    let mut late_lines = late_lines.iter();
    for piece in script.pieces() {
        let (text, lines) = match piece {
            Piece::Text(text) => (Cow::Borrowed(text), text.lines().count()),
            Piece::Services(services) => {
                let lines = *late_lines.next()?;
                let mut text = String::new();
                if index < lines {
                    render(services, &mut text);
                    if text.lines().count() != lines {
                        return None;
                    }
                }
                (Cow::Owned(text), lines)
            }
        };
        if index < lines {
            return text.lines().nth(index).map(str::to_owned);
        }
        index -= lines;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_rules_differ_from_what_may_succeed_later() {
        let kind = |said: &str| rejection(DataplaneError::new(ErrorKind::Retry, said)).kind;
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

    #[test]
    fn rules_are_split_at_spaces_outside_of_comments() {
        let words = split_rule(r#"-m comment --comment "kubernetes service portals" -j KUBE-SERVICES"#);
        assert_eq!(words, ["-m", "comment", "--comment", "kubernetes service portals", "-j", "KUBE-SERVICES"]);
    }
}
