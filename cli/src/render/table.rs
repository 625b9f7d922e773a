//! Tables and text that fit into a terminal.
//!
//! A row is one line. If a table is wider than the terminal, its least important columns are left
//! out, and then its widest cells lose their middle. Other text is broken at spaces. A pipe has no
//! width.

use std::{borrow::Cow, iter};

use super::{Style, Tone, paint, plain};

/// The gap between two columns.
const GAP: &str = "  ";
/// No cell becomes narrower than this.
const MIN_WIDTH: usize = 8;
/// The rank of a column that every table has.
pub(super) const ALWAYS: u8 = 0;
/// The rank of a column that the table does not have.
pub(super) const NEVER: u8 = u8::MAX;
/// The begins of lines that people paste, so they stay in one piece.
const COMMANDS: [&str; 2] = ["  headgate", "  kubectl "];

/// A cell of a table.
pub(super) struct Cell {
    text: String,
    tone: Option<Tone>,
}

pub(super) fn cell(text: impl AsRef<str>) -> Cell {
    let text = plain(text.as_ref());
    Cell { text: if text.is_empty() { "-".to_owned() } else { text.into_owned() }, tone: None }
}

pub(super) fn toned(text: impl AsRef<str>, tone: Tone) -> Cell {
    Cell { tone: Some(tone), ..cell(text) }
}

/// A column of a table: its header, its rank, and its cell for an item. Columns whose header starts
/// with `>` hold numbers and are aligned to the right. If a table is too wide, columns of the
/// highest rank are left out first.
pub(super) type Column<'a, T> = (&'a str, u8, &'a dyn Fn(&T) -> Cell);

/// The rank of a column that is shown only under a condition.
pub(super) fn only(is_shown: bool, rank: u8) -> u8 {
    if is_shown { rank } else { NEVER }
}

/// A column with its cells, of which the first is the header.
struct Drawn {
    rank: u8,
    is_number: bool,
    width: usize,
    cells: Vec<Cell>,
}

/// Formats a table with a header, and a row for each item.
pub(super) fn table<T>(columns: &[Column<'_, T>], items: &[T], style: Style) -> String {
    let draw = |&(header, rank, of): &Column<'_, T>| {
        let head = Cell { text: header.trim_start_matches('>').to_owned(), tone: Some(Tone::Header) };
        let cells: Vec<Cell> = iter::once(head).chain(items.iter().map(of)).collect();
        let width = cells.iter().map(|cell| visible_width(&cell.text)).max().unwrap_or_default();
        Drawn { rank, is_number: header.starts_with('>'), width, cells }
    };
    let mut drawn: Vec<Drawn> = columns.iter().filter(|(_, rank, _)| *rank != NEVER).map(draw).collect();
    fit_columns(&mut drawn, style.width.unwrap_or(usize::MAX));
    let mut output = String::new();
    for row in 0..=items.len() {
        let mut line = String::new();
        for Drawn { is_number, width, cells, .. } in &drawn {
            let Cell { text, tone } = &cells[row];
            let text = shortened(text, *width);
            let space = " ".repeat(width - visible_width(&text));
            let text = tone.map_or_else(|| text.to_string(), |tone| paint(&text, tone, style));
            line += &if *is_number { space + &text } else { text + &space };
            line += GAP;
        }
        output += &format!("{}\n", line.trim_end());
    }
    output
}

/// Leaves out columns, and makes others narrower, until all fit into `room`.
fn fit_columns(columns: &mut Vec<Drawn>, room: usize) {
    let is_wide = |columns: &[Drawn]| {
        columns.iter().map(|of| of.width + GAP.len()).sum::<usize>() > room.saturating_add(GAP.len())
    };
    while is_wide(columns) {
        let ranks = columns.iter().enumerate().map(|(at, column)| (column.rank, at));
        match ranks.max() {
            Some((rank, at)) if rank != ALWAYS => drop(columns.remove(at)),
            _ => match columns.iter_mut().max_by_key(|column| column.width) {
                Some(widest) if widest.width > MIN_WIDTH => widest.width -= 1,
                _ => return,
            },
        }
    }
}

/// Replaces the middle of a text that has more than `max` characters.
pub(super) fn shortened(text: &str, max: usize) -> Cow<'_, str> {
    let characters: Vec<char> = text.chars().collect();
    if characters.len() <= max {
        return text.into();
    }
    let (start, end) = (max / 2, characters.len() - max.saturating_sub(1) / 2);
    characters[..start].iter().chain(&['…']).chain(&characters[end..]).collect::<String>().into()
}

