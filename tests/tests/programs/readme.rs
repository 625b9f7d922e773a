//! Runs the commands of the quick start, of the protocol guide, and of the pages about pods that
//! stop and about verified state, and compares their output with the lines below them.
//!
//! In a `console` block, a line that begins with `# ` is a command. A `\` at the end of a line
//! continues the command on the next line. The lines up to the next command are the expected
//! output. A line with only `…` matches any number of lines, `…` at the end of a line matches any
//! rest of the line, and a duration (31ms) matches any duration. Everything else must be equal.
//! `sh` blocks start the programs.
//!
//! Two things differ from the page: `make test` has built the programs, and the namespace has
//! another name, so that an existing namespace `try` is not touched.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use headgate_tests::testbed::{
    netns,
    process::{program, tool},
};
use tempfile::TempDir;

/// The longest wait for an expected output. Only a failing test waits this long.
const GUARD: Duration = Duration::from_secs(60);

/// A command and its expected output.
#[derive(Debug, PartialEq, Eq)]
struct Example {
    command: String,
    printed: Vec<String>,
}

/// The bodies of the code blocks of a language, in order.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let begin = format!("```{language}\n");
    text.split(&begin).skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}

fn examples(console: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut continues = false;
    for line in console.lines() {
        let command = line.strip_prefix("# ");
        match (command, examples.last_mut()) {
            (_, Some(example)) if continues => example.command.push_str(&format!("\n{line}")),
            (Some(command), _) => examples.push(Example { command: command.to_owned(), printed: Vec::new() }),
            (None, Some(example)) => example.printed.push(line.to_owned()),
            (None, None) => panic!("a console block begins with {line:?}, which is not a command"),
        }
        continues = (continues || command.is_some()) && line.ends_with('\\');
    }
    examples
}

/// Replaces every duration in a line, and removes spaces at the end of the line.
fn without_durations(line: &str) -> String {
    let is_duration = |word: &str| {
        let number = word.strip_suffix("ms").or_else(|| word.strip_suffix('s')).unwrap_or_default();
        !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.')
    };
    let words = line.trim_end().split(' ').map(|word| if is_duration(word) { "<duration>" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// Whether the printed lines match the expected lines.
fn matches_page(expected: &[String], printed: &[String]) -> bool {
    match expected {
        [] => printed.is_empty(),
        [elided, rest @ ..] if elided.trim() == "…" => {
            (0..=printed.len()).any(|at| matches_page(rest, &printed[at..]))
        }
        [line, rest @ ..] => printed.split_first().is_some_and(|(first, others)| {
            let (line, first) = (without_durations(line), without_durations(first));
            let is_same = line.strip_suffix('…').map_or(line == first, |begin| first.starts_with(begin));
            is_same && matches_page(rest, others)
        }),
    }
}

/// The programs of a page, which a shell runs. When the shell's standard input closes, the shell
/// ends the programs with the page's own command. The input also closes if this test is killed.
struct Session {
    shell: Child,
    folder: TempDir,
    namespace: String,
    aliases: String,
}

impl Session {
    fn start(page: &str) -> Self {
        netns::check_prerequisites().unwrap();
        let namespace = format!("hg{}-docs", std::process::id());
        let folder = tempfile::tempdir().unwrap();
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        fs::create_dir_all(folder.path().join("target/tools")).unwrap();
        symlink(program("headgatectl").unwrap().parent().unwrap(), folder.path().join("target/debug")).unwrap();
        symlink(tool("grpcurl"), folder.path().join("target/tools/grpcurl")).unwrap();
        for name in ["docs", "proto"] {
            symlink(repository.join(name), folder.path().join(name)).unwrap();
        }
        let start: String = blocks(page, "sh").concat();
        let start: Vec<&str> = start.lines().filter(|line| !line.starts_with("cargo build ")).collect();
        let end = page.split("To end the example: `").nth(1).unwrap().split('`').next().unwrap();
        let script = format!("set -e\n{}\nset +e\nread -r _\n{end}\nwait\n", start.join("\n"));
        let log = File::create(folder.path().join("log")).unwrap();
        let mut shell = Command::new("bash");
        shell.args(["-c", &in_namespace(&script, &namespace)]).current_dir(folder.path());
        shell.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log);
        Self { shell: shell.spawn().unwrap(), folder, namespace, aliases: String::new() }
    }

    fn run(&self, command: &str) -> io::Result<(bool, Vec<String>)> {
        let script = in_namespace(&format!("{}{command}", self.aliases), &self.namespace);
        let mut shell = Command::new("bash");
        shell.args(["-O", "expand_aliases", "-c", &format!("exec 2>&1\n{script}")]);
        let output = shell.env("NO_COLOR", "1").current_dir(self.folder.path()).output()?;
        let printed = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        Ok((output.status.success(), printed))
    }

    /// Repeats a command until its output is as expected, because the programs may not be ready at
    /// first.
    fn expect(&mut self, example: &Example) {
        let Example { command, printed: expected } = example;
        if command.starts_with("alias ") {
            assert_eq!(expected, &[] as &[String]);
            self.aliases.push_str(&format!("{command}\n"));
            return;
        }
        let deadline = Instant::now() + GUARD;
        loop {
            let (is_success, printed) = self.run(command).unwrap();
            if is_success && matches_page(expected, &printed) {
                return;
            }
            let (expected, printed) = (expected.join("\n"), printed.join("\n"));
            assert!(Instant::now() < deadline, "`{command}` prints\n{printed}\n\nand not\n{expected}\n");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
        if thread::panicking() {
            eprintln!("--- {}", fs::read_to_string(self.folder.path().join("log")).unwrap_or_default());
        }
    }
}

/// Replaces the namespace name `try` in a script by `namespace`.
fn in_namespace(script: &str, namespace: &str) -> String {
    let words = script.split_inclusive([' ', '\n', ';']);
    words
        .map(|word| match word.strip_prefix("try") {
            Some(rest) if rest.is_empty() || rest.starts_with([' ', '\n', ';']) => format!("{namespace}{rest}"),
            _ => word.to_owned(),
        })
        .collect()
}

/// Runs the commands of a page below `docs/`.
fn check(page: &str) {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let text = fs::read_to_string(docs.join(page)).unwrap();
    let blocks = blocks(&text, "console");
    assert!(blocks.len() >= 3, "{page} has fewer than three blocks of examples");
    let mut session = Session::start(&text);
    for block in blocks {
        examples(block).iter().for_each(|example| session.expect(example));
    }
}

#[test]
fn commands_of_the_quick_start_print_the_lines_below_them() {
    check("quick-start.md");
}

#[test]
fn commands_of_the_protocol_guide_print_the_lines_below_them() {
    check("protocol.md");
}

#[test]
fn commands_of_the_page_about_pods_that_stop_print_the_lines_below_them() {
    check("drain.md");
}

#[test]
fn commands_of_the_page_about_verified_state_print_the_lines_below_them() {
    check("verify.md");
}
