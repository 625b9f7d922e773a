//! The dataplane of an agent in standby, while another service proxy works on the node. It plans
//! and writes nothing. It only reads the rules of the other proxy, to verify them.

use headgate_core::{Dirty, Family, NodeFacts, State, StateSource, forwarding};

use super::{
    DataplaneError, DualStack, ErrorKind,
    contract::{Dataplane, Finding, KernelHandle, Report, RulesDifferences, RulesVerification},
};

/// The name of the dataplane.
pub const NAME: &str = "standby";

/// Returns a dataplane that reads the rules of a proxy in this mode, and writes nothing. `None`:
/// the mode is not known.
pub fn dataplane(mode: Option<&str>) -> DualStack<StandbyFamily> {
    let rules = OtherRules { mode: mode.map(str::to_owned) };
    DualStack::assemble(NAME, rules, Vec::new(), Family::BOTH.into(), StandbyFamily)
}

/// Reads the rules of the other proxy.
#[derive(Debug)]
pub struct OtherRules {
    /// The mode of the other proxy, such as "iptables"; `None` if it is not known.
    mode: Option<String>,
}

impl OtherRules {
    /// Reads what the other proxy forwards in a family. Writes nothing, and makes the kernel load
    /// no module. Errors: the rules cannot be read, or nobody knows how.
    fn decode(&mut self, family: Family) -> Result<forwarding::Table, DataplaneError> {
        let mode = self.mode.as_deref().unwrap_or("an unknown mode");
        let text = format!("the rules of a service proxy in {mode} cannot be read for {family}");
        Err(DataplaneError::new(ErrorKind::Unavailable, text))
    }
}

impl KernelHandle for OtherRules {}

/// One IP family.
#[derive(Debug)]
pub struct StandbyFamily(Family);

impl Dataplane for StandbyFamily {
    type Kernel = OtherRules;
    type Plan = ();

    fn family(&self) -> Family {
        self.0
    }

    fn sync(&mut self, _: &mut OtherRules, _: &dyn StateSource) -> Result<Report, DataplaneError> {
        Ok(Report::default())
    }

    fn verification(&mut self, _: &mut OtherRules) -> Result<RulesVerification, DataplaneError> {
        Ok(Box::new(|_| RulesDifferences::default()))
    }

    fn plan(&mut self, _: &State, _: &NodeFacts, _: &Dirty) {}

    fn apply(&mut self, _: &mut OtherRules, (): ()) -> Result<Report, DataplaneError> {
        Ok(Report::default())
    }

    fn check(&mut self, _: &mut OtherRules) -> Result<Finding, DataplaneError> {
        Ok(Finding::Intact)
    }

    fn decode(&mut self, rules: &mut OtherRules) -> Result<forwarding::Table, DataplaneError> {
        rules.decode(self.0)
    }
}
