//! A kernel in memory for tests, with IPVS, ipset, a dummy device and iptables. This kernel is as
//! strict as a real kernel: it does not add an object that exists, it does not change or remove an
//! object that does not exist, it accepts only loaded schedulers, and it does not destroy a set
//! that a rule refers to. In one point this kernel is stricter: it does not remove a virtual server
//! with destinations, because the removal would break connections.
// Each program of tests uses some of the functions.
#![allow(dead_code)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use headgate_core::{
    Family,
    iptables::{ExistingTables, RulesTable},
    ipvs::{
        ExistingObjects, IpSetElement, IpvsConfig, IpvsPlan, Op, Scheduler, ServerKey, Set, Settings,
        existing::ExistingServer,
    },
};

use super::iptables::FakeKernel as FakeIptables;

/// One family of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FakeKernel {
    family: Family,
    schedulers: BTreeSet<Scheduler>,
    /// The sets with their elements.
    pub(crate) sets: BTreeMap<Set, BTreeSet<IpSetElement>>,
    /// Addresses of the device.
    pub(crate) device_addresses: BTreeSet<IpAddr>,
    /// Virtual servers.
    pub(crate) servers: BTreeMap<ServerKey, (Settings, BTreeMap<SocketAddr, u32>)>,
    /// iptables.
    pub(crate) iptables: FakeIptables,
}

impl FakeKernel {
    /// Creates an empty kernel with the schedulers that are available in the configuration.
    #[must_use]
    pub(crate) fn new(config: &IpvsConfig) -> Self {
        Self {
            family: config.family,
            schedulers: config.available_schedulers.clone(),
            sets: BTreeMap::new(),
            device_addresses: BTreeSet::new(),
            servers: BTreeMap::new(),
            iptables: FakeIptables::default(),
        }
    }

    /// Carries out a plan.
    ///
    /// # Errors
    /// Returns the operation that the kernel rejected and the reason. Earlier operations stay in
    /// effect.
    pub(crate) fn apply(&mut self, plan: &IpvsPlan) -> Result<(), String> {
        for op in &plan.before {
            self.step(*op).map_err(|what| format!("{what}: {op:?}"))?;
        }
        let script = plan.script.to_string();
        for rule in script.lines().filter(|line| line.starts_with("-A ") || line.starts_with("-I ")) {
            for name in referred_sets(rule) {
                let set = Set::ALL.into_iter().find(|set| set.name(self.family) == name);
                let set = set.ok_or_else(|| format!("not a set of Headgate: `{rule}`"))?;
                self.sets.get(&set).ok_or_else(|| format!("set does not exist: `{rule}`"))?;
            }
        }
        self.iptables.restore(&script)?;
        for op in &plan.after {
            self.step(*op).map_err(|what| format!("{what}: {op:?}"))?;
        }
        Ok(())
    }

    /// Carries out a plan as the agent does: an operation succeeds if the object already has the
    /// state that the operation would produce, and a rejected operation does not prevent the
    /// others. The kernel rejects the operations for which `rejects` returns true, but never
    /// removals. Returns the rejected operations.
    ///
    /// # Errors
    /// Returns an operation or a rule that fails for another reason, and that reason.
    pub(crate) fn apply_rejecting(
        &mut self,
        plan: &IpvsPlan,
        rejects: impl Fn(&Op) -> bool,
    ) -> Result<Vec<Op>, String> {
        let mut rejected = Vec::new();
        for op in &plan.before {
            rejected.extend(self.carry_out(*op, &rejects)?);
        }
        self.apply(&IpvsPlan { script: plan.script.clone(), ..IpvsPlan::default() })?;
        for op in &plan.after {
            rejected.extend(self.carry_out(*op, &rejects)?);
        }
        Ok(rejected)
    }

    fn carry_out(&mut self, op: Op, rejects: impl Fn(&Op) -> bool) -> Result<Option<Op>, String> {
        let has_server = |key: &ServerKey| self.servers.contains_key(key);
        let weight = |key: &ServerKey, address: &SocketAddr| self.servers.get(key)?.1.get(address).copied();
        let has_element =
            |set: &Set, element: &IpSetElement| self.sets.get(set).is_some_and(|set| set.contains(element));
        let instead = match op {
            Op::DeleteElement(set, element) if !has_element(&set, &element) => return Ok(None),
            Op::DeleteAddress(address) if !self.device_addresses.contains(&address) => return Ok(None),
            Op::DeleteServer(key) if !has_server(&key) => return Ok(None),
            Op::DeleteDestination(key, address) | Op::EditDestination(key, address, 0)
                if weight(&key, &address).is_none() =>
            {
                return Ok(None);
            }
            _ if op.object().is_some() && rejects(&op) => return Ok(Some(op)),
            Op::AddElement(set, element) if has_element(&set, &element) => return Ok(None),
            Op::AddAddress(address) if self.device_addresses.contains(&address) => return Ok(None),
            Op::AddServer(_, settings) | Op::EditServer(_, settings) if self.check(settings).is_err() => {
                return Ok(Some(op));
            }
            Op::AddServer(key, settings) if has_server(&key) => Op::EditServer(key, settings),
            Op::EditServer(key, settings) if !has_server(&key) => Op::AddServer(key, settings),
            Op::AddDestination(key, ..) | Op::EditDestination(key, ..) if !has_server(&key) => return Ok(Some(op)),
            Op::AddDestination(key, address, to) if weight(&key, &address).is_some() => {
                Op::EditDestination(key, address, to)
            }
            Op::EditDestination(key, address, to) if weight(&key, &address).is_none() => {
                Op::AddDestination(key, address, to)
            }
            op => op,
        };
        self.step(instead).map_err(|what| format!("{what}: {op:?}"))?;
        Ok(None)
    }