/// Breaks lines that are wider than the terminal at spaces. Further lines are indented below the
/// text after a label or a number.
pub fn fit(text: &str, style: Style) -> Cow<'_, str> {
    let Some(room) = style.width else { return text.into() };
    let lines = text.split('\n').map(|line| match visible_width(line) {
        width if width <= room || COMMANDS.iter().any(|command| line.starts_with(command)) => line.into(),
        _ => broken(line, room),
    });
    lines.collect::<Vec<Cow<'_, str>>>().join("\n").into()
}

fn broken(line: &str, room: usize) -> Cow<'_, str> {
    let indent = indent(line).min(room / 2);
    let (mut lines, mut width) = (String::new(), 0);
    for (index, word) in line.split(' ').enumerate() {
        let length = visible_width(word);
        if width > indent && width + 1 + length > room {
            lines += &format!("\n{:indent$}", "");
            width = indent;
        } else if index > 0 {
            lines.push(' ');
            width += 1;
        }
        lines += word;
        width += length;
    }
    lines.into()
}

/// The indentation of the lines that continue a line.
fn indent(line: &str) -> usize {
    let text = line.trim_start();
    let start = line.len() - text.len();
    let is_number = |(number, _): &(&str, &str)| number.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((number, _)) = text.split_once(". ").filter(is_number) {
        return start + number.len() + 2;
    }
    match text.split_once("  ") {
        Some((label, value)) => start + visible_width(label) + 2 + value.len() - value.trim_start().len(),
        None => start + 2,
    }
}

/// The number of characters without the escape sequences of colours.
fn visible_width(text: &str) -> usize {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().chars().count();
    first + parts.map(|part| part.split_once('m').map_or(0, |(_, rest)| rest.chars().count())).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Style = Style { colour: false, width: None };

    fn drawn(width: usize) -> Vec<String> {
        let style = Style { width: Some(width), ..PLAIN };
        let rows = [("shop", "a-service-with-a-long-name", "10.96.0.10", "7"), ("ns", "web", "-", "1,024")];
        type Row = (&'static str, &'static str, &'static str, &'static str);
        let columns: &[Column<'_, Row>] = &[
            ("NAMESPACE", ALWAYS, &|row| cell(row.0)),
            ("NAME", ALWAYS, &|row| toned(row.1, Tone::Good)),
            ("ADDRESS", 2, &|row| cell(row.2)),
            (">NUMBER", 1, &|row| cell(row.3)),
            ("NEVER", NEVER, &|_| cell("never")),
        ];
        table(columns, &rows, style).lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_table_leaves_out_columns_and_then_shortens_cells() {
        assert_eq!(
            drawn(57),
            [
                "NAMESPACE  NAME                        ADDRESS     NUMBER",
                "shop       a-service-with-a-long-name  10.96.0.10       7",
                "ns         web                         -            1,024",
            ]
        );
        assert_eq!(drawn(56)[1], "shop       a-service-with-a-long-name       7");
        assert_eq!(drawn(44)[0], "NAMESPACE  NAME");
        assert_eq!(drawn(30)[1], "shop       a-service…long-name");
        for width in 20..70 {
            let lines = drawn(width);
            assert!(lines.len() == 3 && lines.iter().all(|line| line.chars().count() <= width), "{width}: {lines:?}");
        }
        // Even the narrowest table has a part of each name.
        assert_eq!(drawn(1)[1], "shop      a-se…ame");
    }

    #[test]
    fn text_is_broken_at_spaces_below_its_label() {
        let fitted = |text: &str, width| fit(text, Style { width: Some(width), ..PLAIN }).into_owned();
        assert_eq!(fitted("label   one two three\nshort", 16), "label   one two\n        three\nshort");
        assert_eq!(fitted("  1. one two three", 12), "  1. one two\n     three");
        assert_eq!(fitted("node-a: one two three", 12), "node-a: one\n  two three");
        assert_eq!(fitted("a-word-that-is-too-long x", 10), "a-word-that-is-too-long\n  x");
        assert_eq!(fitted("\u{1b}[31mone two\u{1b}[0m three", 8), "\u{1b}[31mone two\u{1b}[0m\n  three");
        assert_eq!(fitted("  kubectl get services -A", 10), "  kubectl get services -A");
        assert_eq!(fit("one two three", PLAIN), "one two three");
    }
}
