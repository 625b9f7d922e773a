//! `headgatectl migrate`: checks the settings of a kube-proxy for the node agent, and [`run`] moves
//! nodes.

pub(crate) mod plan;
pub(crate) mod run;

use std::{
    fs,
    io::{self, Write},
};

use headgate_settings::{
    ConfigError, ProxyMode,
    migration::{self, Checked, Outcome},
};

use crate::answer::{Failure, data};
use crate::args::{CheckArgs, Output};
use crate::render::{self, Style};

/// Checks settings, and writes a line for each.
pub(crate) fn check(args: &CheckArgs, output: Output, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let checked = match &args.file {
        None => migration::check_arguments(&args.arguments),
        Some(path) => {
            let shown = if path.as_os_str() == "-" { "standard input".to_owned() } else { path.display().to_string() };
            let text = if path.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(path) };
            let text = text.map_err(|error| ConfigError::File { option: "FILE", path: shown.clone(), error })?;
            migration::check_file(&shown, &text)?
        }
    };
    let text = match output.is_data() {
        true => data(output, &checked.lines, false)?,
        false => render::fit(&text(&checked, output == Output::Wide, style), style).into_owned(),
    };
    out.write_all(text.as_bytes())?;
    match checked.count(Outcome::Invalid) {
        0 => Ok(()),
        invalid => {
            let settings = render::counted(invalid as u64, "setting");
            Err(Failure::Faulty(format!("the agent rejects {settings}: correct or remove what is invalid first")))
        }
    }
}

fn text(checked: &Checked, is_wide: bool, style: Style) -> String {
    let count = |outcome| format!("{} {}", checked.count(outcome), outcome.as_str());
    let counts: Vec<String> =
        [Outcome::CarriesOver, Outcome::OtherDefault, Outcome::NoEffect, Outcome::Invalid].map(count).into();
    let table = render::migration(&checked.lines, is_wide, style);
    format!("{table}\n{}.\n{}\n{EXTERNAL_IPS}\n", counts.join(", "), mode(checked.mode))
}

const EXTERNAL_IPS: &str = "externalIPs: the production values leave them out (--external-ips of the control plane). The Services \
    that have some:\n  \
    kubectl get services -A -o custom-columns=NS:.metadata.namespace,NAME:.metadata.name,IPS:.spec.externalIPs | grep -v '<none>'";

/// The mode to choose.
const fn mode(mode: Option<ProxyMode>) -> &'static str {
    match mode {
        None => {
            "Mode: the file of --config decides it, and all other settings except the name of the node. Check the \
             file too, for example:\n  \
             kubectl -n kube-system get configmap kube-proxy -o yaml | headgatectl migrate check -"
        }
        Some(ProxyMode::Auto) => "Mode: auto takes nftables where no Service behaves differently than with iptables.",
        Some(ProxyMode::Iptables) => {
            "Mode: iptables stays. Mode auto would also take nftables where no Service behaves differently."
        }
        Some(ProxyMode::Ipvs) => {
            "Mode: ipvs stays. Kubernetes removes this mode: choose nftables, unless you need a scheduler of IPVS."
        }
        Some(ProxyMode::Nftables) => "Mode: nftables stays.",
        Some(ProxyMode::Userspace) => "Mode: userspace stays. The agent carries connections through its own proxy.",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn table(checked: &Checked) -> String {
        text(checked, false, Style::default())
    }

    #[test]
    fn the_page_shows_real_output() {
        let configuration = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n\
                             clusterCIDR: 10.244.0.0/16\nclientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}\n";
        let shown = table(&migration::check_file("-", configuration).unwrap());
        let page = include_str!("../../docs/migration.md");
        assert!(page.contains(&format!("```text\n{shown}```\n")), "docs/migration.md does not show this:\n{shown}");
    }

    #[test]
    fn long_values_lose_their_middle_in_the_table() {
        let value = format!("10.0.0.0/8{}end", "é".repeat(100_000));
        let arguments =
            [format!("--cluster-cidr={value}"), format!("--{value}"), format!("--pod-bridge-interface={value}")];
        let checked = migration::check_arguments(&arguments);
        assert!(checked.lines.iter().any(|line| line.value == value), "JSON has the whole value");
        let shown = table(&checked);
        assert!(shown.len() < 10_000, "the table has {} bytes", shown.len());
        let joined: String = shown.split_whitespace().collect();
        for part in ["10.0.0.0/8éé", "éé…éé", "éend", "writeonesuchas10.0.0.0/8"] {
            assert!(joined.contains(part), "{part} is not in {shown}");
        }
    }
}
