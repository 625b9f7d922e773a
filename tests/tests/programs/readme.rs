//! Runs the commands of the quick start and of the protocol guide, and compares their output with
//! the lines below them.
//!
//! In a `console` block, a line that begins with `# ` is a command; a `\` at its end continues it
//! on the next line. The lines up to the next command are the expected output. A line with `…`
//! alone stands for any number of lines, `…` at the end of a line for any rest of the line, and a
//! duration (31ms) for any duration. All else must be equal. `sh` blocks start the programs.
//!
//! Two things differ from the page: `make test` has built the programs, and the namespace has its
//! own name, so that an existing namespace `try` stays.

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
    process::{grpcurl, program},
};
use tempfile::TempDir;

/// Only ever waited for when the test fails.
const GUARD: Duration = Duration::from_secs(60);

/// A command and its expected output.
#[derive(Debug, PartialEq, Eq)]
struct Example {
    command: String,
    printed: Vec<String>,
}

/// The bodies of a text's code blocks of a language, in order.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let begin = format!("```{language}\n");
    text.split(&begin).skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}

fn examples(console: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut goes_on = false;
    for line in console.lines() {
        let command = line.strip_prefix("# ");
        match (command, examples.last_mut()) {
            (_, Some(example)) if goes_on => example.command.push_str(&format!("\n{line}")),
            (Some(command), _) => examples.push(Example { command: command.to_owned(), printed: Vec::new() }),
            (None, Some(example)) => example.printed.push(line.to_owned()),
            (None, None) => panic!("a console block begins with {line:?}, which is no command"),
        }
        goes_on = (goes_on || command.is_some()) && line.ends_with('\\');
    }
    examples
}

/// The line with every duration replaced, and without space at its end.
fn without_durations(line: &str) -> String {
    let is_duration = |word: &str| {
        let number = word.strip_suffix("ms").or_else(|| word.strip_suffix('s')).unwrap_or_default();
        !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.')
    };
    let words = line.trim_end().split(' ').map(|word| if is_duration(word) { "<duration>" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// Whether the output is as expected.
fn is_as_said(said: &[String], printed: &[String]) -> bool {
    match said {
        [] => printed.is_empty(),
        [elided, rest @ ..] if elided.trim() == "…" => (0..=printed.len()).any(|at| is_as_said(rest, &printed[at..])),
        [line, rest @ ..] => printed.split_first().is_some_and(|(first, others)| {
            let (line, first) = (without_durations(line), without_durations(first));
            let is_same = line.strip_suffix('…').map_or(line == first, |begin| first.starts_with(begin));
            is_same && is_as_said(rest, others)
        }),
    }
}

/// The programs of a page. A shell runs them, and ends them with the page's own command when its
/// standard input ends, also when this test is killed.
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
        symlink(grpcurl(), folder.path().join("target/tools/grpcurl")).unwrap();
        symlink(repository.join("docs"), folder.path().join("docs")).unwrap();
        let start: String = blocks(page, "sh").concat();
        let start: Vec<&str> = start.lines().filter(|line| !line.starts_with("cargo build ")).collect();
        let end = page.split("To end it: `").nth(1).unwrap().split('`').next().unwrap();
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

    /// Until the programs are ready, answers are others.
    fn expect(&mut self, example: &Example) {
        let Example { command, printed: said } = example;
        if command.starts_with("alias ") {
            assert_eq!(said, &[] as &[String]);
            self.aliases.push_str(&format!("{command}\n"));
            return;
        }
        let deadline = Instant::now() + GUARD;
        loop {
            let (is_success, printed) = self.run(command).unwrap();
            if is_success && is_as_said(said, &printed) {
                return;
            }
            let (said, printed) = (said.join("\n"), printed.join("\n"));
            assert!(Instant::now() < deadline, "`{command}` prints\n{printed}\n\nand not\n{said}\n");
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

/// The same commands for a namespace of another name than `try`.
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
    assert!(blocks.len() >= 3, "{page} has lost its examples");
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
fn output_that_differs_from_the_page_is_found() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let is_as_said = |said: &str, printed: &str| is_as_said(&lines(said), &lines(printed));
    assert!(is_as_said("{\n  …\n}", "{\n  a\n  b\n}") && is_as_said("…", "") && is_as_said("a\n…\nb", "a\nb"));
    assert!(is_as_said("done, 31ms", "done, 1.5s ") && !is_as_said("done, 31ms", "done, 31"));
    assert!(is_as_said("up to date…", "up to date; after 51ms") && !is_as_said("up to date…", "up to"));
    assert!(!is_as_said("a", "b") && !is_as_said("a", "a\nb") && !is_as_said("a\nb", "a") && !is_as_said("…\nb", "a"));
    let found = examples("# one \\\n  two\n1\n2\n# three\n");
    let example = |command: &str, printed: &str| Example { command: command.to_owned(), printed: lines(printed) };
    assert_eq!(found, [example("one \\\n  two", "1\n2"), example("three", "")]);
    assert_eq!(in_namespace("ip -n try try.it; del try", "x"), "ip -n x try.it; del x");
}
