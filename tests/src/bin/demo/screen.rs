//! The output of the demo: numbered steps, results, and a bar for each pod. The output has colours
//! only on a terminal.

use std::cell::Cell;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

const BAR_COLUMNS: usize = 40;

/// Standard output.
#[derive(Debug)]
pub(crate) struct Screen {
    colour: bool,
    steps: Cell<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Ink {
    Bold,
    Faint,
    Good,
    Bar(usize),
}

impl Screen {
    pub(crate) fn for_stdout() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colour: std::io::stdout().is_terminal() && !refused, steps: Cell::new(0) }
    }

    fn ink(&self, ink: Ink, text: &str) -> String {
        if !self.colour {
            return text.to_owned();
        }
        // Each node has a colour, in the order of the nodes' names.
        let bars = ["36", "35", "33"];
        let code = match ink {
            Ink::Bold => "1",
            Ink::Faint => "90",
            Ink::Good => "32",
            Ink::Bar(node) => bars[node % bars.len()],
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }

    /// Prints a line. Errors are ignored, because the reader may have closed the pipe (`| head`).
    /// The exit code still reports the result of the demo.
    fn line(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{text}");
        let _ = out.flush();
    }

    /// Prints the title, and a sentence below it.
    pub(crate) fn title(&self, title: &str, sentence: &str) {
        self.line(&self.ink(Ink::Bold, title));
        self.line(&self.ink(Ink::Faint, sentence));
    }

    /// Begins the next step. The sentence describes what happens.
    pub(crate) fn step(&self, sentence: &str) {
        self.steps.set(self.steps.get() + 1);
        let number = format!("{:>2}", self.steps.get());
        self.line("");
        self.line(&format!("{}  {}", self.ink(Ink::Bold, &number), self.ink(Ink::Bold, sentence)));
    }

    /// The number of the present step.
    pub(crate) fn current_step(&self) -> u32 {
        self.steps.get()
    }

    /// Prints a successful result.
    pub(crate) fn seen(&self, sentence: &str) {
        self.line(&format!("    {} {sentence}", self.ink(Ink::Good, "✓")));
    }

    /// Prints additional information.
    pub(crate) fn note(&self, sentence: &str) {
        self.line(&format!("    {}", self.ink(Ink::Faint, sentence)));
    }

    /// Prints a plain line, such as a command to copy.
    pub(crate) fn plain(&self, text: &str) {
        self.line(text);
    }

    /// Prints a bar for the number of requests that a pod answered. A bar for `largest` requests
    /// has the full length. `node` determines the colour.
    pub(crate) fn bar(&self, label: &str, node: usize, count: usize, largest: usize) {
        let columns = if count == 0 { 0 } else { (count * BAR_COLUMNS / largest.max(1)).max(1) };
        let bar = self.ink(Ink::Bar(node), &"█".repeat(columns));
        self.line(&format!("    {label:<12} {bar}{} {count}", " ".repeat(BAR_COLUMNS - columns)));
    }

    /// Prints the final result.
    pub(crate) fn last_line(&self, text: &str) {
        self.line("");
        // The line has no colour, because programs look for exactly this text.
        self.line(text);
    }
}

/// Formats a duration in milliseconds or seconds.
pub(crate) fn shown(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        format!("{} ms", duration.as_millis())
    } else {
        format!("{:.1} s", duration.as_secs_f64())
    }
}
