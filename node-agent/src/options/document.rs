//! `docs/configuration.md`, written from the table of settings and from the command line's own
//! help.

use std::fmt::Write as _;

use clap::CommandFactory as _;

use super::Options;
use crate::settings::{
    fields::{FIELDS, Field, Meaning},
    value::Kind,
};

const HEAD: &str = "\
# Configuring the node agent

<!-- Written by `make docs` from node-agent/src/settings/fields.rs and node-agent/src/options/mod.rs; edit those. -->

The agent takes kube-proxy's flags, or kube-proxy's configuration file by `--config FILE` (`kubeproxy.config.k8s.io/v1alpha1`,
`KubeProxyConfiguration`), and a few flags of its own. A kube-proxy's arguments and ConfigMap can be used as they are; `--control-plane` has to be added.

- With `--config`, kube-proxy's flags are ignored, as kube-proxy does it, and one warning names them. Headgate's own flags still count, and
  `--hostname-override` (`--node-name`).
- Fields that are unknown, stand twice or mean nothing here are no error: one warning names each of them and says why. Values that cannot be are
  refused, all at once, each with its field and the remedy.
- The agent ends with status 1 when the file is edited, so that whoever runs it starts it anew; the rules stay in the kernel meanwhile. A file that vanishes
  is only warned about.
- `--write-config-to FILE` writes the defaults and exits. `/configz` on the metrics port shows what is in use.
- Durations are written as Go writes them: `250ms`, `30s`, `1m0s`, `24h`.
- Where only the Node tells something (`podCIDRs` in mode `NodeCIDR`, `primary` NodePort addresses), rules are written anew when it changes; the
  agent never ends for it.
";

/// The page.
#[must_use]
pub fn configuration_page() -> String {
    let mut page = HEAD.to_owned();
    page.push_str("\n## Headgate's own flags\n\n| flag | meaning | default |\n| --- | --- | --- |\n");
    own_flags(&mut page);
    page.push_str("\n## kube-proxy's settings that are used\n\n| field | flag | value | default | meaning |\n| --- | --- | --- | --- | --- |\n");
    for field in FIELDS {
        if let Meaning::Used(what) = field.meaning {
            row(&mut page, &[code(field.path), flags(field), value(field.kind), code(field.default), what.to_owned()]);
        }
    }
    page.push_str("\n## kube-proxy's settings that are taken and mean nothing\n\nA value other than the default is named in the warning.\n\n| field | flag | why |\n| --- | --- | --- |\n");
    for field in FIELDS {
        if let Meaning::Ignored(why) = field.meaning {
            row(&mut page, &[code(field.path), flags(field), why.to_owned()]);
        }
    }
    page
}

fn own_flags(page: &mut String) {
    let command = Options::command();
    let is_kube_proxys = |id: &str| FIELDS.iter().any(|field| field.flag == id);
    for argument in command.get_arguments().filter(|argument| !is_kube_proxys(argument.get_id().as_str())) {
        let Some(long) = argument.get_long() else { continue };
        let aliases = argument.get_visible_aliases().unwrap_or_default();
        let names: Vec<String> = std::iter::once(long).chain(aliases).map(|name| code(&format!("--{name}"))).collect();
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let environment = argument.get_env().map(|name| format!(". Environment: `{}`", name.to_string_lossy()));
        let defaults = argument.get_default_values().iter().map(|value| code(&value.to_string_lossy()));
        let defaults: Vec<String> = defaults.collect();
        row(page, &[names.join(", "), format!("{help}{}", environment.unwrap_or_default()), defaults.join(" ")]);
    }
}

fn row(page: &mut String, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    // Writing to a string does not fail.
    let _ = writeln!(page, "| {} |", cells.join(" | "));
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

fn flags(field: &Field) -> String {
    let names = [field.flag, field.alias];
    let shown: Vec<String> = names.iter().filter(|flag| !flag.is_empty()).map(|flag| format!("`--{flag}`")).collect();
    shown.join(", ")
}

fn value(kind: Kind) -> String {
    match kind {
        Kind::Choice(choices) => {
            choices.iter().filter(|c| !c.is_empty()).map(|c| code(c)).collect::<Vec<_>>().join(", ")
        }
        Kind::Int(min, i64::MAX) => format!("number from {min}"),
        Kind::Int(min, max) => format!("{min} to {max}"),
        kind => kind.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, path::Path};

    use super::*;
    use crate::metrics::Metrics;

    /// `make docs` sets `HEADGATE_WRITE_DOCS`, and then the pages are written instead of compared.
    #[test]
    fn documents_are_current() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let pages = [("configuration.md", configuration_page()), ("metrics.md", Metrics::default().registry().page())];
        for (name, page) in pages {
            let path = folder.join(name);
            if std::env::var_os("HEADGATE_WRITE_DOCS").is_some() {
                fs::write(&path, &page).unwrap();
            }
            let found = fs::read_to_string(&path).unwrap_or_default();
            assert!(found == page, "docs/{name} is stale: run `make docs`");
        }
    }
}
