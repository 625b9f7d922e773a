//! Writes the endpoints of a first sync in several transactions.
//!
//! The kernel takes a transaction in one piece. A transaction with all endpoints of a large cluster
//! needs much memory, both in the agent and in the kernel. No packet reaches the endpoints of a
//! group until a frontend leads to the group, so the endpoints can be written first.

use headgate_core::nftables::{Element, NftablesPlan};
use nftables_netlink::Transaction;

use super::{super::DataplaneError, Connection, NftablesFamily, elements, layout::table_name};

/// The number of elements in a transaction. They have about half a megabyte on the wire, and take
/// about 30 ms.
pub(super) const PART: usize = 8192;

impl NftablesFamily {
    /// Writes endpoints of a plan for a table without elements, as long as they fill a transaction.
    /// Returns the number of these endpoints. Writes nothing for other plans.
    pub(super) fn write_endpoints(
        &mut self,
        kernel: &mut Connection,
        plan: &NftablesPlan,
    ) -> Result<usize, DataplaneError> {
        let (family, mut written) = (self.layout_config.family, 0);
        let table = table_name(family);
        if !plan.adds_everything {
            return Ok(written);
        }
        let failed = {
            let mut endpoints = self.ledger.elements().filter(is_endpoint);
            loop {
                let part: Vec<Element> = endpoints.by_ref().take(PART).collect();
                if part.len() < PART {
                    break None;
                }
                let mut transaction = Transaction::new();
                transaction.add_table(&kernel.table(family));
                elements::fixed_sets(&table, family).iter().for_each(|set| transaction.add_set(set));
                elements::write(&[], part.into_iter(), &table, &mut transaction);
                if let Err(error) = kernel.commit(family, &transaction) {
                    break Some((transaction, error));
                }
                written += PART;
            }
        };
        if let Some((transaction, error)) = failed {
            return Err(self.explain(&transaction, true, &error));
        }
        Ok(written)
    }
}

/// Returns the elements without the first endpoints, which [`NftablesFamily::write_endpoints`] has
/// written.
pub(super) fn after(written: usize, elements: impl Iterator<Item = Element>) -> impl Iterator<Item = Element> {
    let mut to_skip = written;
    elements.filter(move |element| {
        let is_written = to_skip > 0 && is_endpoint(element);
        to_skip -= usize::from(is_written);
        !is_written
    })
}

fn is_endpoint(element: &Element) -> bool {
    matches!(element, Element::Endpoint(..) | Element::AffinityEndpoint(..) | Element::Member(..))
}
