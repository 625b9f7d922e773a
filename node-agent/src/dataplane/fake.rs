//! A backend without a kernel, for tests of everything around backends.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use headgate_core::{Demand, Dirty, Family, ServiceKey, State, digest::Digests, view::NodeFacts};

use super::{DataplaneError, ErrorKind, NodeDataplane, Plan, Refused, Report, StateSource};

/// What was asked of a [`FakeDataplane`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A full sync of a state with these digests, on this node.
    Full(Digests, NodeFacts),
    /// A plan for these services (`namespace/name`), of a state with these digests, was applied.
    Apply(Vec<String>, Digests),
    /// These services, or all, were tried one by one.
    FindRefused(Option<Vec<String>>),
    /// The rules were verified.
    Verify,
    /// The rules were removed.
    Cleanup,
}

/// The test's side: what happened, and what is to happen. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct FakeControl(Arc<(Mutex<Script>, Condvar)>);

#[derive(Debug, Default)]
struct Script {
    calls: Vec<Call>,
    failures: VecDeque<DataplaneError>,
    verdicts: VecDeque<bool>,
    held: bool,
    degraded: Vec<String>,
    refused: BTreeSet<String>,
    aside: BTreeSet<String>,
    parts: Option<Vec<Refused>>,
    to_plan: BTreeSet<Arc<ServiceKey>>,
}

impl FakeControl {
    /// The calls that have ended, failed ones included, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.script().calls.clone()
    }

    /// Lets the next full sync or apply fail; called several times, the next several.
    pub fn fail_next(&self, error: DataplaneError) {
        self.script().failures.push_back(error);
    }

    /// Lets the next verification answer so; without it the answer is true.
    pub fn next_verdict(&self, intact: bool) {
        self.script().verdicts.push_back(intact);
    }

    /// From now on the backend says that it runs below what was asked for.
    pub fn degrade(&self, sentence: &str) {
        self.script().degraded.push(sentence.to_owned());
    }

    /// From now on the kernel refuses the rules of these services (`namespace/name`), and of no others.
    pub fn refuse(&self, services: &[&str]) {
        self.script().refused = services.iter().map(|service| (*service).to_owned()).collect();
    }

    /// Services that are set aside.
    #[must_use]
    pub fn aside(&self) -> Vec<String> {
        self.script().aside.iter().cloned().collect()
    }

    /// From now on the kernel refuses a part of these services, and takes the rest.
    pub fn refuse_parts(&self, parts: Vec<Refused>) {
        self.script().parts = Some(parts);
    }

    /// The backend asks for these services (`namespace`, `name`) to be planned, once.
    pub fn plan_again(&self, services: &[(&str, &str)]) {
        let keys = services.iter().map(|(namespace, name)| Arc::new(ServiceKey::new(namespace, name)));
        self.script().to_plan = keys.collect();
    }

    /// While set, the kernel's work does not end.
    pub fn hold(&self, held: bool) {
        self.script().held = held;
        self.0.1.notify_all();
    }

    /// Waits until `enough` is true of the calls; false after `guard`.
    #[must_use]
    pub fn wait_for(&self, guard: Duration, enough: impl Fn(&[Call]) -> bool) -> bool {
        let script = self.script();
        let waited = self.0.1.wait_timeout_while(script, guard, |script| !enough(&script.calls));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails when it is about services that the kernel refuses and that are not set aside.
    fn write(&self, call: Call, services: &[String]) -> Result<(), DataplaneError> {
        self.work(call)?;
        let script = self.script();
        match services.iter().find(|service| script.refused.contains(*service) && !script.aside.contains(*service)) {
            Some(_) => Err(DataplaneError::new(ErrorKind::Refused, "line 3 failed")),
            None => Ok(()),
        }
    }

    fn work(&self, call: Call) -> Result<(), DataplaneError> {
        let script = self.0.1.wait_while(self.script(), |script| script.held);
        let mut script = script.unwrap_or_else(PoisonError::into_inner);
        script.calls.push(call);
        self.0.1.notify_all();
        script.failures.pop_front().map_or(Ok(()), Err)
    }
}

/// Records what is asked of it.
#[derive(Debug, Default)]
pub struct FakeDataplane {
    control: FakeControl,
}

impl FakeDataplane {
    /// A backend and its control.
    #[must_use]
    pub fn new() -> (Self, FakeControl) {
        let control = FakeControl::default();
        (Self { control: control.clone() }, control)
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl NodeDataplane for FakeDataplane {
    fn name(&self) -> &str {
        "fake"
    }

    fn degraded(&self, _: &Demand) -> Vec<String> {
        self.control.script().degraded.clone()
    }

    fn sync_full_from(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let (mut call, mut planned, mut services) = (None, 0, Vec::new());
        source.look(&mut |state, node| {
            call = Some(Call::Full(state.digests().clone(), node.clone()));
            planned = count(state.service_count());
            services = state.entries().map(|(key, _)| key.to_string()).collect();
        });
        call.map_or(Ok(()), |call| self.control.write(call, &services))?;
        Ok(Report { services_planned: planned, objects_written: planned, warnings: Vec::new() })
    }

    fn plan(&mut self, state: &State, _node: &NodeFacts, dirty: &Dirty) -> Plan {
        let services: Vec<String> = dirty.services.iter().map(ToString::to_string).collect();
        Box::new(Call::Apply(services, state.digests().clone()))
    }

    fn apply(&mut self, plan: Plan) -> Result<Report, DataplaneError> {
        let Ok(call) = plan.downcast::<Call>() else { return Ok(Report::default()) };
        let Call::Apply(services, _) = &*call else { return Ok(Report::default()) };
        let (planned, services) = (count(services.len()), services.clone());
        self.control.write(*call, &services)?;
        Ok(Report { services_planned: planned, objects_written: planned, warnings: Vec::new() })
    }

    fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        _families: &[Family],
    ) -> Result<Vec<Refused>, DataplaneError> {
        let named = suspects.map(|suspects| suspects.iter().map(ToString::to_string).collect());
        self.control.work(Call::FindRefused(named))?;
        let mut tried: Vec<Arc<ServiceKey>> = Vec::new();
        source.look(&mut |state, _| {
            let is_tried = |key: &Arc<ServiceKey>| suspects.is_none_or(|suspects| suspects.contains(key));
            tried = state.entries().map(|(key, _)| Arc::clone(key)).filter(is_tried).collect();
        });
        let script = self.control.script();
        let refused = tried.into_iter().filter(|key| script.refused.contains(&key.to_string()));
        let reason = || "line 3 failed: no such match".to_owned();
        Ok(refused.map(|service| Refused { service, family: Family::V4, reason: reason() }).collect())
    }

    fn set_aside(&mut self, refused: &[Refused]) {
        self.control.script().aside = refused.iter().map(|refused| refused.service.to_string()).collect();
    }

    fn refused_parts(&mut self) -> Option<Vec<Refused>> {
        self.control.script().parts.take()
    }

    fn services_to_plan(&mut self) -> BTreeSet<Arc<ServiceKey>> {
        std::mem::take(&mut self.control.script().to_plan)
    }

    fn verify(&mut self) -> Result<bool, DataplaneError> {
        self.control.work(Call::Verify)?;
        Ok(self.control.script().verdicts.pop_front().unwrap_or(true))
    }

    fn cleanup(&mut self) -> Result<(), DataplaneError> {
        self.control.work(Call::Cleanup)
    }
}
