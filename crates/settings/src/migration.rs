//! Says for each setting of a kube-proxy what the node agent makes of it.

use serde::{Serialize, Serializer};
use serde_json::Value as Json;

use super::{
    ConfigError, ProxyMode, arguments,
    effective::{self, Settings},
    fields::{FIELDS, Field, Meaning},
    raw::{Findings, KIND, Origin, Raw},
    remark::Remark,
    value::shown,
    yaml,
};

headgate_core::named! {
    /// What the agent makes of a setting.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Outcome {
        /// The setting has the same effect.
        CarriesOver = "carries over",
        /// The setting is not given, and Headgate's default differs from kube-proxy's.
        OtherDefault = "other default",
        /// The agent accepts the setting, which has no effect.
        NoEffect = "no effect",
        /// The agent does not start with this value.
        Invalid = "invalid",
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// The field or the flag.
    pub setting: String,
    /// The given value. Empty if the agent cannot read the value, or if no value is given.
    pub value: String,
    /// What the agent makes of the setting.
    pub outcome: Outcome,
    /// The meaning, the reason, or the remedy.
    pub explanation: String,
}

/// The settings of a kube-proxy, checked for the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// The settings in the order of `docs/configuration.md`, without those that have their default.
    /// After them come the arguments that are no settings, and unknown names.
    pub lines: Vec<Line>,
    /// The mode that the settings ask for: `Auto` if they name none. `None` if the arguments
    /// contain `--config`, because the file then decides the mode and the other settings.
    pub mode: Option<ProxyMode>,
}

impl Checked {
    /// The number of settings with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.lines.iter().filter(|line| line.outcome == outcome).count()
    }
}

const MODE: &str = "kube-proxy: iptables, from 1.40 on nftables. Headgate: auto, which takes nftables where no Service behaves differently";
const MIN_SYNC: &str = "kube-proxy: 1s. Headgate: 0s, because it writes only what changed";

/// Checks a file: a `KubeProxyConfiguration`, a ConfigMap that holds one, or a Pod or DaemonSet
/// whose arguments are kube-proxy's. Errors name the file as `path`. JSON is valid too.
/// Errors: the file is not YAML, or holds no configuration of kube-proxy. Invalid settings are no
/// error: they are lines of the answer.
pub fn check_file(path: &str, text: &str) -> Result<Checked, ConfigError> {
    let (document, repeated) = yaml::parse(path, text)?;
    let none = |what: String| ConfigError::NoConfiguration { path: path.to_owned(), what };
    let name = || {
        let part = |key| document["metadata"][key].as_str().filter(|text| !text.is_empty());
        [part("namespace"), part("name")].into_iter().flatten().collect::<Vec<_>>().join("/")
    };
    match document["kind"].as_str() {
        Some("ConfigMap") => {
            let data = document["data"].as_object().cloned().unwrap_or_default();
            let mut unreadable = Vec::new();
            for (key, text) in data.iter().filter_map(|(key, text)| Some((key, text.as_str()?))) {
                match yaml::parse(&format!("the key {key} in {path}"), text) {
                    Ok((document, repeated)) if document["kind"] == KIND => {
                        return Ok(check_document(&document, repeated));
                    }
                    Ok(_) => {}
                    // The configuration is perhaps a text that cannot be parsed.
                    Err(error) => unreadable.push((!text.contains(KIND), error)),
                }
            }
            let unreadable = unreadable.into_iter().min_by_key(|(is_other, _)| *is_other);
            let keys = || data.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let missing = || none(format!("the ConfigMap {} holds no {KIND} in its keys ({})", name(), keys()));
            Err(unreadable.map_or_else(missing, |(_, error)| error))
        }
        Some(kind @ ("Pod" | "DaemonSet")) => {
            let pod = if kind == "Pod" { &document["spec"] } else { &document["spec"]["template"]["spec"] };
            let found = arguments_of(pod)
                .ok_or_else(|| none(format!("the {kind} {} runs no kube-proxy", name())))?
                .map_err(|why| {
                    let remedy = "pass the flags of kube-proxy: headgatectl migrate check -- FLAGS";
                    none(format!("the {kind} {}: {why}; {remedy}", name()))
                });
            Ok(check_arguments(&found?))
        }
        Some("List") => Err(none("it is a list; pass one object".to_owned())),
        _ => Ok(check_document(&document, repeated)),
    }
}

