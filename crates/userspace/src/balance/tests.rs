use super::*;
use proptest::prelude::*;

fn endpoint(number: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, u8::try_from(number / 250).unwrap(), u8::try_from(number % 250).unwrap()], 80))
}

fn client(number: usize) -> IpAddr {
    IpAddr::V4(u32::try_from(0x0b00_0000 + number).unwrap().into())
}

fn pool(algorithm: Algorithm, weights: &[u32]) -> Pool {
    let mut pool = Pool::default();
    pool.set_algorithm(algorithm);
    for (number, weight) in weights.iter().enumerate() {
        pool.set(endpoint(number), *weight);
    }
    pool
}

fn pick(pool: &mut Pool, number: usize) -> Picked {
    pool.pick(client(number), &[], None, 0, mix(number as u64)).unwrap()
}

const ALL: [Algorithm; 4] =
    [Algorithm::Random, Algorithm::RoundRobin, Algorithm::LeastConnections, Algorithm::ConsistentHash];

#[test]
fn shares_follow_the_weights() {
    let weights = [1, 2, 3, 10, 100];
    let total: u32 = weights.iter().sum();
    for algorithm in ALL {
        let mut pool = pool(algorithm, &weights);
        let mut counts = HashMap::new();
        for number in 0..50_000 {
            *counts.entry(pick(&mut pool, number).address).or_insert(0_u32) += 1;
        }
        for (number, weight) in weights.iter().enumerate() {
            let (got, expected) =
                (f64::from(counts[&endpoint(number)]), 50_000.0 * f64::from(*weight) / f64::from(total));
            assert!((got - expected).abs() < 3.0 + expected * 0.15, "{algorithm:?}: {got} instead of {expected}");
        }
    }
}

#[test]
fn a_round_gives_each_endpoint_its_weight_exactly() {
    let weights = [1, 2, 3, 4, 7];
    let mut pool = pool(Algorithm::RoundRobin, &weights);
    for _ in 0..3 {
        let mut counts = HashMap::new();
        for number in 0..17 {
            *counts.entry(pick(&mut pool, number).address).or_insert(0) += 1;
        }
        for (number, weight) in weights.iter().enumerate() {
            assert_eq!(counts[&endpoint(number)], *weight);
        }
    }
}

#[test]
fn removing_an_endpoint_moves_no_other_client() {
    let mut pool = pool(Algorithm::ConsistentHash, &[1; 50]);
    let before: Vec<SocketAddr> = (0..5000).map(|number| pick(&mut pool, number).address).collect();
    pool.remove(endpoint(7));
    for (number, old) in before.iter().enumerate() {
        let new = pick(&mut pool, number).address;
        assert!(new == *old || *old == endpoint(7));
    }
}

#[test]
fn failing_endpoints_rest_and_return() {
    for algorithm in ALL {
        let mut pool = pool(algorithm, &[1; 3]);
        let mut bad = None;
        for number in 0..100 {
            let picked = pool.pick(client(number), &[], None, 1000, mix(number as u64)).unwrap();
            if picked.address == endpoint(1) {
                pool.failed(picked.key, 1000);
                bad = Some(picked.key);
            }
        }
        assert_eq!(pool.resting(), 1, "{algorithm:?}");
        for number in 0..100 {
            let picked = pool.pick(client(number), &[], None, 1001, mix(number as u64)).unwrap();
            assert_ne!(picked.address, endpoint(1), "{algorithm:?}: a resting endpoint is chosen");
        }
        let later_ms = 1000 + LONGEST_REST_MS;
        let found = (0..1000).any(|number| {
            pool.pick(client(number), &[], None, later_ms, mix(number as u64)).unwrap().address == endpoint(1)
        });
        assert!(found, "{algorithm:?}: the endpoint does not return");
        pool.succeeded(bad.unwrap());
        assert_eq!(pool.resting(), 0);
    }
}

