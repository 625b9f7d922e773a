//! The results of verifications.

use headgate_proto::v1::NodeVerification;

use super::{Style, Tone, cell, difference, no_agent, note, table, thousands, toned};

/// Formats verifications, one node per row, with the differences below.
pub fn verifications(nodes: &[NodeVerification], style: Style) -> String {
    let headers = ["NODE", "RESULT", ">VERSION", ">SERVICES", ">FRONTENDS", ">DIFFERENCES", "BACKEND"];
    let rows = nodes.iter().map(|node| {
        let tone = match node.result.as_str() {
            "verified" => Tone::Good,
            "drift" => Tone::Bad,
            _ => Tone::Attention,
        };
        let number = |text: String| cell(if node.result == "absent" { String::new() } else { text });
        vec![
            cell(&node.node),
            toned(&node.result, tone),
            number(node.version.to_string()),
            number(thousands(node.services)),
            number(thousands(node.frontends)),
            number(thousands(node.drift_count)),
            cell(&node.backend),
        ]
    });
    let mut output = table(&headers, rows, style);
    for NodeVerification { node, result, drift, drift_count, unverified, is_repaired, .. } in nodes {
        for drift in drift {
            note(&mut output, &format!("{node}: {}", difference(drift)), Tone::Bad, style);
        }
        let more = drift_count.saturating_sub(drift.len() as u64);
        if more > 0 {
            note(&mut output, &format!("{node}: {} more differences are not shown", thousands(more)), Tone::Bad, style);
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
