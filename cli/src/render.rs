//! Answers as tables with aligned columns, and a line below for each problem.

mod explain;
mod nodes;
mod table;
mod verify;

use std::fmt::Write as _;

use headgate_proto::v1::{
    Connections, Drift, EndpointInfo, FleetInfo, GetStatusResponse, NodeStatus, OpenConnection, Problem, Rejection,
    ReplicaInfo, ServiceCounters, ServiceInfo, ServicePortInfo, WatchEvent,
};

use headgate_proto::printable::is_printable;
pub use headgate_proto::printable::printable as plain;
use headgate_settings::migration::{Line, Outcome};

pub use self::explain::explanation;
pub use self::nodes::{agents, fleet, is_absent, is_behind, is_standby, no_agent};
pub use self::table::fit;
use self::table::{ALWAYS, Cell, Column, cell, only, shortened, table, toned};
pub use self::verify::{shadows, verifications};
use crate::units;

/// How text is shown.
#[derive(Debug, Clone, Copy, Default)]
pub struct Style {
    /// True to use ANSI colours, for terminals.
    pub colour: bool,
    /// The width of the terminal in columns. None for a pipe.
    pub width: Option<usize>,
}

/// The meaning of a cell, which selects its colour.
#[derive(Debug, Clone, Copy)]
enum Tone {
    Good,
    Attention,
    Bad,
    Faint,
    Header,
}

/// Escapes in JSON what a terminal would interpret or hide, and what JSON does not escape itself.
pub fn plain_json(json: &str) -> String {
    let mut plain = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() || is_printable(character) {
            plain.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(plain, "\\u{unit:04x}");
            }
        }
    }
    plain
}

/// Formats the settings of a kube-proxy, with the explanations below. Settings that carry over have
/// an explanation only if `is_wide`. Long texts lose their middle.
pub fn migration(lines: &[Line], is_wide: bool, style: Style) -> String {
    let tone = |line: &Line| match line.outcome {
        Outcome::CarriesOver => Tone::Good,
        Outcome::OtherDefault | Outcome::NoEffect => Tone::Attention,
        Outcome::Invalid => Tone::Bad,
    };
    let setting = |line: &Line| shortened(&plain(&line.setting), 200).into_owned();
    let columns: &[Column<'_, Line>] = &[
        ("SETTING", ALWAYS, &|line| cell(setting(line))),
        ("VALUE", ALWAYS, &|line| cell(shortened(&line.value, 200))),
        ("OUTCOME", ALWAYS, &|line| toned(line.outcome.as_str(), tone(line))),
    ];
    let mut output = table(columns, lines, style);
    for line in lines.iter().filter(|line| is_wide || line.outcome != Outcome::CarriesOver) {
        // An explanation may contain the value, and the remedy at its end.
        let text = format!("{}: {}", setting(line), shortened(&line.explanation, 1000));
        note(&mut output, &text, tone(line), style);
    }
    output
}

/// Adds a line of text below a table.
fn note(output: &mut String, text: &str, tone: Tone, style: Style) {
    let _ = writeln!(output, "{}", paint(&plain(text), tone, style));
}

