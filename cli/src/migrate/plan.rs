//! What a move changes at the API server, without asking it: labels of nodes, the affinity of
//! kube-proxy's DaemonSet, and the clusters in which only a person can stop kube-proxy.

use serde_json::{Value, json};

/// kube-proxy leaves nodes with this label.
pub(super) const MOVED: &str = "headgate.io/node-agent";
/// With this node selector, kube-proxy runs on no node.
const WANTED: &str = "headgate.io/kube-proxy";
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";

/// The labels of a pod, a node or a DaemonSet.
fn label<'a>(object: &'a Value, name: &str) -> &'a str {
    object["metadata"]["labels"][name].as_str().unwrap_or_default()
}

/// True if a node has the label of a moved node.
pub(super) fn is_moved(node: &Value) -> bool {
    !node["metadata"]["labels"][MOVED].is_null()
}

/// The patch that labels a node, or removes the label.
pub(super) fn labelled(is_moved: bool) -> Value {
    json!({ "metadata": { "labels": { MOVED: is_moved.then_some("true") } } })
}

fn terms(daemon_set: &Value) -> &[Value] {
    let affinity = &daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    affinity[REQUIRED]["nodeSelectorTerms"].as_array().map_or(&[], Vec::as_slice)
}

fn is_ours(expression: &Value) -> bool {
    expression["key"] == MOVED
}

/// True if kube-proxy leaves moved nodes.
pub(super) fn avoids(daemon_set: &Value) -> bool {
    let avoids = |term: &Value| term["matchExpressions"].as_array().is_some_and(|all| all.iter().any(is_ours));
    !terms(daemon_set).is_empty() && terms(daemon_set).iter().all(avoids)
}

/// True if kube-proxy is stopped on all nodes.
pub(super) fn is_stopped(daemon_set: &Value) -> bool {
    !daemon_set["spec"]["template"]["spec"]["nodeSelector"][WANTED].is_null()
}

/// A patch of the pods of a DaemonSet. It fails if somebody else has changed the DaemonSet since.
fn patch(daemon_set: &Value, pod: &Value) -> Value {
    let version = &daemon_set["metadata"]["resourceVersion"];
    json!({ "metadata": { "resourceVersion": version }, "spec": { "template": { "spec": pod } } })
}

/// The patch with which kube-proxy leaves moved nodes, or runs on them again. What else its
/// affinity says stays: only nodes that satisfy a whole term get a pod, so each term is changed.
pub(super) fn avoiding(daemon_set: &Value, avoids: bool) -> Value {
    let affinity = &daemon_set["spec"]["template"]["spec"]["affinity"];
    let mut terms = terms(daemon_set).to_vec();
    if terms.is_empty() {
        terms.push(json!({}));
    }
    for term in &mut terms {
        let mut expressions = term["matchExpressions"].as_array().cloned().unwrap_or_default();
        expressions.retain(|expression| !is_ours(expression));
        if avoids {
            expressions.push(json!({ "key": MOVED, "operator": "DoesNotExist" }));
        }
        term["matchExpressions"] = json!(expressions);
        if let Some(fields) = term.as_object_mut().filter(|_| expressions.is_empty()) {
            fields.remove("matchExpressions");
        }
    }
    terms.retain(|term| *term != json!({}));
    let is_alone = |value: &Value| value.as_object().is_none_or(|fields| fields.len() <= 1);
    let affinity = match (terms.is_empty(), is_alone(&affinity["nodeAffinity"]), is_alone(affinity)) {
        (false, ..) => json!({ "nodeAffinity": { REQUIRED: { "nodeSelectorTerms": terms } } }),
        (true, false, _) => json!({ "nodeAffinity": { REQUIRED: null } }),
        (true, true, false) => json!({ "nodeAffinity": null }),
        (true, true, true) => Value::Null,
    };
    patch(daemon_set, &json!({ "affinity": affinity }))
}

/// The patch that stops kube-proxy on all nodes, also on those that join later, or lets it run.
pub(super) fn stopping(daemon_set: &Value, stops: bool) -> Value {
    patch(daemon_set, &json!({ "nodeSelector": { WANTED: stops.then_some("wanted") } }))
}

/// What a person must do, if kube-proxy is no DaemonSet that this command may change. `pods` are
/// those of the namespace of kube-proxy.
pub(super) fn by_hand(daemon_set: Option<&Value>, nodes: &[Value], pods: &[Value]) -> Option<&'static str> {
    let version = |node: &Value| node["status"]["nodeInfo"]["kubeletVersion"].as_str().unwrap_or_default().to_owned();
    let runs = |mark: &str| nodes.iter().any(|node| version(node).contains(mark));
    let is_static = |pod: &Value| {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        !pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_null() && name.starts_with("kube-proxy")
    };
    let by_eks = |daemon_set: &Value| {
        let managers = daemon_set["metadata"]["managedFields"].as_array();
        managers.is_some_and(|managers| managers.iter().any(|manager| manager["manager"] == "eks"))
    };
    match daemon_set {
        Some(of) if by_eks(of) => Some(EKS),
        Some(of) if label(of, "addonmanager.kubernetes.io/mode") == "Reconcile" => Some(ADDON_MANAGER),
        Some(_) => None,
        None if runs("+rke2") => Some(RKE2),
        None if runs("+k3s") => Some(K3S),
        None if pods.iter().any(is_static) => Some(STATIC_POD),
        None => Some(NOT_FOUND),
    }
}

