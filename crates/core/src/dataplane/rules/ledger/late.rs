//! Late rendering: the rules of services' chains are rendered while a full script is written. See
//! [`Writing`](super::Writing).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::super::{Ledger, RulesHash, Script, names::ChainName, script};
use crate::{model::ServiceKey, node_facts::NodeFacts, state::State};

/// A service whose written chains differ from the planned chains, because the state changed while
/// the script was written.
#[derive(Debug)]
pub struct LateChange {
    key: Arc<ServiceKey>,
    chains: Box<[(ChainName, RulesHash)]>,
}

impl Ledger {
    /// Renders the chains of these services, which `script` does not contain, and appends them to
    /// `text`. The rules are rendered from the present state, which may have changed since the
    /// script was planned. Services whose chains differ from the plan are added to `changed`. The
    /// next step plans these changes again.
    pub fn write_late(
        &self,
        state: &State,
        node: &NodeFacts,
        script: &Script,
        services: &[Arc<ServiceKey>],
        text: &mut String,
        changed: &mut Vec<LateChange>,
    ) {
        let (mut declarations, mut body) = (BTreeSet::new(), String::new());
        for key in services {
            let programmed = self.programmed.get(key).map(|programmed| &*programmed.chains).unwrap_or_default();
            // The kernel also has planned chains that are no longer wanted. Such chains are empty
            // if the script declares them. Otherwise they have the recorded rules.
            let mut chains: BTreeMap<ChainName, RulesHash> = programmed.iter().copied().collect();
            for (name, hash) in &mut chains {
                if script.declares_late(*name) {
                    declarations.insert(script::declaration(name));
                }
                if script.declares(*name) || script.declares_late(*name) {
                    *hash = RulesHash::default();
                }
            }
            let mut rendered = self.render(state, node, key).chains;
            // The script deletes each chain that it declares and for which no rules were planned.
            // If the service now wants such a chain, the next step writes all of its chains.
            if rendered.iter().any(|chain| script.declares(chain.name) && !chains.contains_key(&chain.name)) {
                rendered.clear();
            }
            for chain in rendered {
                let hash = RulesHash::of(&chain.rules);
                let is_declared = script.declares(chain.name) || script.declares_late(chain.name);
                if !is_declared && chains.get(&chain.name) == Some(&hash) {
                    continue;
                }
                if !is_declared {
                    declarations.insert(script::declaration(&chain.name));
                }
                body.push_str(&chain.rules);
                chains.insert(chain.name, hash);
            }
            let is_as_planned = chains.len() == programmed.len()
                && programmed.iter().all(|(name, hash)| chains.get(name) == Some(hash));
            if !is_as_planned {
                changed.push(LateChange { key: Arc::clone(key), chains: chains.into_iter().collect() });
            }
        }
        declarations.iter().rev().for_each(|declaration| text.push_str(declaration));
        text.push_str(&body);
    }

    /// Records the chains that [`Self::write_late`] wrote, where they differ from the plan.
    pub fn note_late(&mut self, changed: Vec<LateChange>) {
        for LateChange { key, chains } in changed {
            self.programmed.entry(key).or_default().chains = chains;
        }
    }
}