fn paint(text: &str, tone: Tone, style: Style) -> String {
    let code = match tone {
        Tone::Good => 32,
        Tone::Attention => 33,
        Tone::Bad => 31,
        Tone::Faint => 90,
        Tone::Header => 1,
    };
    if style.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

/// Formats Services, one per row, with conflicts and problems below the table. Settings made by
/// annotation have a column if at least one Service uses them, or if `is_wide`.
pub fn services(services: &[ServiceInfo], is_wide: bool, style: Style) -> String {
    let some = |has: fn(&ServiceInfo) -> bool| only(is_wide || services.iter().any(has), 7);
    let unless_zero = |number: u32| cell(if number == 0 { String::new() } else { number.to_string() });
    let columns: &[Column<'_, ServiceInfo>] = &[
        ("NAMESPACE", ALWAYS, &|of| cell(&of.namespace)),
        ("NAME", ALWAYS, &|of| cell(&of.name)),
        ("CLUSTER-IP", ALWAYS, &|of| cell(of.cluster_ips.join(","))),
        ("EXTERNAL-IP", 3, &|of| cell(external(of).join(","))),
        ("PORTS", 1, &|of| cell(ports(&of.ports))),
        (">READY", ALWAYS, &readiness),
        ("POLICY", 4, &|of| cell(policy(of))),
        ("AFFINITY", 6, &|of| cell(affinity(of))),
        (">VERSION", 5, &|of| cell(of.version.to_string())),
        ("LOAD-BALANCING", some(|of| !of.load_balancing.is_empty()), &|of| cell(&of.load_balancing)),
        ("SCHEDULER", some(|of| !of.scheduler.is_empty()), &|of| cell(&of.scheduler)),
        ("HEALTH-CHECK", some(|of| !of.health_check.is_empty()), &|of| cell(health_check(of))),
        ("PROXY-PROTOCOL", some(|of| !of.proxy_protocol.is_empty()), &|of| cell(&of.proxy_protocol)),
        (">MAX-CONNECTIONS", some(|of| of.max_connections != 0), &|of| unless_zero(of.max_connections)),
        ("SOURCE-RANGES", only(is_wide, 8), &|of| cell(of.load_balancer_source_ranges.join(","))),
        (">HEALTH-PORT", only(is_wide, 8), &|of| unless_zero(of.health_check_node_port)),
    ];
    let mut output = table(columns, services, style);
    for service in services {
        for problem in &service.problems {
            note(&mut output, &sentence(problem), Tone::Attention, style);
        }
        for conflict in &service.conflicts {
            let text = format!("{}/{}: conflict: {conflict}", service.namespace, service.name);
            note(&mut output, &text, Tone::Attention, style);
        }
    }
    output
}

fn external(service: &ServiceInfo) -> Vec<&str> {
    service.external_ips.iter().chain(&service.load_balancer_ips).map(String::as_str).collect()
}

/// Formats ports like kubectl: `80/TCP`, with a NodePort `80:30080/TCP`.
fn ports(ports: &[ServicePortInfo]) -> String {
    let written = ports.iter().map(|port| match port.node_port {
        0 => format!("{}/{}", port.port, port.protocol),
        node_port => format!("{}:{node_port}/{}", port.port, port.protocol),
    });
    written.collect::<Vec<_>>().join(",")
}

fn readiness(service: &ServiceInfo) -> Cell {
    let tone = match (service.ready_endpoints, service.endpoints) {
        (0, _) => Tone::Bad,
        (ready, all) if ready < all => Tone::Attention,
        _ => Tone::Good,
    };
    toned(format!("{}/{}", service.ready_endpoints, service.endpoints), tone)
}

fn policy(service: &ServiceInfo) -> String {
    let (internal, external) = (&service.internal_traffic_policy, &service.external_traffic_policy);
    if internal == external { internal.clone() } else { format!("internal {internal}, external {external}") }
}

fn health_check(service: &ServiceInfo) -> String {
    match service.health_check_interval_ms {
        milliseconds if milliseconds > 0 && !service.health_check.is_empty() => {
            format!("{} {}", service.health_check, units::duration(u64::from(milliseconds)))
        }
        _ => service.health_check.clone(),
    }
}

fn affinity(service: &ServiceInfo) -> String {
    match service.session_affinity_timeout_seconds {
        0 => String::new(),
        seconds => format!("ClientIP {}", units::duration(u64::from(seconds) * 1000)),
    }
}

/// Formats endpoints. Ports of an address that have the same state share a row. The table has a
/// SERVICE column if the endpoints belong to several Services, or if `is_wide`.
pub fn endpoints(endpoints: &[EndpointInfo], is_wide: bool, style: Style) -> String {
    let first = endpoints.first().map(|endpoint| (&endpoint.namespace, &endpoint.name));
    let several = endpoints.iter().any(|endpoint| Some((&endpoint.namespace, &endpoint.name)) != first);
    let some_weight = endpoints.iter().any(|of| of.weight != 1);
    let columns: &[Column<'_, EndpointInfo>] = &[
        ("SERVICE", only(several, ALWAYS), &|of| cell(format!("{}/{}", of.namespace, of.name))),
        ("ADDRESS", ALWAYS, &|of| cell(&of.address)),
        ("PORTS", 1, &|of| cell(of.ports.join(", "))),
        ("STATE", ALWAYS, &|of| state_cell(of.ready, of.serving, of.terminating)),
        ("NODE", 2, &|of| cell(&of.node)),
        ("ZONE", 4, &|of| cell(&of.zone)),
        ("HINTS", 6, &|of| cell(hints(of))),
        (">VERSION", 5, &|of| cell(of.version.to_string())),
        (">WEIGHT", only(is_wide || some_weight, 3), &|of| cell(of.weight.to_string())),
    ];
    table(columns, endpoints, style)
}

fn state_cell(ready: bool, serving: bool, terminating: bool) -> Cell {
    let (state, tone) = state(ready, serving, terminating);
    toned(state, tone)
}

fn state(ready: bool, serving: bool, terminating: bool) -> (&'static str, Tone) {
    match (ready, serving, terminating) {
        (_, true, true) => ("terminating, serving", Tone::Attention),
        (_, false, true) => ("terminating", Tone::Bad),
        (true, ..) => ("ready", Tone::Good),
        (false, true, false) => ("serving, not ready", Tone::Attention),
        (false, false, false) => ("not ready", Tone::Bad),
    }
}

fn hints(endpoint: &EndpointInfo) -> String {
    let zones = endpoint.hint_zones.iter().map(|zone| format!("zone {zone}"));
    zones.chain(endpoint.hint_nodes.iter().map(|node| format!("node {node}"))).collect::<Vec<_>>().join(", ")
}

/// The first `limit` rows of a table, or all for 0, and the line below the table about the others.
pub fn limited<T>(all: &[T], limit: usize) -> (&[T], String) {
    match all.split_at_checked(limit) {
        Some((shown, hidden)) if limit > 0 && !hidden.is_empty() => {
            (shown, format!("... and {} more: --limit 0 shows all\n", thousands(hidden.len() as u64)))
        }
        _ => (all, String::new()),
    }
}

/// Formats a difference, with the name of the Service if there is one.
fn difference(drift: &Drift) -> String {
    match drift.service.as_str() {
        "" => drift.difference.clone(),
        service => format!("Service {service}: {}", drift.difference),
    }
}

/// Formats a number with thousands separators: `4,998`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things: `1 node`, `4,998 nodes`.
pub fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// Formats a problem in one sentence.
pub fn sentence(problem: &Problem) -> String {
    let mut text = problem.object.clone();
    if !problem.field.is_empty() {
        let _ = write!(text, ", {}", problem.field);
    }
    let _ = write!(text, ": {}", problem.message);
    if !problem.origin.is_empty() {
        let _ = write!(text, " [{}]", problem.origin);
    }
    text
}

/// Formats the state of the replica, one property per line, with rejected objects below.
pub fn status(status: &GetStatusResponse, style: Style) -> String {
    let synced = match (status.source_state.as_str(), status.synced) {
        ("cut_off", _) => paint(&format!("cut off: {}", plain(&status.source_problem)), Tone::Bad, style),
        (_, true) => paint("yes", Tone::Good, style),
        (_, false) if status.source_problem.is_empty() => {
            paint("no: not every kind has been listed yet", Tone::Attention, style)
        }
        (_, false) => paint(&format!("no: {}", plain(&status.source_problem)), Tone::Bad, style),
    };
    let facts = [
        ("replica", plain(&format!("{} (headgate {})", status.replica, status.build)).into_owned()),
        ("source", plain(&status.source).into_owned()),
        ("synced", synced),
        ("last heard", last_heard(status)),
        ("version", plain(&format!("{} (epoch {})", status.version, status.epoch)).into_owned()),
        ("services", status.services.to_string()),
        ("endpoints", status.endpoints.to_string()),
        ("nodes", status.nodes.to_string()),
        ("agents", status.agents.to_string()),
        (
            "fleet",
            fleet(status.fleet.as_ref().unwrap_or(&FleetInfo::default())).trim_start_matches("fleet: ").to_owned(),
        ),
        ("problems", status.problems.len().to_string()),
    ];
    let mut output = String::new();
    for (name, value) in facts {
        let _ = writeln!(output, "{name:<12}{value}");
    }
    for problem in &status.problems {
        note(&mut output, &format!("  {}", sentence(problem)), Tone::Attention, style);
    }
    if !status.replicas.is_empty() {
        output += &format!("\n{}", replicas(&status.replicas, style));
    }
    output
}

/// Formats the other replicas, one per row, with the reasons of those that cannot be reached below.
fn replicas(replicas: &[ReplicaInfo], style: Style) -> String {
    let state = |of: &ReplicaInfo| toned(&of.state, if of.state == "joined" { Tone::Good } else { Tone::Bad });
    let columns: &[Column<'_, ReplicaInfo>] = &[
        ("OTHER REPLICA", ALWAYS, &|of| cell(&of.replica)),
        ("STATE", ALWAYS, &state),
        (">FOR", 1, &|of| cell(units::duration(of.for_ms))),
        (">AGENTS", ALWAYS, &|of| cell(thousands(of.agents))),
        ("EPOCH", 2, &|of| cell(&of.epoch)),
    ];
    let mut output = table(columns, replicas, style);
    for ReplicaInfo { replica, problem, .. } in replicas.iter().filter(|replica| !replica.problem.is_empty()) {
        note(&mut output, &format!("{replica}: {problem}"), Tone::Bad, style);
    }
    output
}

/// Formats the versions of programs.
pub fn versions(rows: &[(String, &str)], style: Style) -> String {
    let columns: &[Column<'_, (String, &str)>] =
        &[("PROGRAM", ALWAYS, &|row| cell(&row.0)), ("VERSION", ALWAYS, &|row| cell(row.1))];
    table(columns, rows, style)
}

/// Formats counters, one Service or frontend per row.
pub fn counters(rows: &[ServiceCounters], style: Style) -> String {
    let has_frontends = rows.iter().any(|of| !of.frontend.is_empty());
    // All frontends are of one Service.
    let service = if has_frontends { 2 } else { ALWAYS };
    let columns: &[Column<'_, ServiceCounters>] = &[
        ("NAMESPACE", service, &|of| cell(&of.namespace)),
        ("NAME", service, &|of| cell(&of.name)),
        (">CONNECTIONS", ALWAYS, &|of| cell(of.connections.to_string())),
        (">PACKETS", 1, &|of| cell(of.packets.to_string())),
        (">BYTES", ALWAYS, &|of| cell(of.bytes.to_string())),
        ("FRONTEND", only(has_frontends, ALWAYS), &|of| cell(&of.frontend)),
    ];
    table(columns, rows, style)
}

/// Formats open connections, with a remark below about those that are left out.
pub fn connections(list: &Connections, style: Style) -> String {
    let state = |of: &OpenConnection| {
        let tone = match of.state.as_str() {
            "open" | "answered" => Tone::Good,
            "connecting" | "awaits reply" => Tone::Attention,
            _ => Tone::Faint,
        };
        toned(&of.state, tone)
    };
    let is_udp = |of: &OpenConnection| of.protocol == "UDP";
    let datagrams = |of: &OpenConnection| match is_udp(of) {
        true => cell(format!("{}/{}", of.datagrams_to_endpoint, of.datagrams_to_client)),
        false => cell(""),
    };
    let columns: &[Column<'_, OpenConnection>] = &[
        ("SERVICE", ALWAYS, &|of| cell(&of.service)),
        // Agents before 0.2 do not name the protocol.
        ("PROTOCOL", 3, &|of| cell(if of.protocol.is_empty() { "TCP" } else { &of.protocol })),
        ("CLIENT", ALWAYS, &|of| cell(&of.client)),
        ("ADDRESS", 4, &|of| cell(&of.address)),
        ("ENDPOINT", ALWAYS, &|of| cell(&of.endpoint)),
        ("STATE", 2, &state),
        (">AGE", 6, &|of| cell(units::duration(of.age_ms))),
        (">IDLE", 5, &|of| cell(units::duration(of.idle_ms))),
        (">SENT", 1, &|of| cell(units::bytes(of.bytes_to_endpoint))),
        (">RECEIVED", 1, &|of| cell(units::bytes(of.bytes_to_client))),
        (">DATAGRAMS", only(list.connections.iter().any(is_udp), 7), &datagrams),
    ];
    let mut output = table(columns, &list.connections, style);
    if list.left_out > 0 {
        let more = counted(list.left_out, "more connection");
        let text = format!("{more} with fewer bytes: name a Service, or raise --limit");
        note(&mut output, &text, Tone::Faint, style);
    }
    output
}

/// Formats the state of a node, with its problems below.
pub fn node(status: &NodeStatus, now_unix_ms: u64, style: Style) -> String {
    let synced = match status.synced_unix_ms {
        0 => "never".to_owned(),
        at => units::ago(now_unix_ms.saturating_sub(at)),
    };
    let source = match status.source_state.as_str() {
        "" => "unknown".to_owned(),
        state => format!("{state}, heard {}", units::ago(status.source_age_ms)),
    };
    let versions = format!("{} received, {} programmed", status.received_version, status.programmed_version);
    let facts = [
        ("node", format!("{} (kernel {})", status.node, status.kernel_release)),
        ("agent", format!("headgate {}, {} MiB resident", status.agent_version, status.resident_memory_bytes >> 20)),
        ("backend", status.backend.clone()),
        ("versions", versions),
        ("waiting", counted(status.waiting_changes, "change")),
        ("last sync", synced),
        ("source", source),
        ("restored", if status.state_restored { "from disk" } else { "no" }.to_owned()),
        ("quarantined", status.quarantined_count.to_string()),
    ];
    let mut output = String::new();
    for (name, value) in facts {
        let _ = writeln!(output, "{name:<13}{}", plain(&value));
    }
    if !status.last_error.is_empty() {
        note(&mut output, &format!("  the last sync failed: {}", status.last_error), Tone::Bad, style);
    }
    for rejection in &status.quarantined {
        let Rejection { resource, field, reason } = rejection;
        note(&mut output, &format!("  {resource} {field}: {reason}"), Tone::Bad, style);
    }
    for sentence in &status.degraded {
        note(&mut output, &format!("  {sentence}"), Tone::Attention, style);
    }
    output
}

/// Formats the time since the last message from the source, per kind if there are several.
fn last_heard(status: &GetStatusResponse) -> String {
    let ago = units::ago(status.source_age_ms);
    if status.source_ages.len() < 2 {
        return ago;
    }
    let kinds = status.source_ages.iter().map(|age| format!("{} {}", plain(&age.kind), units::duration(age.age_ms)));
    format!("{ago} ({})", kinds.collect::<Vec<_>>().join(", "))
}

/// Formats one change as a line without a line end.
pub fn event(event: &WatchEvent, style: Style) -> String {
    let head = paint(&format!("{}  v{:<6}", units::time_of_day(event.unix_ms), event.version), Tone::Faint, style);
    let is_removed = event.action == "removed";
    let action = paint(&format!("{:<8}", plain(&event.action)), if is_removed { Tone::Bad } else { Tone::Good }, style);
    let (mut what, mut more) = (String::new(), String::new());
    if let Some(of) = &event.service {
        what = format!("service   {}/{}", of.namespace, of.name);
        let (addresses, ports) = (of.cluster_ips.join(","), ports(&of.ports));
        more = plain(&format!("  {addresses}  {ports}  {}/{} ready", of.ready_endpoints, of.endpoints)).into_owned();
    } else if let Some(of) = &event.endpoint {
        what = format!("endpoint  {}/{}  {}", of.namespace, of.name, of.address);
        let (state, tone) = state(of.ready, of.serving, of.terminating);
        let node = if of.node.is_empty() { String::new() } else { format!("  on {}", of.node) };
        more = format!("  {}  {}{}", plain(&of.ports.join(", ")), paint(state, tone, style), plain(&node));
    }
    let (what, more) = match what.as_str() {
        "" => ("(unknown change: this headgatectl is older than the replica)".into(), ""),
        what => (plain(what), if is_removed { "" } else { &more }),
    };
    format!("{head} {action}  {what}{more}")
}

#[cfg(test)]
mod tests;