    /// Loads or unloads a scheduler.
    pub(crate) fn set_scheduler(&mut self, scheduler: Scheduler, is_loaded: bool) {
        if is_loaded {
            self.schedulers.insert(scheduler);
        } else {
            self.schedulers.remove(&scheduler);
        }
    }

    /// Returns the objects that the agent would read from the kernel.
    #[must_use]
    pub(crate) fn existing(&self) -> ExistingObjects {
        let servers = self.servers.iter().map(|(key, (settings, destinations))| {
            (*key, ExistingServer { settings: Some(*settings), destinations: destinations.clone() })
        });
        let saves = RulesTable::ALL.map(|table| self.iptables.save(table)).concat();
        ExistingObjects {
            sets: self.sets.clone(),
            device_addresses: self.device_addresses.clone(),
            servers: servers.collect(),
            tables: ExistingTables::parse(&saves),
        }
    }

    fn step(&mut self, op: Op) -> Result<(), &'static str> {
        let exists = |is_new: bool| if is_new { Ok(()) } else { Err("already exists") };
        let missing = |was_there: bool| if was_there { Ok(()) } else { Err("does not exist") };
        match op {
            Op::CreateSet(set) => exists(self.sets.insert(set, BTreeSet::new()).is_none()),
            Op::DestroySet(set) => {
                if self.is_referred_to(set) {
                    return Err("a rule refers to the set");
                }
                missing(self.sets.remove(&set).is_some())
            }
            Op::AddElement(set, element) => {
                if element.kind() != set.kind() {
                    return Err("wrong kind of element");
                }
                exists(self.sets.get_mut(&set).ok_or("no such set")?.insert(element))
            }
            Op::DeleteElement(set, element) => missing(self.sets.get_mut(&set).ok_or("no such set")?.remove(&element)),
            Op::AddAddress(address) if Family::of(address) != self.family => Err("wrong family"),
            Op::AddAddress(address) => exists(self.device_addresses.insert(address)),
            Op::DeleteAddress(address) => missing(self.device_addresses.remove(&address)),
            Op::AddServer(key, settings) => {
                self.check(settings)?;
                exists(self.servers.insert(key, (settings, BTreeMap::new())).is_none())
            }
            Op::EditServer(key, settings) => {
                self.check(settings)?;
                self.servers.get_mut(&key).ok_or("no such server")?.0 = settings;
                Ok(())
            }
            Op::DeleteServer(key) => {
                let (_, destinations) = self.servers.remove(&key).ok_or("no such server")?;
                missing(destinations.is_empty()).map_err(|_| "the server has destinations")
            }
            Op::AddDestination(key, address, weight) => {
                exists(self.destinations(key)?.insert(address, weight).is_none())
            }
            Op::EditDestination(key, address, weight) => {
                missing(self.destinations(key)?.insert(address, weight).is_some())
            }
            Op::DeleteDestination(key, address) => missing(self.destinations(key)?.remove(&address).is_some()),
        }
    }

    fn check(&self, settings: Settings) -> Result<(), &'static str> {
        if self.schedulers.contains(&settings.scheduler) { Ok(()) } else { Err("no such scheduler") }
    }

    fn destinations(&mut self, key: ServerKey) -> Result<&mut BTreeMap<SocketAddr, u32>, &'static str> {
        Ok(&mut self.servers.get_mut(&key).ok_or("no such server")?.1)
    }

    fn is_referred_to(&self, set: Set) -> bool {
        let name = set.name(self.family);
        let refers = |table: &RulesTable| {
            self.iptables.save(*table).lines().any(|rule| referred_sets(rule).any(|of| of == name))
        };
        RulesTable::ALL.iter().any(refers)
    }
}

fn referred_sets(rule: &str) -> impl Iterator<Item = &str> {
    rule.split("--match-set ").skip(1).filter_map(|rest| rest.split(' ').next())
}