#[test]
fn affinity_is_renewed_by_use_expires_and_is_bounded() {
    let mut pool = pool(Algorithm::Random, &[1; 100]);
    let at = |pool: &mut Pool, now_ms: u64| pool.pick(client(0), &[], Some(1000), now_ms, mix(now_ms)).unwrap().address;
    let first = at(&mut pool, 0);
    for now_ms in (0..10_000).step_by(900) {
        assert_eq!(at(&mut pool, now_ms), first);
    }
    assert!((0..20).any(|turn| at(&mut pool, 100_000 + turn * 1000) != first), "the entry does not expire");
    let stuck = at(&mut pool, 500_000);
    pool.remove(stuck);
    assert_ne!(at(&mut pool, 500_001), stuck, "the client keeps a removed endpoint");

    let mut affinity = Affinity::default();
    for number in 0..1000 {
        affinity.put(client(number), endpoint(0), 0, 1000, 100);
        assert!(affinity.len() <= 100);
    }
    assert_eq!(affinity.evicted, 900);
    for number in 0..200 {
        affinity.put(client(5000), endpoint(0), 10_000 + number, 1000, 100);
    }
    assert_eq!(affinity.len(), 1, "expired clients stay");
}

#[derive(Debug, Clone)]
enum Change {
    Set(usize, u32),
    Remove(usize),
    Pick(usize),
    Release(usize),
    Fail(usize),
    Succeed(usize),
    Later(u64),
    Algorithm(usize),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        1 => (0_usize..12, 0_u32..101).prop_map(|(number, weight)| Change::Set(number, weight)),
        1 => (0_usize..12).prop_map(Change::Remove),
        4 => (0_usize..50).prop_map(Change::Pick),
        2 => any::<usize>().prop_map(Change::Release),
        1 => any::<usize>().prop_map(Change::Fail),
        1 => any::<usize>().prop_map(Change::Succeed),
        1 => (0_u64..5000).prop_map(Change::Later),
        1 => (0_usize..4).prop_map(Change::Algorithm),
    ]
}

proptest! {
    #[test]
    fn a_choice_is_always_an_endpoint_of_the_pool_that_was_not_tried(
        changes in proptest::collection::vec(change(), 0..120), has_affinity: bool,
    ) {
        let mut pool = Pool::default();
        let mut present = BTreeSet::new();
        let mut open: Vec<Picked> = Vec::new();
        let mut now_ms = 0;
        for (turn, change) in changes.into_iter().enumerate() {
            match change {
                Change::Set(number, weight) => {
                    pool.set(endpoint(number), weight);
                    present.insert(endpoint(number));
                }
                Change::Remove(number) => {
                    prop_assert_eq!(pool.remove(endpoint(number)), present.remove(&endpoint(number)));
                }
                Change::Pick(number) => {
                    // Every endpoint is chosen once, if each choice excludes the earlier ones.
                    let mut tried = Vec::new();
                    let affinity_ms = has_affinity.then_some(3000);
                    while let Some(picked) = pool.pick(client(number), &tried, affinity_ms, now_ms, mix(turn as u64)) {
                        prop_assert!(present.contains(&picked.address));
                        prop_assert!(!tried.contains(&picked.key));
                        tried.push(picked.key);
                        open.push(picked);
                    }
                    prop_assert_eq!(tried.len(), present.len());
                }
                Change::Release(index) if !open.is_empty() => {
                    let picked = open.swap_remove(index % open.len());
                    pool.release(picked.key);
                }
                Change::Fail(index) if !open.is_empty() => pool.failed(open[index % open.len()].key, now_ms),
                Change::Succeed(index) if !open.is_empty() => pool.succeeded(open[index % open.len()].key),
                Change::Later(ms) => now_ms += ms,
                Change::Algorithm(index) => pool.set_algorithm(ALL[index]),
                Change::Release(_) | Change::Fail(_) | Change::Succeed(_) => {}
            }
            prop_assert_eq!(pool.endpoints.len(), present.len());
            for (_, found) in &pool.endpoints {
                let counted = open.iter().filter(|picked| picked.key.serial == found.serial).count();
                prop_assert_eq!(found.open_connections as usize, counted);
                let is_resting = found.rests_until_ms > 0;
                let weight = pool.weights.get(pool.by_address[&found.address]);
                prop_assert_eq!(weight, if is_resting { 0 } else { found.weight });
            }
        }
    }
}
