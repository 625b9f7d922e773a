//! kube-proxy's flags, created from the table of settings.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, parser::ValueSource};

use headgate_settings::{
    Raw,
    fields::{FIELDS, Field, Meaning},
    value::Kind,
};
use serde_json::Value;

/// The heading of these flags in `--help`.
const HEADING: &str = "Flags of kube-proxy";

/// The flags of kube-proxy that were given.
#[derive(Debug, Clone, Default)]
pub struct KubeProxyFlags {
    /// The values of these flags.
    pub raw: Raw,
    /// The names of these flags with dashes, in the order of the table.
    pub given: Vec<String>,
}

impl Args for KubeProxyFlags {
    fn augment_args(command: Command) -> Command {
        let flags = FIELDS.iter().filter(|field| !field.flag.is_empty());
        flags.fold(command, |command, field| command.arg(argument(field)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KubeProxyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for field in FIELDS.iter().filter(|field| !field.flag.is_empty()) {
            if matches.value_source(field.flag) != Some(ValueSource::CommandLine) {
                continue;
            }
            for value in matches.get_many::<Value>(field.flag).into_iter().flatten() {
                self.raw.set(field.id(), value.clone());
            }
            self.given.push(format!("--{}", field.flag));
        }
        Ok(())
    }
}

fn argument(field: &'static Field) -> Arg {
    let kind = field.kind;
    let mut argument =
        Arg::new(field.flag).long(field.flag).value_parser(move |text: &str| kind.parse(text)).help_heading(HEADING);
    if !field.alias.is_empty() {
        argument = argument.visible_alias(field.alias);
    }
    if field.flag == "v" {
        argument = argument.short('v');
    }
    argument = match kind {
        Kind::List | Kind::Gates => argument.action(ArgAction::Append),
        // As in Go, the last value of a repeated flag is used.
        _ => argument.overrides_with(field.flag),
    };
    argument = match kind {
        // As in Go: --masquerade-all, or --masquerade-all=false.
        Kind::Bool => argument.num_args(0..=1).require_equals(true).default_missing_value("true").value_name("BOOL"),
        Kind::List => argument.value_name("LIST"),
        Kind::Int(..) => argument.value_name("N").allow_negative_numbers(true),
        Kind::Duration => argument.value_name("DURATION"),
        Kind::Choice(_) | Kind::Text | Kind::Gates | Kind::Any => argument.value_name("TEXT"),
    };
    match field.meaning {
        Meaning::Used(what) => argument.help(help(what, field.default)),
        Meaning::Ignored(why) => argument.help(format!("Accepted and ignored: {why}")).hide(true),
    }
}

fn help(what: &str, default: &str) -> String {
    let what = what.replace('`', "");
    if default.is_empty() { what } else { format!("{what} [default: {default}]") }
}
