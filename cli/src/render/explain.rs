//! What a node does with a new connection.

use std::fmt::Write as _;

use headgate_proto::v1::{ExplainedEndpoint, Explanation};

use super::{ALWAYS, Column, Style, Tone, cell, counted, note, only, paint, plain, state_cell, table, toned};

/// Formats an explanation: the fate, the steps, and a table of the endpoints.
pub fn explanation(explanation: &Explanation, style: Style) -> String {
    let Explanation { destination, fate, steps, endpoints, endpoints_left_out, remarks } = explanation;
    let mut output = String::new();
    for remark in remarks {
        note(&mut output, remark, Tone::Attention, style);
    }
    let tone = if fate == "forwarded" { Tone::Good } else { Tone::Bad };
    let _ = writeln!(output, "{}: {}", plain(destination), paint(&plain(fate), tone, style));
    for (number, step) in (1..).zip(steps) {
        let _ = writeln!(output, "  {number}. {}", plain(step));
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
        ("ENDPOINT", ALWAYS, &|of| cell(address(of))),
        ("STATE", 1, &|of| state_cell(of.ready, of.serving, of.terminating)),
        ("NODE", 2, &|of| cell(&of.node)),
        ("ZONE", 3, &|of| cell(&of.zone)),
        (">WEIGHT", only(endpoints.iter().any(|of| of.weight != 1), 4), &|of| cell(of.weight.to_string())),
        ("CHOSEN", ALWAYS, &chosen),
    ];
    output += &table(columns, endpoints, style);
    if *endpoints_left_out > 0 {
        note(&mut output, &format!("{} left out", counted(*endpoints_left_out, "more endpoint")), Tone::Faint, style);
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
