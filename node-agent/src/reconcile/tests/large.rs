//! Services that are large, or too large.

use headgate_core::{Endpoint, EndpointPort, Protocol, Service, ServicePort};

use super::*;

fn large(name: &str, ports: u16, endpoints: u8) -> Vec<Change> {
    let key = ServiceKey::new("prod", name);
    let port = |number| ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: number, node_port: 0 };
    let last = name.bytes().last().unwrap();
    let service = Service::new(key.clone(), vec![[10, 0, 1, last].into()], (1..=ports).map(port).collect());
    let of_port = [EndpointPort::new("p", Protocol::Tcp, 8080)];
    let endpoint = |number| Endpoint::new([10, 1, 1, number].into(), of_port.clone().into());
    let endpoints = (0..endpoints).map(|number| Change::Endpoint(key.clone(), endpoint(number)));
    std::iter::once(Change::from(service)).chain(endpoints).collect()
}

fn applied(run: &Loop) -> Vec<String> {
    run.control
        .calls()
        .iter()
        .filter_map(|call| if let Call::Apply(names, _) = call { Some(names.join(" ")) } else { None })
        .collect()
}

#[test]
fn the_small_services_of_a_batch_are_programmed_before_the_large_ones() {
    let run = Loop::programmed(timing(), vec![service("web", 80), service("db", 5432)]);
    let batch = [large("huge-1", 100, 90), large("huge-2", 100, 91), vec![endpoint("web", 1, 8080)]].concat();
    run.batch(2, batch);
    let programmed = run.wait_programmed(2);
    assert_eq!(applied(&run), ["prod/web", "prod/huge-1", "prod/huge-2"]);
    assert_eq!(programmed.generation, 2);
}

#[test]
fn a_version_is_reported_when_all_of_its_services_are_programmed_although_later_ones_wait() {
    let (mut reconciler, control) = stepped(timing());
    let version = |reconciler: &Reconciler| programmed_version(&reconciler.progress.borrow());
    reconciler.shared.apply(update(2, [large("huge-1", 100, 90), large("huge-2", 100, 91)].concat()));
    reconciler.step(Wake::Work);
    reconciler.shared.apply(update(3, [large("huge-3", 100, 92), vec![endpoint("web", 1, 8080)]].concat()));
    assert_eq!((version(&reconciler), reconciler.done), (Some(1), None));
    reconciler.step(Wake::Work);
    assert_eq!((version(&reconciler), reconciler.done), (Some(2), None), "{:?}", control.calls());
    for _ in 0..2 {
        reconciler.step(Wake::Work);
    }
    assert_eq!(version(&reconciler), Some(3));
    assert!(reconciler.done.is_some());
}

#[test]
fn a_service_that_is_too_large_is_rejected_and_the_others_are_programmed() {
    let run = Loop::start(timing());
    run.snapshot(1, [large("huge", 700, 100), vec![service("web", 80)]].concat());
    run.wait_programmed(1);
    let rejected = run.progress.borrow().rejections.clone();
    assert_eq!(rejected_services(&run.progress.borrow()), ["Service prod/huge"]);
    let (field, reason) = (&rejected[0].field, &rejected[0].reason);
    assert!(field == "size (IPv4)" && reason.contains("65536 are allowed: divide it"), "{field}: {reason}");
    assert_eq!(run.metrics.services_rejected.get(), 1);

    // The Service becomes smaller, becomes too large again, and is removed.
    run.batch(2, large("huge", 600, 100));
    run.wait_programmed(2);
    assert_eq!(rejected_services(&run.progress.borrow()), [""; 0]);
    run.batch(3, [large("huge", 700, 100), vec![endpoint("web", 1, 8080)]].concat());
    run.wait_programmed(3);
    assert_eq!(rejected_services(&run.progress.borrow()), ["Service prod/huge"]);
    run.batch(4, vec![Change::RemoveService(ServiceKey::new("prod", "huge"))]);
    run.wait_programmed(4);
    assert_eq!(rejected_services(&run.progress.borrow()), [""; 0]);
}