fn check_document(document: &Json, repeated: Option<Remark>) -> Checked {
    let (raw, findings) = Raw::from_document(document, repeated);
    checked(&raw, Vec::new(), findings)
}

/// Checks arguments of kube-proxy, without the program's name.
pub fn check_arguments(arguments: &[String]) -> Checked {
    let (raw, program_flags, findings) = arguments::read(arguments);
    let line = |(setting, value, what): (String, String, &str)| Line {
        setting,
        value,
        outcome: Outcome::CarriesOver,
        explanation: what.to_owned(),
    };
    checked(&raw, program_flags.into_iter().map(line).collect(), findings)
}

/// The arguments of kube-proxy in the specification of a pod, or the reason why they cannot be
/// read. `None` if no container runs kube-proxy.
fn arguments_of(spec: &Json) -> Option<Result<Vec<String>, String>> {
    let arguments = |container: &Json| Some((container["name"] == "kube-proxy", arguments_of_container(container)?));
    let found = spec["containers"].as_array()?.iter().filter_map(arguments);
    found.min_by_key(|(is_named, found)| (found.is_err(), !is_named)).map(|(_, found)| found)
}

fn arguments_of_container(container: &Json) -> Option<Result<Vec<String>, String>> {
    let texts = |key: &str| container[key].as_array().into_iter().flatten().filter_map(Json::as_str);
    let mut words: Vec<String> = texts("command").chain(texts("args")).map(str::to_owned).collect();
    if let Some(program) = words.iter().position(|word| is_kube_proxy(word)) {
        return Some(Ok(words.split_off(program + 1)));
    }
    let name = container["name"].as_str().unwrap_or_default();
    let is_one = name == "kube-proxy" || words.iter().any(|word| word.contains("kube-proxy"));
    is_one.then(|| match words.first() {
        Some(program) if !program.starts_with('-') => Err(format!("its container {name} runs {program}")),
        // The image itself names the program.
        _ => Ok(words),
    })
}

fn is_kube_proxy(word: &str) -> bool {
    word.rsplit('/').next() == Some("kube-proxy") && !word.contains(char::is_whitespace)
}

fn checked(raw: &Raw, program_flags: Vec<Line>, findings: Findings) -> Checked {
    let has_file = program_flags.iter().any(|line| line.setting == "--config");
    let (mode, mut problems, mut notes) = if has_file {
        (None, Vec::new(), replaced_by_file(raw))
    } else {
        let (settings, problems) = Settings::of(raw);
        (Some(settings.mode), problems, settings.notes)
    };
    problems.extend(findings.problems);
    notes.extend(findings.notes);
    let mut lines = Vec::new();
    for field in FIELDS {
        let name = raw.name(field.id());
        let value = raw.given(field.id());
        let (problem, note) = (take(&mut problems, &name), take(&mut notes, &name));
        let default = mode.filter(|_| value.is_none()).and_then(|mode| other_default(field.id(), mode, raw.origin));
        let (outcome, explanation) = if let Some(problem) = problem {
            (Outcome::Invalid, problem)
        } else if let Some(note) = note {
            (Outcome::NoEffect, note)
        } else if let Some(difference) = default {
            (Outcome::OtherDefault, difference.to_owned())
        } else if raw.is_changed(field.id()) {
            (Outcome::CarriesOver, meaning(field))
        } else {
            continue;
        };
        let value = value.map(shown).unwrap_or_default();
        lines.push(Line { setting: name, value, outcome, explanation });
    }
    lines.extend(program_flags);
    let rest = problems.into_iter().map(|problem| (Outcome::Invalid, problem));
    for (outcome, Remark { setting, what }) in rest.chain(notes.into_iter().map(|note| (Outcome::NoEffect, note))) {
        lines.push(Line { setting, value: String::new(), outcome, explanation: what });
    }
    Checked { lines, mode }
}

