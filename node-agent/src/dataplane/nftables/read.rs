//! Reads a table from the kernel.

use headgate_core::{
    Family,
    nftables::{Element, Shape},
};
use nftables_netlink::{ElementData, Nftables, NftablesError, Rule, Set, SetData, Value};

use super::{
    FoundTable,
    elements::{self, is_filled_by_proxy},
    layout::{ChainContent, Layout, RuleContent, picks::pick_of_chain, table_name},
};

/// Reads everything of a family. A table counts as foreign if this agent wants to own it and
/// cannot, or does not want to own it and it has the flag of persistent tables.
pub(super) fn everything(
    nftables: &mut Nftables,
    family: Family,
    owns_tables: bool,
) -> Result<FoundTable, NftablesError> {
    let name = table_name(family);
    let mut found = FoundTable::default();
    let Some(table) = nftables.table(&name)? else { return Ok(found) };
    found.has_table = true;
    let Some((layout, foreign)) = layout(nftables, family)? else { return Ok(FoundTable::default()) };
    found.layout = layout;
    found.is_foreign = table.object.persistent != owns_tables || !foreign.is_empty();
    for set in found.layout.sets.values().filter(|set| has_elements_of_services(set)) {
        for element in elements_of(nftables, family, &set.name)? {
            match element {
                Ok(element) => found.existing.elements.push(element),
                Err(_) => found.is_foreign = true,
            }
        }
    }
    found.existing.shape = shape(&found);
    Ok(found)
}

/// Whether the elements of a set come from Services. Rules fill the maps of clients, whose elements
/// have timeouts. A proxy fills the gate and its redirects. Verdicts and addresses of the node
/// belong to the layout.
pub(super) fn has_elements_of_services(set: &Set) -> bool {
    !set.flags.timeout && !is_filled_by_proxy(&set.name) && !has_elements_of_layout(set)
}

fn has_elements_of_layout(set: &Set) -> bool {
    set.data == Some(SetData::Verdicts) || elements::has_node_addresses(&set.name)
}

/// The elements of a set, sorted. `Err` is the key of an element that this agent never writes.
pub(super) fn elements_of(
    nftables: &mut Nftables,
    family: Family,
    set: &str,
) -> Result<Vec<Result<Element, Value>>, NftablesError> {
    nftables.elements_as(&table_name(family), set, |element| elements::decode(family, set, &element).ok_or(element.key))
}

/// Reads the layout of a table, or `None` if the table does not exist. Also returns a sentence for
/// each object that cannot be part of a layout.
pub(super) fn layout(nftables: &mut Nftables, family: Family) -> Result<Option<(Layout, Vec<String>)>, NftablesError> {
    let name = table_name(family);
    if nftables.table(&name)?.is_none() {
        return Ok(None);
    }
    let (mut layout, mut foreign) = (Layout::default(), Vec::new());
    for chain in nftables.chains(&name)? {
        let base = chain.object.base;
        layout.chains.insert(chain.object.name, ChainContent { base, rules: Vec::new() });
    }
    for rule in nftables.rules(&name, None)? {
        let Rule { chain, expressions, user_data, .. } = rule.object;
        match layout.chains.get_mut(&chain) {
            Some(content) => content.rules.push(RuleContent { expressions, user_data }),
            None => foreign.push(format!("a rule of the table {name} is in an unknown chain {chain}")),
        }
    }
    for set in nftables.sets(&name)? {
        let set = set.object;
        if has_elements_of_layout(&set) {
            for element in nftables.elements(&name, &set.name)? {
                let verdict = match element.data {
                    Some(ElementData::Verdict(verdict)) => Some(verdict),
                    None => None,
                    Some(ElementData::Value(_)) => {
                        foreign.push(format!("the set {} of the table {name} has an element with a value", set.name));
                        continue;
                    }
                };
                layout.elements.insert((set.name.clone(), element.key), verdict);
            }
        }
        layout.sets.insert(set.name.clone(), set);
    }
    Ok(Some((layout, foreign)))
}

/// Returns the shape that the found layout was made for, without the ranges of ClusterIPs. The
/// comparison of all rules detects other ranges.
fn shape(found: &FoundTable) -> Shape {
    let lengths = found.layout.sets.keys().filter_map(|name| name.strip_prefix(elements::names::ADMITTED));
    Shape {
        picks: found.layout.chains.keys().filter_map(|name| pick_of_chain(name)).collect(),
        prefix_lengths: lengths.filter_map(|length| length.parse().ok()).collect(),
        ..Shape::default()
    }
}
