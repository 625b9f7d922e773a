//! Scenarios that run one after the other on one cluster, because most of the cost of a short
//! scenario is the start of its cluster.

use anyhow::{Result, ensure};

use super::{changes, live};
use crate::testbed::Testbed;

/// The name of a scenario, the rows of the checklist in `docs/behaviours.md` that it shows, and
/// what it does. The scenario needs a running cluster without Services. It may change manifests,
/// and nothing else that outlives it.
pub type Scenario = (&'static str, &'static [u8], fn(&Testbed) -> Result<()>);

/// The names of tests in `packets.rs`, each with its scenarios.
pub const TESTS: [(&str, &[Scenario]); 2] = [
    (
        "objects_change",
        &[
            ("type_switches", &[2, 15, 66], changes::type_switches),
            ("a_cluster_ip_belongs_to_its_service", &[114], changes::a_cluster_ip_belongs_to_its_service),
            ("labels_are_added_and_removed", &[3, 4], changes::labels_are_added_and_removed),
            ("ports_are_added_renamed_and_removed", &[6, 14], changes::ports_are_added_renamed_and_removed),
            ("further_service_range", &[44], changes::further_service_range),
            ("zone_changes", &[25, 26, 29], changes::zone_changes),
        ],
    ),
    (
        "services_change_in_use",
        &[
            ("weight_zero_keeps_connections", &[115], live::weight_zero_keeps_connections),
            ("rolling_replacement", &[15, 89, 104], live::rolling_replacement),
            ("udp_rolling_replacement", &[79, 83, 85], live::udp_rolling_replacement),
            (
                "services_are_added_changed_and_removed",
                &[14, 15, 20, 98, 104],
                live::services_are_added_changed_and_removed,
            ),
            ("scale_to_zero_and_back", &[40, 57, 104], live::scale_to_zero_and_back),
        ],
    ),
];

/// Runs all scenarios on a cluster, also if one of them fails. Each scenario begins without
/// Services.
///
/// # Errors
/// Some scenarios failed. The error names each of them.
pub fn in_turn(bed: &Testbed, scenarios: &[Scenario]) -> Result<()> {
    let mut failures = Vec::new();
    for (name, _, scenario) in scenarios {
        let emptied = bed.update(|manifests| {
            manifests.clear();
            Ok(())
        });
        if let Err(error) = emptied.and_then(|()| scenario(bed)) {
            failures.push(format!("{name}: {error:#}"));
        }
    }
    let (failed, all) = (failures.len(), scenarios.len());
    ensure!(failed == 0, "{failed} of {all} scenarios failed with {}:\n  {}", bed.backend(), failures.join("\n  "));
    Ok(())
}
