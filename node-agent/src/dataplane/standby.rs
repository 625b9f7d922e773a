//! The dataplane of an agent in standby, while another service proxy works on the node. It plans
//! and writes nothing. It only reads the rules of the other proxy, to verify them.

use headgate_core::{Dirty, Family, NodeFacts, State, StateSource, forwarding, view::LocalDetector};

use super::{
    DataplaneError, DualStack,
    contract::{Dataplane, Finding, KernelHandle, Report, RulesDifferences, RulesVerification},
    other_rules::OtherRules,
};
use crate::node_inputs::NodeInputs;

/// The name of the dataplane.
pub const NAME: &str = "standby";

/// Returns a dataplane that reads the rules of the other proxy, and writes nothing.
pub fn dataplane() -> DualStack<StandbyFamily> {
    DualStack::assemble(NAME, OtherRules::default(), Vec::new(), Family::BOTH.into(), |family| StandbyFamily {
        family,
        detector: None,
    })
}

impl KernelHandle for OtherRules {}

/// One IP family.
#[derive(Debug)]
pub struct StandbyFamily {
    family: Family,
    detector: Option<LocalDetector>,
}

impl Dataplane for StandbyFamily {
    type Kernel = OtherRules;
    type Plan = ();

    fn family(&self) -> Family {
        self.family
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        self.detector = inputs.detector(self.family).cloned();
        false
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
        rules.decode(self.family, self.detector.as_ref())
    }
}
