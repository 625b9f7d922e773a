//! Reads kube-proxy's arguments as its flag library does (Go's `pflag`), and names every argument
//! that the agent would reject, instead of ending at the first one.

use std::{iter::Peekable, slice::Iter};

use serde_json::Value as Json;

use super::{
    fields::{FIELDS, Field},
    raw::{Findings, Raw},
    remark::Remark,
    value::{Kind, shown},
};

/// Flags of the program that are no settings, which the agent has too: name, kind of values (`None`
/// if it takes none), and what it does.
const PROGRAM_FLAGS: &[(&str, Option<Kind>, &str)] = &[
    (
        "config",
        Some(Kind::Text),
        "the agent reads the same file, which replaces the other flags of kube-proxy: check it too",
    ),
    (HOSTNAME_OVERRIDE, Some(Kind::Text), "the name of the node"),
    ("write-config-to", Some(Kind::Text), "the agent writes its defaults and ends"),
    ("cleanup", Some(Kind::Bool), "the agent removes Headgate's rules and ends"),
    ("init-only", Some(Kind::Bool), "the agent sets the kernel parameters that need privileges, and ends"),
    ("version", None, "the agent prints its version and ends"),
    ("help", None, "the agent prints its help and ends"),
];
const HOSTNAME_OVERRIDE: &str = "hostname-override";

/// A flag of [`PROGRAM_FLAGS`] among the arguments: name with dashes, value, effect.
pub(super) type ProgramFlag = (String, String, &'static str);

/// Reads arguments without the program's name. Each argument that the agent rejects is a problem.
pub(super) fn read(arguments: &[String]) -> (Raw, Vec<ProgramFlag>, Findings) {
    let (mut raw, mut program_flags, mut findings) = (Raw::default(), Vec::<ProgramFlag>::new(), Findings::default());
    let mut arguments = arguments.iter().peekable();
    while let Some(argument) = arguments.next() {
        let Some((name, value)) = split(argument) else {
            let what = "not a flag: the agent ends with an error, so remove the argument";
            findings.problems.push(Remark::new(argument, what));
            continue;
        };
        let flag = format!("--{name}");
        let has_value = value.is_some();
        let is_field = |field: &&Field| !name.is_empty() && (field.flag == name || field.alias == name);
        if let Some((known, kind, what)) = PROGRAM_FLAGS.iter().find(|(known, ..)| *known == name) {
            let is_repeated = program_flags.iter().any(|(given, ..)| *given == flag) && *known != HOSTNAME_OVERRIDE;
            let value = match kind.map(|kind| parse(kind, value, &mut arguments)) {
                None if has_value => Err("takes no value; write the flag alone".to_owned()),
                None => Ok(String::new()),
                Some(Ok(Json::String(text))) if text.is_empty() => Err("has no value; write text".to_owned()),
                Some(value) => value.map(|value| shown(&value)),
            };
            match value {
                Ok(_) if is_repeated => findings.problems.push(Remark::new(flag, "appears more than once; keep one")),
                Ok(value) => program_flags.push((flag, value, *what)),
                Err(problem) => findings.problems.push(Remark::new(flag, problem)),
            }
        } else if let Some(field) = FIELDS.iter().find(is_field) {
            match parse(field.kind, value, &mut arguments) {
                Ok(value) => raw.set(field.id(), value),
                Err(problem) => findings.problems.push(Remark::new(flag, problem)),
            }
        } else {
            findings.problems.push(Remark::new(flag, "unknown: the agent ends with an error, so remove the flag"));
        }
    }
    (raw, program_flags, findings)
}

/// The name and the value of a flag; `None` if the argument is no flag. Or the next argument.
fn split(argument: &str) -> Option<(String, Option<String>)> {
    if let Some(long) = argument.strip_prefix("--") {
        let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value.to_owned())));
        return Some((name.replace('_', "-"), value));
    }
    match argument.strip_prefix('-')? {
        "h" => Some(("help".to_owned(), None)),
        "v" => Some(("v".to_owned(), None)),
        // `-v2` or `-v=2`.
        short => {
            let value = short.strip_prefix('v')?;
            Some(("v".to_owned(), Some(value.strip_prefix('=').unwrap_or(value).to_owned())))
        }
    }
}

fn parse(kind: Kind, value: Option<String>, arguments: &mut Peekable<Iter<'_, String>>) -> Result<Json, String> {
    // As for the agent, an argument with a dash is another flag, except a negative number.
    let is_value = |next: &str| match next.strip_prefix('-') {
        Some(rest) if matches!(kind, Kind::Int(..)) => rest.starts_with(|c: char| c.is_ascii_digit()),
        Some(rest) => rest.is_empty(),
        None => true,
    };
    let value = match kind {
        Kind::Bool => value.or(Some("true".to_owned())),
        _ => value.or_else(|| arguments.next_if(|next| is_value(next)).cloned()),
    };
    kind.parse(&value.ok_or_else(|| format!("has no value; {}", kind.expected()))?)
}
