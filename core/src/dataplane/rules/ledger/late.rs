//! Rules of services' chains that are rendered while a full script is written; see
//! [`Writing`](super::Writing).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::super::{Ledger, RulesHash, Script, names::ChainName, script};
use crate::{model::ServiceKey, node_facts::NodeFacts, state::State};

/// A service whose chains differ from what a script foresaw, since the state changed while it was
/// written.
#[derive(Debug)]
pub struct LateChange {
    key: Arc<ServiceKey>,
    chains: Box<[(ChainName, RulesHash)]>,
}

impl Ledger {
    /// Writes what a script left for later: the chains of these services, with their present rules.
    /// The state may have changed since the script was made; the next step plans these changes once
    /// more. `changed` gets the services whose chains differ from what was planned.
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
            // A chain that is not wanted any more is there all the same: empty if the script
            // declares it, as it was if not.
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
            // What the script declares without its being planned, it deletes. A service that wants
            // such a chain now has to wait for the next step.
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

    /// Records what the kernel has by [`Self::write_late`] instead of what was planned.
    pub fn note_late(&mut self, changed: Vec<LateChange>) {
        for LateChange { key, chains } in changed {
            self.programmed.entry(key).or_default().chains = chains;
        }
    }
}
