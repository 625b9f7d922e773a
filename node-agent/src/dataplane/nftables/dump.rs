//! Reads a table for the decoder, which does not use the ledger or the renderers.

use std::collections::{BTreeMap, HashMap};

use headgate_oracle::nftables::{DumpedChain, DumpedSet, NftablesDump, pack};
use nftables_netlink::{ElementData, Nftables, NftablesError, SetData, TableName};

/// Reads a table. The result is `None` if the table does not exist. Does not read the elements that
/// packets add. Errors: the errors of `kernel`.
pub(in crate::dataplane) fn read(
    kernel: &mut Nftables,
    name: &TableName,
) -> Result<Option<NftablesDump>, NftablesError> {
    let listed = kernel.chains(name)?.into_iter();
    let chains = listed.map(|chain| (chain.object.name, DumpedChain { base: chain.object.base, rules: Vec::new() }));
    let mut chains: BTreeMap<String, DumpedChain> = chains.collect();
    if chains.is_empty() {
        return Ok(None);
    }
    for rule in kernel.rules(name, None)? {
        chains.entry(rule.object.chain).or_default().rules.push(rule.object.expressions);
    }
    let mut sets = HashMap::new();
    for set in kernel.sets(name)? {
        let set = set.object;
        let mut dumped = DumpedSet::new(&set);
        if set.data == Some(SetData::Verdicts) {
            let elements = kernel.elements(name, &set.name)?.into_iter();
            let verdicts = elements.filter_map(|element| match element.data {
                Some(ElementData::Verdict(verdict)) => Some((element.key.0, verdict)),
                _ => None,
            });
            dumped.verdicts = verdicts.collect();
        } else if dumped.has_ranges_of_addresses() {
            dumped.set_ranges(kernel.elements(name, &set.name)?);
        } else if !dumped.is_recorded {
            dumped.elements = kernel.elements_as(name, &set.name, pack)?;
        }
        sets.insert(set.name, dumped);
    }
    Ok(Some(NftablesDump { name: name.clone(), chains, sets }))
}
