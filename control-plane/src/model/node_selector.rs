//! Which Nodes should have an agent: the label selector of `--agent-nodes` (discovery.proto,
//! section 16).

use std::{collections::BTreeMap, fmt, str::FromStr};

use kube::core::{Expression, Selector, SelectorExt as _};

/// The label that the kubelet sets to the name of the operating system.
const OS_LABEL: &str = "kubernetes.io/os";

/// A label selector in the notation of `kubectl get --selector`: requirements that are all needed,
/// separated by commas, such as `a=b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a` or `!a`. An empty
/// text selects every Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSelector {
    text: String,
    selector: Selector,
}

impl NodeSelector {
    /// Returns true if a Node with these labels should have an agent. A Node without the label
    /// `kubernetes.io/os` counts as a Linux node, because manifests in folders often lack it.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        if labels.contains_key(OS_LABEL) {
            return self.selector.matches(labels);
        }
        let mut labels = labels.clone();
        labels.insert(OS_LABEL.to_owned(), "linux".to_owned());
        self.selector.matches(&labels)
    }
}

impl Default for NodeSelector {
    /// Selects Linux nodes.
    fn default() -> Self {
        let selector = Selector::from_iter([Expression::Equal(OS_LABEL.to_owned(), "linux".to_owned())]);
        Self { text: format!("{OS_LABEL}=linux"), selector }
    }
}

impl fmt::Display for NodeSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for NodeSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut depth = 0_i32;
        let parts = text.split(|letter| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            letter == ',' && depth == 0
        });
        let expressions = parts.map(str::trim).filter(|part| !part.is_empty()).map(expression);
        let selector = expressions.collect::<Result<Vec<_>, _>>()?.into_iter().collect();
        Ok(Self { text: text.to_owned(), selector })
    }
}

fn expression(text: &str) -> Result<Expression, String> {
    let key = |key: &str| {
        let key = key.trim();
        let is_key = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
        let is_valid = !key.is_empty() && key.chars().all(is_key);
        is_valid.then(|| key.to_owned()).ok_or_else(|| format!("{key:?} is not the key of a label"))
    };
    let values = |list: &str| {
        let list = list.trim().strip_prefix('(').and_then(|list| list.strip_suffix(')'));
        let list = list.ok_or_else(|| format!("{text:?}: write the values in parentheses, such as a in (b,c)"))?;
        Ok::<_, String>(list.split(',').map(|value| value.trim().to_owned()).collect())
    };
    if let Some((name, list)) = text.split_once(" notin ") {
        return Ok(Expression::NotIn(key(name)?, values(list)?));
    }
    if let Some((name, list)) = text.split_once(" in ") {
        return Ok(Expression::In(key(name)?, values(list)?));
    }
    if let Some((name, value)) = text.split_once("!=") {
        return Ok(Expression::NotEqual(key(name)?, value.trim().to_owned()));
    }
    if let Some((name, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(Expression::Equal(key(name)?, value.trim().to_owned()));
    }
    match text.strip_prefix('!') {
        Some(name) => Ok(Expression::DoesNotExist(key(name)?)),
        None => Ok(Expression::Exists(key(text)?)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn labels(text: &str) -> BTreeMap<String, String> {
        let pair = |pair: &str| pair.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
        text.split(' ').filter_map(pair).collect()
    }

    #[test]
    fn linux_nodes_and_nodes_that_do_not_name_their_system_are_selected_by_default() {
        let selector = NodeSelector::default();
        assert!(selector.selects(&labels("kubernetes.io/os=linux")) && selector.selects(&labels("a=b")));
        assert!(!selector.selects(&labels("kubernetes.io/os=windows")));
        assert_eq!(selector, selector.to_string().parse().unwrap());
    }

    #[test]
    fn selectors_are_read_as_kubectl_reads_them() {
        let selects = |selector: &str, of: &str| selector.parse::<NodeSelector>().unwrap().selects(&labels(of));
        assert!(selects("", "a=b") && selects("a=b,c", "a=b c=d") && !selects("a=b,c", "a=b"));
        assert!(selects("type notin (virtual-kubelet, edge),!gpu", "type=vm"));
        assert!(!selects("type notin (virtual-kubelet, edge)", "type=edge"));
        assert!(selects("zone in (a,b), x!=y", "zone=b") && !selects("zone in (a,b)", "zone=c"));
        assert!(selects("a==b", "a=b") && !selects("!a", "a=b"));
        for bad in ["a in b", "=b", "a b", "(x)"] {
            assert!(bad.parse::<NodeSelector>().is_err(), "{bad}");
        }
    }
}
