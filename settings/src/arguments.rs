//! Reads kube-proxy's arguments as its flag library does (Go's `pflag`), and names every argument
//! that kube-proxy does not know, instead of ending at the first one.

use super::{
    fields::{FIELDS, Field},
    raw::{Findings, Raw},
    remark::Remark,
    value::Kind,
};

/// Flags that belong to the program and are no settings. The agent has these flags too.
///
/// Each entry holds the name, whether a value follows, and what the agent does with the flag.
pub(super) const PROGRAM_FLAGS: &[(&str, bool, &str)] = &[
    ("config", true, "the agent reads the same file, which replaces the other flags of kube-proxy: check it too"),
    ("hostname-override", true, "the name of the node"),
    ("write-config-to", true, "the agent writes its defaults and ends"),
    ("cleanup", false, "the agent removes Headgate's rules and ends"),
    ("init-only", false, "the agent sets the kernel parameters that need privileges, and ends"),
    ("version", false, "the agent prints its version and ends"),
    ("help", false, "the agent prints its help and ends"),
];

/// A flag of [`PROGRAM_FLAGS`] among the arguments: its name with dashes, its value, and what the
/// agent does with it.
pub(super) type ProgramFlag = (String, String, &'static str);

/// Reads arguments without the program's name.
pub(super) fn read(arguments: &[String]) -> (Raw, Vec<ProgramFlag>, Findings) {
    let (mut raw, mut program_flags, mut findings) = (Raw::default(), Vec::new(), Findings::default());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let Some(text) =
            argument.strip_prefix("--").or_else(|| argument.strip_prefix('-').filter(|t| t.starts_with('v')))
        else {
            findings.notes.push(Remark::new(argument, "not a flag; kube-proxy has no other arguments"));
            continue;
        };
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value.to_owned())));
        let name = name.replace('_', "-");
        let mut value_or_next = || value.clone().or_else(|| arguments.next().cloned());
        let flag = format!("--{name}");
        let is_field = |field: &&Field| !name.is_empty() && (field.flag == name || field.alias == name);
        if let Some((_, takes_value, what)) = PROGRAM_FLAGS.iter().find(|(known, ..)| *known == name) {
            let value = if *takes_value { value_or_next() } else { value };
            program_flags.push((flag, value.unwrap_or_default(), *what));
        } else if let Some(field) = FIELDS.iter().find(is_field) {
            let value = if field.kind == Kind::Bool { value.or(Some("true".to_owned())) } else { value_or_next() };
            match value
                .ok_or_else(|| format!("has no value; {}", field.kind.expected()))
                .and_then(|v| field.kind.parse(&v))
            {
                Ok(value) => raw.set(field.id(), value),
                Err(problem) => findings.problems.push(Remark::new(flag, problem)),
            }
        } else {
            findings.notes.push(Remark::new(flag, "unknown: the agent ends with an error, so remove the flag"));
        }
    }
    (raw, program_flags, findings)
}
