//! Whether a pod waits only for the readiness gate of Headgate (KEP-580, "Pod Readiness Gates").

use super::{Pod, PodCondition};

/// The type of the readiness gate, and of the condition that Headgate sets.
pub const GATE: &str = "headgate.io/programmed";

/// The reason that the kubelet gives in the condition `Ready` while the containers are ready, and a
/// readiness gate is not true (`k8s.io/kubernetes` `pkg/kubelet/status/generate.go`).
const GATES_NOT_READY: &str = "ReadinessGatesNotReady";

/// What a pod with the gate needs to become ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateState {
    /// The condition of the gate is not true, and everything else is.
    Waiting,
    /// The condition of the gate is true, and the kubelet has not set `Ready` yet.
    Programmed,
    /// The pod is ready.
    Ready,
    /// The pod is not ready for another reason, or it is being deleted.
    Unready,
}

impl Pod {
    /// Whether the pod has the gate. The gates of a pod never change.
    #[must_use]
    pub fn has_gate(&self) -> bool {
        self.spec.readiness_gates.iter().any(|gate| gate.condition_type == GATE)
    }

    /// What the pod needs to become ready; `None` without the gate.
    #[must_use]
    pub fn gate_state(&self) -> Option<GateState> {
        if !self.has_gate() {
            return None;
        }
        let is_true = |name: &str| self.condition(name).is_some_and(|condition| condition.status == "True");
        let mut others = self.spec.readiness_gates.iter().filter(|gate| gate.condition_type != GATE);
        let is_held_back = !is_true("ContainersReady") || !others.all(|gate| is_true(&gate.condition_type));
        if is_held_back || !self.metadata.deletion_timestamp.is_empty() {
            return Some(GateState::Unready);
        }
        let waits_for_gates = self.condition("Ready").is_none_or(|ready| ready.reason == GATES_NOT_READY);
        Some(match (is_true(GATE), is_true("Ready")) {
            (false, _) => GateState::Waiting,
            (true, true) => GateState::Ready,
            (true, false) if waits_for_gates => GateState::Programmed,
            // Something else has made the pod unready, such as the loss of its node.
            (true, false) => GateState::Unready,
        })
    }

    fn condition(&self, name: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.condition_type == name)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    /// A pod with gates, and with conditions that are written `TYPE=STATUS` or
    /// `TYPE=STATUS/REASON`.
    fn state(gates: &[&str], conditions: &[&str]) -> Option<GateState> {
        let gates: Vec<_> = gates.iter().map(|gate| json!({"conditionType": gate})).collect();
        let condition = |text: &&str| {
            let (name, rest) = text.split_once('=').unwrap();
            let (status, reason) = rest.split_once('/').unwrap_or((rest, ""));
            json!({"type": name, "status": status, "reason": reason})
        };
        let conditions: Vec<_> = conditions.iter().map(condition).collect();
        let pod = json!({"spec": {"readinessGates": gates}, "status": {"conditions": conditions}});
        serde_json::from_value::<Pod>(pod).unwrap().gate_state()
    }

    #[test]
    fn only_a_pod_that_lacks_nothing_but_the_gate_waits() {
        const OURS: &str = "headgate.io/programmed";
        const NOT_YET: &str = "Ready=False/ReadinessGatesNotReady";
        use GateState::{Programmed, Ready, Unready, Waiting};
        let table: &[(&[&str], &[&str], Option<GateState>)] = &[
            (&[], &["ContainersReady=True", "Ready=True"], None),
            (&["other"], &["ContainersReady=True"], None),
            (&[OURS], &[], Some(Unready)),
            (&[OURS], &["ContainersReady=False"], Some(Unready)),
            (&[OURS], &["ContainersReady=True"], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", NOT_YET], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=False"], Some(Waiting)),
            (&[OURS, "other"], &["ContainersReady=True", NOT_YET], Some(Unready)),
            (&[OURS, "other"], &["ContainersReady=True", "other=Unknown"], Some(Unready)),
            (&[OURS, "other"], &["ContainersReady=True", "other=True"], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", NOT_YET], Some(Programmed)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", "Ready=True"], Some(Ready)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", "Ready=False"], Some(Unready)),
            (&[OURS], &["ContainersReady=False", "headgate.io/programmed=True", NOT_YET], Some(Unready)),
        ];
        for (gates, conditions, expected) in table {
            assert_eq!(state(gates, conditions), *expected, "{gates:?} {conditions:?}");
        }
    }

    #[test]
    fn a_pod_that_is_deleted_does_not_wait() {
        let pod = json!({
            "metadata": {"deletionTimestamp": "2024-01-01T00:00:00Z"},
            "spec": {"readinessGates": [{"conditionType": GATE}]},
            "status": {"conditions": [{"type": "ContainersReady", "status": "True"}]},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(pod.gate_state(), Some(GateState::Unready));
    }
}
