//! Reads the counters of Services from the kernel.

use std::{
    collections::{BTreeMap, HashMap},
    ops::AddAssign,
    sync::Arc,
};

use headgate_core::{
    Family, ServiceKey,
    frontends::Frontend,
    nftables::{Counted, Element},
};
use nftables_netlink::{Expression, Nftables, NftablesError};

use super::{
    elements::{counter_sets, decode},
    layout::table_name,
};
use crate::state::AgentState;

/// What the kernel has counted for a frontend or a Service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were sent to an endpoint.
    pub connections: u64,
    /// Packets of these connections, in both directions. Packets that the network interface or the
    /// kernel merged count as one packet.
    pub packets: u64,
    /// Bytes of these packets, with the IP header.
    pub bytes: u64,
}

impl Counts {
    /// Returns the sum over frontends.
    pub fn sum(frontends: &[(Frontend, Self)]) -> Self {
        let mut sum = Self::default();
        frontends.iter().for_each(|(_, counts)| sum += *counts);
        sum
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

/// Reads the counters of this node's Services on demand.
#[derive(Debug)]
pub struct ServiceCounters {
    state: Arc<AgentState>,
}

impl ServiceCounters {
    /// Returns a reader. `state` names the Service that owns a frontend.
    pub fn new(state: Arc<AgentState>) -> Self {
        Self { state }
    }

    /// Lists the counters of all frontends, by Service. The cost grows with the number of
    /// frontends, and the call blocks: some 10 ms for 10,000 Services.
    /// Errors: the kernel cannot be read. Try again later.
    pub fn read(&self) -> Result<BTreeMap<ServiceKey, Vec<(Frontend, Counts)>>, NftablesError> {
        let frontends = read_counters()?;
        let mut services: BTreeMap<ServiceKey, Vec<(Frontend, Counts)>> = BTreeMap::new();
        self.state.with_state(|state| {
            for (frontend, counts) in frontends {
                if let Some(owner) = state.frontends().owner(&frontend) {
                    services.entry(owner.clone()).or_default().push((frontend, counts));
                }
            }
        });
        services.values_mut().for_each(|frontends| frontends.sort_unstable_by_key(|(frontend, _)| *frontend));
        Ok(services)
    }
}

/// Lists the counters of all frontends in the network namespace of the calling thread.
/// Errors: the kernel cannot be read. Try again later.
pub fn read_counters() -> Result<HashMap<Frontend, Counts>, NftablesError> {
    let mut nftables = Nftables::open()?;
    let mut frontends = HashMap::new();
    for family in Family::BOTH {
        read(&mut nftables, family, &mut frontends)?;
    }
    Ok(frontends)
}

fn read(
    nftables: &mut Nftables,
    family: Family,
    frontends: &mut HashMap<Frontend, Counts>,
) -> Result<(), NftablesError> {
    for set in counter_sets() {
        let listed = match nftables.elements(&table_name(family), &set) {
            // The table does not exist before the first sync, or on a node without this family.
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => continue,
            listed => listed?,
        };
        for element in listed {
            let decoded = decode(family, &set, &element);
            let (Some(Element::Counter(frontend, counted)), [Expression::Counter { packets, bytes }]) =
                (decoded, &element.expressions[..])
            else {
                continue;
            };
            let counts = frontends.entry(frontend).or_default();
            match counted {
                Counted::Connections => counts.connections = *packets,
                Counted::Traffic => (counts.packets, counts.bytes) = (*packets, *bytes),
            }
        }
    }
    Ok(())
}