const K3S: &str = "kube-proxy is a part of the program k3s. One node after the other, servers first:
  1. on servers, write disable-kube-proxy: true into /etc/rancher/k3s/config.yaml
  2. systemctl restart k3s   # on other nodes k3s-agent
Within 30 s after kube-proxy has ended, the agent takes over. Back: remove the line, and restart.";
const RKE2: &str = "RKE2 runs kube-proxy as a static pod. One node after the other, servers first:
  1. on servers, write disable-kube-proxy: true into /etc/rancher/rke2/config.yaml
  2. systemctl restart rke2-server   # on other nodes rke2-agent
  3. rm -f /var/lib/rancher/rke2/agent/pod-manifests/kube-proxy.yaml
Within 30 s after kube-proxy has ended, the agent takes over. Back: remove the line, and restart.";
const STATIC_POD: &str = "kube-proxy is a static pod, which only its node can stop. One node after the other:
  mv /etc/kubernetes/manifests/kube-proxy* /etc/kubernetes/   # or the folder staticPodPath of the kubelet
Within 30 s after kube-proxy has ended, the agent takes over. Back: move the file back.";
const EKS: &str =
    "kube-proxy is an add-on of EKS, which writes its DaemonSet again. Give the DaemonSet to yourself, and
run this command again with --unmanaged:
  aws eks delete-addon --cluster-name CLUSTER --addon-name kube-proxy --preserve
Back, at the end: aws eks create-addon --cluster-name CLUSTER --addon-name kube-proxy --resolve-conflicts OVERWRITE";
const ADDON_MANAGER: &str = "the add-on manager of the cluster writes kube-proxy's DaemonSet again (label
addonmanager.kubernetes.io/mode: Reconcile), so a change of it does not last. Turn kube-proxy off in the settings
of the cluster, node pool by node pool if your provider can. If nobody manages the DaemonSet, pass --unmanaged.
Within 30 s after kube-proxy has ended on a node, the agent takes over.";
const NOT_FOUND: &str =
    "no kube-proxy was found: no DaemonSet (--kube-proxy), no static pod, no k3s and no RKE2. If it is a service
of the system, stop it on one node after the other: systemctl disable --now kube-proxy
Within 30 s after kube-proxy has ended, the agent takes over. Back: systemctl enable --now kube-proxy";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Applies a merge patch, as the API server does.
    fn merged(mut target: Value, patch: &Value) -> Value {
        let Value::Object(fields) = patch else { return patch.clone() };
        if !target.is_object() {
            target = json!({});
        }
        for (name, value) in fields {
            match value {
                Value::Null => drop(target.as_object_mut().unwrap().remove(name)),
                value => target[name] = merged(target[name].take(), value),
            }
        }
        target
    }

    #[test]
    fn the_affinity_of_others_stays_and_ours_goes_without_a_trace() {
        let linux = json!({ "key": "kubernetes.io/os", "operator": "In", "values": ["linux"] });
        let required = |terms: Value| json!({ "nodeAffinity": { REQUIRED: { "nodeSelectorTerms": terms } } });
        let preferred = json!({ "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [] } });
        for affinity in [
            Value::Null,
            preferred,
            json!({ "podAffinity": {} }),
            required(json!([{ "matchExpressions": [linux] }, { "matchFields": [{}] }])),
            json!({ "podAffinity": {}, "nodeAffinity": { REQUIRED: { "nodeSelectorTerms": [{ "matchExpressions": [linux] }] } } }),
        ] {
            let mut before = json!({ "metadata": { "resourceVersion": "7" }, "spec": { "template": { "spec": {} } } });
            if !affinity.is_null() {
                before["spec"]["template"]["spec"]["affinity"] = affinity;
            }
            assert!(!avoids(&before));
            let during = merged(before.clone(), &avoiding(&before, true));
            assert!(avoids(&during) && avoids(&merged(during.clone(), &avoiding(&during, true))), "{during}");
            let after = merged(during.clone(), &avoiding(&during, false));
            assert_eq!(after, before, "{during}");
        }
    }

    #[test]
    fn clusters_in_which_only_a_person_can_stop_kube_proxy_are_known() {
        let node = |version: &str| vec![json!({ "status": { "nodeInfo": { "kubeletVersion": version } } })];
        let plain = json!({ "metadata": { "name": "kube-proxy" } });
        let eks = json!({ "metadata": { "managedFields": [{ "manager": "eks" }] } });
        let addon = json!({ "metadata": { "labels": { "addonmanager.kubernetes.io/mode": "Reconcile" } } });
        let mirror =
            json!({ "metadata": { "name": "kube-proxy-a", "annotations": { "kubernetes.io/config.mirror": "x" } } });
        for (daemon_set, version, pod, expected) in [
            (Some(&plain), "v1.36.2", None, None),
            (Some(&eks), "v1.36.2-eks-1", None, Some(EKS)),
            (Some(&addon), "v1.36.2", None, Some(ADDON_MANAGER)),
            (None, "v1.36.2+k3s1", None, Some(K3S)),
            (None, "v1.36.2+rke2r1", Some(&mirror), Some(RKE2)),
            (None, "v1.36.2", Some(&mirror), Some(STATIC_POD)),
            (None, "v1.36.2", None, Some(NOT_FOUND)),
        ] {
            let pods: Vec<Value> = pod.into_iter().cloned().collect();
            assert_eq!(by_hand(daemon_set, &node(version), &pods), expected, "{version}");
        }
    }
}
