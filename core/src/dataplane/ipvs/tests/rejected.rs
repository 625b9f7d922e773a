//! Operations, schedulers and protocols that the kernel rejects.

use super::*;

#[test]
fn rejected_objects_are_deferred_and_tried_again() {
    let mut rig = Rig::new(config());
    let key = |address: &str| ServerKey { address: ip(address), protocol: Protocol::Tcp, port: 80 };
    let (external, bad) = (key("203.0.113.1"), SocketAddr::new(ip("10.244.1.9"), 8080));
    let rejects = |op: &Op| match op {
        Op::AddServer(server, _) => *server == external,
        Op::AddDestination(_, address, _) => *address == bad,
        _ => false,
    };
    let step = |rig: &mut Rig, changes: Vec<Change>| {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| {
            rig.state.apply(change, &mut dirty);
        });
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty, 0);
        let rejected = rig.kernel.apply_rejecting(&plan, rejects).unwrap();
        assert_eq!(rig.ledger.record(plan.ops(), &rejected), []);
        plan
    };
    step(&mut rig, vec![Change::from(service()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.1.9", "node-b")]);
    assert_eq!(rig.destinations("203.0.113.1", 80), None);
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 1)]), "the rest is programmed");
    // The deferred objects are one destination on each of three servers, the fourth server, and the
    // two destinations of the fourth server.
    assert_eq!(rig.ledger.deferred().count(), 3 + 1 + 2);
    assert!(rig.ledger.deferred().all(|(_, of)| **of == service().key));

    // A change of the service tries its deferred objects again. A change of another service does
    // not try them again.
    let other = Service { external_ips: vec![], load_balancer_ips: vec![], ..service() };
    let other =
        Service { key: ServiceKey::new("ns", "other"), cluster_ips: vec![ip("10.96.0.2")], ports: vec![], ..other };
    assert!(step(&mut rig, vec![Change::from(other)]).is_empty());
    let plan = step(&mut rig, vec![endpoint("10.244.1.2", "node-b")]);
    assert_eq!(
        plan.ops().count(),
        6 + 4,
        "six deferred objects, and one new destination on each of four servers: {plan:?}"
    );
    assert_eq!(rig.ledger.deferred().count(), 3 + 1 + 3);

    // The caller can also try a server with its destinations again, or a single destination.
    let again = rig.ledger.retries([Object::Server(external)]);
    assert!(matches!(
        again[..],
        [Op::AddServer(..), Op::AddDestination(..), Op::AddDestination(..), Op::AddDestination(..)]
    ));
    let before = rig.ledger.deferred_revision();
    let rejected = rig.kernel.apply_rejecting(&Plan { before: again.clone(), ..Plan::default() }, |_| false).unwrap();
    assert_eq!((rejected.len(), rig.ledger.record(&again, &rejected).len()), (0, 0));
    assert_ne!(rig.ledger.deferred_revision(), before);
    assert_eq!(rig.ledger.deferred().count(), 3);
    assert_eq!(rig.destinations("203.0.113.1", 80).map(|all| all.len()), Some(3));
    assert_eq!(rig.ledger.retries([Object::Server(external), Object::Destination(key("10.96.0.1"), bad)]).len(), 1);

    // An object that is no longer wanted is no longer deferred.
    step(&mut rig, vec![Change::RemoveEndpoint(service().key, bad.ip())]);
    assert_eq!(rig.ledger.deferred().count(), 0);
    // No service wants the object of a removal.
    let removal = Op::DeleteAddress(ip("10.96.0.1"));
    assert_eq!(rig.ledger.record(&[removal], &[removal]), [removal]);
}

#[test]
fn a_missing_scheduler_is_replaced_by_the_default_until_it_is_loaded() {
    let mut rig = Rig::new(config());
    let hashed = |scheduler: &str| Change::from(Service { scheduler: scheduler.into(), ..service() });
    let key = ServerKey { address: ip("10.96.0.1"), protocol: Protocol::Tcp, port: 80 };
    let step = |rig: &mut Rig, changes: Vec<Change>, services: &[ServiceKey]| {
        let mut dirty = Dirty { services: services.iter().cloned().map(Arc::new).collect(), ..Dirty::default() };
        changes.into_iter().for_each(|change| {
            rig.state.apply(change, &mut dirty);
        });
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty, 0);
        let rejected = rig.kernel.apply_rejecting(&plan, |_| false).unwrap();
        assert_eq!(rig.ledger.record(plan.ops(), &rejected), []);
        rejected
    };
    rig.kernel.set_scheduler(Scheduler::MaglevHashing, false);
    for first_changes in [vec![hashed("mh"), endpoint("10.244.1.1", "node-a")], vec![hashed("wlc"), hashed("mh")]] {
        // The kernel rejects a new server with this scheduler, and it keeps an existing server
        // unchanged.
        let existed = rig.kernel.servers.contains_key(&key);
        let before = rig.destinations("10.96.0.1", 80);
        for change in first_changes {
            let rejected = step(&mut rig, vec![change], &[]);
            let is_edit = |op: &Op| matches!(op, Op::EditServer(..));
            assert!(rejected.iter().all(|op| is_edit(op) == existed), "{rejected:?}");
        }
        assert!(rig.ledger.is_deferred(&Object::Server(key)));
        assert_eq!(rig.destinations("10.96.0.1", 80), before);
        let services = rig.ledger.set_available(Scheduler::MaglevHashing, false);
        assert_eq!(services, [Arc::new(service().key)].into());
        assert_eq!(step(&mut rig, vec![], &[service().key]), []);
        assert_eq!(rig.ledger.deferred().count(), 0);
        assert_eq!(rig.kernel.servers[&key].0.scheduler, Scheduler::RoundRobin);
        assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 1)]));
        let problem = Problem::MissingScheduler(Scheduler::MaglevHashing);
        assert_eq!(rig.ledger.problems().collect::<Vec<_>>(), [(&Arc::new(service().key), &problem)]);
        assert_eq!(rig.ledger.set_available(Scheduler::MaglevHashing, true), services);
    }
    // The scheduler is loaded, so the service that requests this scheduler now uses it.
    rig.kernel.set_scheduler(Scheduler::MaglevHashing, true);
    assert_eq!(step(&mut rig, vec![], &[service().key]), []);
    assert_eq!(rig.kernel.servers[&key].0.scheduler, Scheduler::MaglevHashing);
    assert_eq!(rig.ledger.problems().count(), 0);
}

#[test]
fn sctp_rules_are_left_out_if_iptables_cannot_match_sctp() {
    let without = Service { external_traffic_policy: TrafficPolicy::Local, ..service() };
    let mut with = without.clone();
    with.ports.push(ServicePort { name: "sctp".into(), protocol: Protocol::Sctp, port: 81, node_port: 30081 });
    let nat = |leaves_out_sctp, service: &Service| {
        let mut rig = Rig::new(IpvsConfig { leaves_out_sctp, ..config() });
        let ports = [("sctp", Protocol::Sctp), ("web", Protocol::Tcp)];
        let ports = ports.map(|(name, protocol)| EndpointPort::new(name, protocol, 8080));
        let endpoint = Endpoint::new(ip("10.244.1.1"), Arc::from(ports));
        rig.step([Change::from(service.clone()), Change::Endpoint(service.key.clone(), endpoint)]);
        rig.kernel.iptables.save(crate::dataplane::rules::Table::Nat)
    };
    assert_eq!(nat(true, &with), nat(false, &without));
    assert!(!nat(true, &with).contains("-m sctp") && nat(false, &with).contains("-m sctp"));
}
