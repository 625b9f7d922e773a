//! The results of verifications.

use headgate_proto::v1::NodeVerification;

use super::{Style, Tone, cell, difference, note, table, thousands, toned};

/// Formats verifications, one node per row, with the differences below.
pub fn verifications(nodes: &[NodeVerification], style: Style) -> String {
    let headers = ["NODE", "RESULT", ">VERSION", ">SERVICES", ">FRONTENDS", ">DIFFERENCES", "BACKEND"];
    let rows = nodes.iter().map(|node| {
        let tone = match node.result.as_str() {
            "verified" => Tone::Good,
            "drift" => Tone::Bad,
            _ => Tone::Attention,
        };
        vec![
            cell(&node.node),
            toned(&node.result, tone),
            cell(node.version.to_string()),
            cell(thousands(node.services)),
            cell(thousands(node.frontends)),
            cell(thousands(node.drift_count)),
            cell(&node.backend),
        ]
    });
    let mut output = table(&headers, rows, style);
    for NodeVerification { node, drift, drift_count, unverified, is_repaired, .. } in nodes {
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
            note(&mut output, &format!("{node}: not verified: {sentence}"), Tone::Attention, style);
        }
    }
    output
}
