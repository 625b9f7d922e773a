//! Cuts a large plan into several transactions, so that other plans can be executed between them.

use std::collections::{HashSet, VecDeque};

use super::{
    element::{Element, ElementKey},
    ledger::NftablesPlan,
};
use crate::state::frontends::Frontend;

/// When a change is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CutPhase {
    /// Slots that no frontend leads to yet, and slots that get another endpoint.
    First,
    /// Frontends, which lead to complete groups before and after their change.
    Then(Option<Frontend>),
    /// Slots that no frontend leads to any more.
    Last,
}

impl NftablesPlan {
    /// Cuts a plan of changed services into plans of at most `most` changes, to execute in order.
    /// After each of them, every frontend leads to a group all of whose slots are filled. The first
    /// plan has the shape. The changes of one frontend, and those of one key, stay together. A plan
    /// that is not larger stays as it is, and so does a plan that adds everything.
    #[must_use]
    pub fn cut(mut self, most: usize) -> VecDeque<Self> {
        if self.adds_everything || self.delete.len() + self.add.len() <= most {
            return [self].into();
        }
        let replaced: HashSet<ElementKey> = self.add.iter().map(Element::key).collect();
        let phase = |is_added: bool, element: &Element| match element {
            // A client would be refused while its Service has no port.
            Element::ClusterIp(_) => CutPhase::Last,
            _ if element.frontend().is_some() => CutPhase::Then(element.frontend()),
            _ if is_added || replaced.contains(&element.key()) => CutPhase::First,
            _ => CutPhase::Last,
        };
        let deleted = std::mem::take(&mut self.delete).into_iter().map(|element| (false, element));
        let added = std::mem::take(&mut self.add).into_iter().map(|element| (true, element));
        let changes = deleted.chain(added).map(|(is_added, element)| (phase(is_added, &element), is_added, element));
        let mut changes: Vec<(CutPhase, bool, Element)> = changes.collect();
        changes.sort_unstable_by_key(|(phase, _, element)| (*phase, element.key()));
        let (mut parts, mut size) = (VecDeque::from([self]), 0);
        for together in changes.chunk_by(|(phase, _, one), (next, _, other)| {
            phase == next && (matches!(phase, CutPhase::Then(_)) || one.key() == other.key())
        }) {
            if size > 0 && size + together.len() > most {
                parts.push_back(Self::default());
                size = 0;
            }
            size += together.len();
            let Some(part) = parts.back_mut() else { break };
            for (_, is_added, element) in together {
                if *is_added { part.add.push(*element) } else { part.delete.push(*element) }
            }
        }
        parts
    }

    /// The keys that the plan changes. Plans that change the same key must be executed in order.
    pub fn keys(&self) -> impl Iterator<Item = ElementKey> {
        self.delete.iter().chain(&self.add).map(Element::key)
    }
}