/// A note for each given flag beside `--config`. As in kube-proxy, only flags of the program still
/// have an effect, such as `--hostname-override`.
fn replaced_by_file(raw: &Raw) -> Vec<Remark> {
    let is_used = |field: &&Field| raw.given(field.id()).is_some() && matches!(field.meaning, Meaning::Used(_));
    let why = "--config is given, and the file replaces kube-proxy's flags";
    let used = FIELDS.iter().filter(is_used).map(|field| Remark::new(raw.name(field.id()), why));
    raw.without_effect().into_iter().chain(used).collect()
}

/// The difference, if Headgate's default of this setting differs from kube-proxy's in this mode.
fn other_default(id: &str, mode: ProxyMode, origin: Origin) -> Option<&'static str> {
    let [_, min_sync] = effective::periods(mode, origin);
    match id {
        "mode" => Some(MODE),
        // 1s is only the default of the flag.
        "ipvs.minSyncPeriod" if origin == Origin::File => None,
        id if id == min_sync => Some(MIN_SYNC),
        _ => None,
    }
}

fn take(remarks: &mut Vec<Remark>, setting: &str) -> Option<String> {
    let at = remarks.iter().position(|remark| remark.setting == setting)?;
    Some(remarks.remove(at).what)
}

/// The first sentence of a field's meaning.
fn meaning(field: &Field) -> String {
    let (Meaning::Used(what) | Meaning::Ignored(what)) = field.meaning;
    what.split_once(". ").map_or(what, |(first, _)| first).replace('`', "")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tests::KUBEADM;

    fn lines(checked: &Checked) -> Vec<(&str, &str, Outcome)> {
        checked.lines.iter().map(|line| (line.setting.as_str(), line.value.as_str(), line.outcome)).collect()
    }

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_config_map_of_kubeadm_shows_only_what_is_given_and_other_defaults() {
        let document = format!("apiVersion: {}\nkind: {}\n{KUBEADM}", crate::raw::API_VERSION, crate::raw::KIND);
        let map = serde_json::json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "kube-system", "name": "kube-proxy"},
            "data": {"kubeconfig.conf": "kind: Config", "config.conf": document},
        });
        let checked = check_file("-", &map.to_string()).unwrap();
        let expected = [
            ("mode", "", Outcome::OtherDefault),
            ("clusterCIDR", "10.244.0.0/16", Outcome::CarriesOver),
            ("iptables.minSyncPeriod", "", Outcome::OtherDefault),
            ("clientConnection.kubeconfig", "/var/lib/kube-proxy/kubeconfig.conf", Outcome::NoEffect),
        ];
        assert_eq!(lines(&checked), expected);
        assert_eq!((checked.mode, checked.count(Outcome::Invalid)), (Some(ProxyMode::Auto), 0));
        assert_eq!(checked, check_file("-", &document).unwrap());
    }

    #[test]
    fn each_invalid_unused_and_unknown_field_has_a_line() {
        let document = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
                        ipvs: {scheduler: best, minSyncPeriod: 2s}\niptables: {masqueradeBit: 40}\nnftables: {syncPeriod: 9s}\nfoo: 1\n";
        let checked = check_file("-", document).unwrap();
        let expected = [
            ("mode", "ipvs", Outcome::CarriesOver),
            ("iptables.masqueradeBit", "", Outcome::Invalid),
            ("ipvs.scheduler", "best", Outcome::Invalid),
            ("ipvs.minSyncPeriod", "2s", Outcome::CarriesOver),
            ("nftables.syncPeriod", "9s", Outcome::NoEffect),
            ("foo", "", Outcome::NoEffect),
        ];
        assert_eq!(lines(&checked), expected);
        assert_eq!(checked.lines[5].explanation, "unknown");
    }

    #[test]
    fn arguments_are_read_as_kube_proxy_reads_them() {
        let arguments = "--proxy_mode ipvs --masquerade-all -v=2 --cluster-cidr=10.244.0.0/16 --hostname-override=$(NODE_NAME) \
                         --conntrack-min many --new-flag --cleanup stray --oom-score-adj";
        let checked = check_arguments(&words(arguments));
        let expected = [
            ("--proxy-mode", "ipvs", Outcome::CarriesOver),
            ("--cluster-cidr", "10.244.0.0/16", Outcome::CarriesOver),
            ("--masquerade-all", "true", Outcome::CarriesOver),
            ("--ipvs-min-sync-period", "", Outcome::OtherDefault),
            ("--conntrack-min", "", Outcome::Invalid),
            ("--oom-score-adj", "", Outcome::Invalid),
            ("--v", "2", Outcome::NoEffect),
            ("--hostname-override", "$(NODE_NAME)", Outcome::CarriesOver),
            ("--cleanup", "true", Outcome::CarriesOver),
            ("--new-flag", "", Outcome::Invalid),
            ("stray", "", Outcome::Invalid),
        ];
        assert_eq!(lines(&checked), expected);
    }

    #[test]
    fn arguments_that_the_agent_rejects_are_invalid() {
        for (arguments, setting) in [
            ("--logtostderr=true", "--logtostderr"),
            ("stray", "stray"),
            ("-masquerade-all", "-masquerade-all"),
            ("--masquerade-all true", "true"),
            ("--init-only=x", "--init-only"),
            ("--cleanup=maybe", "--cleanup"),
            ("--cleanup=", "--cleanup"),
            ("--cleanup --cleanup=false", "--cleanup"),
            ("--config=", "--config"),
            ("--config", "--config"),
            ("--config a --config b", "--config"),
            ("--write-config-to=", "--write-config-to"),
            ("--hostname-override=", "--hostname-override"),
            ("--version=true", "--version"),
            ("--cluster-cidr --masquerade-all", "--cluster-cidr"),
            ("-v", "--v"),
        ] {
            let checked = check_arguments(&words(arguments));
            let invalid = checked.lines.iter().filter(|line| line.outcome == Outcome::Invalid);
            assert_eq!(invalid.map(|line| line.setting.as_str()).collect::<Vec<_>>(), [setting], "{arguments}");
        }
        let valid = "-h|-v2|-v=2|-v 2|--init-only=f|--oom-score-adj -998|--hostname-override=a --hostname-override b";
        for arguments in valid.split('|') {
            assert_eq!(check_arguments(&words(arguments)).count(Outcome::Invalid), 0, "{arguments}");
        }
    }

    #[test]
    fn beside_a_file_flags_have_no_effect_and_there_is_no_verdict() {
        let flags = "--config=/var/lib/kube-proxy/config.conf --hostname-override=$(NODE_NAME) --proxy-mode=ipvs --v=2 \
                     --ipvs-scheduler=best --masquerade-all=false --oom-score-adj=x";
        let checked = check_arguments(&words(flags));
        let expected = [
            ("--proxy-mode", "ipvs", Outcome::NoEffect),
            ("--masquerade-all", "false", Outcome::NoEffect),
            ("--ipvs-scheduler", "best", Outcome::NoEffect),
            ("--oom-score-adj", "", Outcome::Invalid),
            ("--v", "2", Outcome::NoEffect),
            ("--config", "/var/lib/kube-proxy/config.conf", Outcome::CarriesOver),
            ("--hostname-override", "$(NODE_NAME)", Outcome::CarriesOver),
        ];
        assert_eq!(lines(&checked), expected);
        assert!(checked.lines[0].explanation.starts_with("--config is given"), "{checked:?}");
        assert!(checked.lines[4].explanation.starts_with("--log "), "{checked:?}");
        assert_eq!(checked.mode, None);
    }

    #[test]
    fn manifests_of_pods_hold_arguments() {
        let spec = serde_json::json!({"containers": [
            {"name": "other", "command": ["sleep"]},
            {"name": "proxy", "command": ["/usr/local/bin/kube-proxy", "--proxy-mode=nftables"], "args": ["--cluster-cidr=10.0.0.0/8"]},
        ]});
        let pod = serde_json::json!({"kind": "Pod", "spec": spec});
        let set = serde_json::json!({"kind": "DaemonSet", "spec": {"template": {"spec": spec}}});
        let expected = check_arguments(&words("--proxy-mode=nftables --cluster-cidr=10.0.0.0/8"));
        assert_eq!(expected.mode, Some(ProxyMode::Nftables));
        for manifest in [pod, set] {
            assert_eq!(check_file("-", &manifest.to_string()).unwrap(), expected);
        }
    }

    #[test]
    fn containers_that_start_kube_proxy_by_a_shell_are_refused_with_the_remedy() {
        let pod = |command: &[&str], args: &[&str]| {
            let containers = serde_json::json!([
                {"name": "log", "command": ["/bin/sh", "-c", "tail -F $HOME/kube-proxy.log"]},
                {"name": "kube-proxy", "command": command, "args": args},
            ]);
            let pod = serde_json::json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}});
            check_file("f.yaml", &pod.to_string()).map_err(|error| error.to_string())
        };
        for (command, program) in [
            (&["/bin/sh", "-c", "exec kube-proxy --proxy-mode=ipvs 2>&1"][..], "/bin/sh"),
            (&["/hyperkube", "proxy", "--proxy-mode=ipvs"], "/hyperkube"),
        ] {
            let error = pod(command, &[]).unwrap_err();
            let ending = format!(
                "the Pod p: its container kube-proxy runs {program}; pass the flags of kube-proxy: headgatectl migrate check -- FLAGS"
            );
            assert!(error.ends_with(&ending), "{command:?}: {error}");
        }
        let proxy = serde_json::json!([{"name": "proxy", "command": ["sh", "-c", "exec kube-proxy --v=2"]}]);
        let other = serde_json::json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": proxy}});
        let error = check_file("f.yaml", &other.to_string()).unwrap_err().to_string();
        assert!(error.contains("its container proxy runs sh; pass the flags"), "{error}");
        let expected = Ok(check_arguments(&words("--cluster-cidr=10.0.0.0/8 --proxy-mode=ipvs")));
        assert_eq!(pod(&[], &["--cluster-cidr=10.0.0.0/8", "--proxy-mode=ipvs"]), expected);
    }

    #[test]
    fn files_without_a_configuration_are_errors_that_name_the_object() {
        let error = |text: &str| check_file("f.yaml", text).unwrap_err().to_string();
        let map = "kind: ConfigMap\nmetadata: {namespace: a, name: b}\ndata: {a: '1', b: 'kind: Config'}\n";
        let expected = "f.yaml has no configuration of kube-proxy that can be read: the ConfigMap a/b holds no \
                        KubeProxyConfiguration in its keys (a, b)";
        assert_eq!(error(map), expected);
        let broken = "kind: ConfigMap\ndata:\n  a: '['\n  config: |\n    kind: KubeProxyConfiguration\n    mode: [\n";
        let broken_flow = "kind: ConfigMap\ndata: {a: 'mode: ['}\n";
        let several = "kind: ConfigMap\ndata:\n  a: |\n    a: 1\n    ---\n    kind: KubeProxyConfiguration\n";
        for (text, expected) in [
            (broken, "the key config in f.yaml is not YAML: error: line 2 column 7"),
            (broken_flow, "the key a in f.yaml is not YAML: error: line 1 "),
            (several, "the key a in f.yaml holds several YAML documents"),
        ] {
            assert!(error(text).starts_with(expected), "{}", error(text));
        }
        assert!(error("kind: Pod\nmetadata: {name: b}\n").ends_with("the Pod b runs no kube-proxy"));
        assert!(error("kind: List\n").ends_with("it is a list; pass one object"));
        assert!(error("a: [").starts_with("f.yaml is not YAML: "));
    }
}
