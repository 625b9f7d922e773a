//! The results of verifications.

use headgate_proto::v1::NodeVerification;

use super::{ALWAYS, Column, Style, Tone, cell, counted, difference, no_agent, note, table, thousands, toned};

/// Formats verifications, one node per row, with the differences below.
pub fn verifications(nodes: &[NodeVerification], style: Style) -> String {
    let result = |of: &NodeVerification| {
        let tone = match of.result.as_str() {
            "verified" => Tone::Good,
            "drift" => Tone::Bad,
            _ => Tone::Attention,
        };
        toned(&of.result, tone)
    };
    let number = |of: &NodeVerification, text: String| cell(if of.result == "absent" { String::new() } else { text });
    let columns: &[Column<'_, NodeVerification>] = &[
        ("NODE", ALWAYS, &|of| cell(&of.node)),
        ("RESULT", ALWAYS, &result),
        (">VERSION", 2, &|of| number(of, of.version.to_string())),
        (">SERVICES", 3, &|of| number(of, thousands(of.services))),
        (">FRONTENDS", 4, &|of| number(of, thousands(of.frontends))),
        (">DIFFERENCES", ALWAYS, &|of| number(of, thousands(of.drift_count))),
        ("BACKEND", 1, &|of| cell(&of.backend)),
    ];
    let mut output = table(columns, nodes, style);
    for NodeVerification { node, result, drift, drift_count, unverified, is_repaired, .. } in nodes {
        for drift in drift {
            note(&mut output, &format!("{node}: {}", difference(drift)), Tone::Bad, style);
        }
        let more = drift_count.saturating_sub(drift.len() as u64);
        if more > 0 {
            note(&mut output, &format!("{node}: {} left out", counted(more, "more difference")), Tone::Bad, style);
        }
        let (repair, tone) = match is_repaired {
            true => ("repaired: a later verification found no difference", Tone::Good),
            false => ("not repaired: read the log of the agent, and verify again", Tone::Bad),
        };
        if *drift_count > 0 {
            note(&mut output, &format!("{node}: {repair}"), tone, style);
        }
        for sentence in unverified {
            let text = match result.as_str() {
                "absent" => no_agent(node, sentence),
                _ => format!("{node}: not verified: {sentence}"),
            };
            note(&mut output, &text, Tone::Attention, style);
        }
    }
    output
}
