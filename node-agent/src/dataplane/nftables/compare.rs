//! Compares the kernel with what is programmed, set by set.

use std::time::{Duration, Instant};

use headgate_core::nftables::Ledger;
use nftables_netlink::{Nftables, NftablesError};

use super::{
    super::metrics::DataplaneMetrics,
    elements,
    layout::{Layout, LayoutConfig, picks::is_clients_map, table_name},
    read,
};

/// A comparison takes about this long, and the next one continues with the remaining parts.
const STEP: Duration = Duration::from_millis(50);

/// The parts that the comparison has still to visit.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    remaining: Vec<Part>,
}

#[derive(Debug)]
enum Part {
    /// Chains, rules, and the definitions of sets.
    Rules,
    /// The elements of a set.
    Elements(String),
    /// The number of recorded clients in a map of this size.
    Clients(String, u32),
}

/// What a comparison needs to know of a family.
#[derive(Debug, Clone, Copy)]
pub(super) struct Programmed<'a> {
    pub(super) config: &'a LayoutConfig,
    pub(super) layout: &'a Layout,
    pub(super) ledger: &'a Ledger,
    pub(super) metrics: &'a DataplaneMetrics,
}

impl Comparison {
    /// Compares the next parts, for a limited time. Returns a sentence for each difference.
    pub(super) fn next(
        &mut self,
        nftables: &mut Nftables,
        programmed: Programmed<'_>,
    ) -> Result<Vec<String>, NftablesError> {
        if self.remaining.is_empty() {
            self.remaining = parts(programmed.layout);
        }
        let started = Instant::now();
        let mut differences = Vec::new();
        while started.elapsed() < STEP
            && let Some(part) = self.remaining.pop()
        {
            differences.extend(compare(nftables, programmed, &part)?);
        }
        Ok(differences)
    }
}

/// Compares everything. Returns a sentence for each difference.
pub(super) fn everything(nftables: &mut Nftables, programmed: Programmed<'_>) -> Result<Vec<String>, NftablesError> {
    let mut differences = Vec::new();
    for part in parts(programmed.layout) {
        differences.extend(compare(nftables, programmed, &part)?);
    }
    Ok(differences)
}

fn parts(layout: &Layout) -> Vec<Part> {
    let sets = layout.sets.values().filter(|set| read::has_elements_of_services(set));
    let sets = sets.map(|set| Part::Elements(set.name.clone()));
    let clients = layout.sets.values().filter(|set| is_clients_map(&set.name));
    let clients = clients.map(|set| Part::Clients(set.name.clone(), set.size.unwrap_or_default()));
    sets.chain(clients).chain([Part::Rules]).collect()
}

fn compare(
    nftables: &mut Nftables,
    Programmed { config, layout, ledger, metrics }: Programmed<'_>,
    part: &Part,
) -> Result<Vec<String>, NftablesError> {
    let (family, table) = (config.family, table_name(config.family));
    match part {
        Part::Rules => match read::layout(nftables, family)? {
            None => Ok(vec![format!("the table {table} is missing")]),
            Some((found, foreign)) => {
                let own =
                    layout.differences(&found).into_iter().map(|what| format!("{what} of the table {table} differs"));
                Ok(foreign.into_iter().chain(own).collect())
            }
        },
        Part::Clients(map, size) => {
            let mut clients = 0;
            nftables.each_element(&table, map, |_| clients += 1)?;
            metrics.set_affinity(family, map, clients, *size);
            Ok(Vec::new())
        }
        Part::Elements(set) => {
            let listed = match read::elements_of(nftables, family, set) {
                Err(error) if error.refusal_code() == Some(libc::ENOENT) => {
                    return Ok(vec![format!("the set {set} of the table {table} is missing")]);
                }
                listed => listed?,
            };
            let named = |element: &_| elements::encode(element).key.to_string();
            let (mut is_wanted, mut differences) = (vec![false; listed.len()], Vec::new());
            for element in ledger.elements().filter(|element| elements::set_of(element) == *set) {
                match listed.binary_search(&Ok(element)) {
                    Ok(at) => is_wanted[at] = true,
                    Err(_) => differences.push(format!("the set {set} of the table {table} lacks {}", named(&element))),
                }
            }
            for (element, _) in listed.iter().zip(&is_wanted).filter(|(_, is_wanted)| !**is_wanted) {
                let named = match element {
                    Ok(element) => named(element),
                    Err(key) => key.to_string(),
                };
                differences.push(format!("the set {set} of the table {table} has a foreign element {named}"));
            }
            Ok(differences)
        }
    }
}
