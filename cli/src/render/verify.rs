//! The results of verifications.

use std::collections::BTreeMap;

use headgate_proto::v1::{ChangeTimes, NodeVerification, Shadow};

use crate::units::microseconds;

use super::{ALWAYS, Column, Style, Tone, cell, counted, difference, no_agent, note, table, thousands, toned};

/// Formats the rules of other proxies, one node per row, with differences and times below.
pub fn shadows(nodes: &[NodeVerification], style: Style) -> String {
    let result = |of: &NodeVerification| match of.result.as_str() {
        "verified" => toned("agrees", Tone::Good),
        "drift" => toned("differs", Tone::Bad),
        other => toned(other, Tone::Attention),
    };
    let shadow = |of: &NodeVerification| of.shadow.clone().unwrap_or_default();
    let columns: &[Column<'_, NodeVerification>] = &[
        ("NODE", ALWAYS, &|of| cell(&of.node)),
        ("RESULT", ALWAYS, &result),
        (">FRONTENDS", 3, &|of| cell(thousands(of.frontends))),
        (">DIFFERENCES", ALWAYS, &|of| cell(thousands(of.drift_count))),
        (">BY-DESIGN", 2, &|of| cell(thousands(shadow(of).by_design_count))),
        (">WAITING", 4, &|of| cell(thousands(shadow(of).waiting))),
        ("PROXY", 1, &|of| cell(shadow(of).proxy)),
    ];
    let mut output = table(columns, nodes, style);
    for of in nodes {
        let (NodeVerification { node, unverified, .. }, shadow) = (of, shadow(of));
        differences(&mut output, of, style);
        for sentence in unverified {
            note(&mut output, &format!("{node}: not compared: {sentence}"), Tone::Attention, style);
        }
        let mut by_design: BTreeMap<&str, (usize, String)> = BTreeMap::new();
        for drift in &shadow.by_design {
            let (_, reason) = drift.difference.rsplit_once(" (").unwrap_or_default();
            by_design.entry(reason.trim_end_matches(')')).or_insert_with(|| (0, difference(drift))).0 += 1;
        }
        for (reason, (count, first)) in by_design {
            let first = first.rsplit_once(" (").map_or(&*first, |(first, _)| first);
            let text = format!("{node}: by design, {}: {reason}; such as {first}", counted(count as u64, "time"));
            note(&mut output, &text, Tone::Attention, style);
        }
        note(&mut output, &times(node, &shadow), Tone::Attention, style);
    }
    output
}

fn times(node: &str, shadow: &Shadow) -> String {
    let of = |times: &Option<ChangeTimes>| {
        let ChangeTimes { count, median_us, p99_us, longest_us } = times.unwrap_or_default();
        let [median, p99, longest] = [median_us, p99_us, longest_us].map(microseconds);
        format!("median {median}, p99 {p99}, longest {longest} ({})", counted(count, "change"))
    };
    let resolution = shadow.resolution.unwrap_or_default();
    let late = match shadow.late {
        0 => String::new(),
        late => format!("; {} it took more than a minute", counted(late, "time")),
    };
    if shadow.other.unwrap_or_default().count == 0 {
        return format!("{node}: no time of a change is known yet{late}");
    }
    format!(
        "{node}: from a change to its rules: {}, at most {} too long in the median{late}; Headgate could write after: {}",
        of(&shadow.other),
        microseconds(resolution.median_us),
        of(&shadow.headgate)
    )
}

fn differences(
    output: &mut String,
    NodeVerification { node, drift, drift_count, .. }: &NodeVerification,
    style: Style,
) {
    for drift in drift {
        note(output, &format!("{node}: {}", difference(drift)), Tone::Bad, style);
    }
    let more = drift_count.saturating_sub(drift.len() as u64);
    if more > 0 {
        note(output, &format!("{node}: {} left out", counted(more, "more difference")), Tone::Bad, style);
    }
}

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
    for of in nodes {
        let NodeVerification { node, result, drift_count, unverified, is_repaired, .. } = of;
        differences(&mut output, of, style);
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
