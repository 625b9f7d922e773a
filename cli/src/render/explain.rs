//! What a node does with a new connection.

use std::fmt::Write as _;

use headgate_proto::v1::{ExplainedEndpoint, Explanation};

use super::{Column, Style, Tone, cell, note, paint, plain, state_cell, table, toned};

/// The width at which steps are wrapped, in characters.
const WIDTH: usize = 100;

/// Formats an explanation: the fate, the steps, and a table of the endpoints.
pub fn explanation(explanation: &Explanation, style: Style) -> String {
    let Explanation { destination, fate, steps, endpoints, endpoints_left_out, remarks } = explanation;
    let mut output = String::new();
    for remark in remarks {
        let _ = writeln!(output, "{}", paint(&wrapped("", remark), Tone::Attention, style));
    }
    let tone = if fate == "forwarded" { Tone::Good } else { Tone::Bad };
    let _ = writeln!(output, "{}: {}", plain(destination), paint(&plain(fate), tone, style));
    for (number, step) in (1..).zip(steps) {
        let _ = writeln!(output, "{}", wrapped(&format!("  {number}. "), step));
    }
    if endpoints.is_empty() {
        return output;
    }
    output.push('\n');
    let chosen = |of: &ExplainedEndpoint| match of.is_chosen {
        true => toned("yes", Tone::Good),
        false => toned(format!("no: {}", of.reason), Tone::Attention),
    };
    let columns: &[Column<'_, ExplainedEndpoint>] = &[
        ("ENDPOINT", true, &|of| cell(address(of))),
        ("STATE", true, &|of| state_cell(of.ready, of.serving, of.terminating)),
        ("NODE", true, &|of| cell(&of.node)),
        ("ZONE", true, &|of| cell(&of.zone)),
        (">WEIGHT", endpoints.iter().any(|of| of.weight != 1), &|of| cell(of.weight.to_string())),
        ("CHOSEN", true, &chosen),
    ];
    output += &table(columns, endpoints, style);
    if *endpoints_left_out > 0 {
        note(&mut output, &format!("{endpoints_left_out} more endpoints are not shown"), Tone::Faint, style);
    }
    output
}

fn address(endpoint: &ExplainedEndpoint) -> String {
    match (endpoint.port, endpoint.address.contains(':')) {
        (0, _) => endpoint.address.clone(),
        (port, true) => format!("[{}]:{port}", endpoint.address),
        (port, false) => format!("{}:{port}", endpoint.address),
    }
}

/// Wraps a text at spaces. Begins it with `prefix`, and indents the other lines by as much.
fn wrapped(prefix: &str, text: &str) -> String {
    let (mut lines, mut width) = (prefix.to_owned(), prefix.len());
    for (index, word) in plain(text).split(' ').enumerate() {
        let length = word.chars().count();
        if index > 0 && width + 1 + length > WIDTH {
            let _ = write!(lines, "\n{:indent$}", "", indent = prefix.len());
            width = prefix.len();
        } else if index > 0 {
            lines.push(' ');
            width += 1;
        }
        lines.push_str(word);
        width += length;
    }
    lines
}
