//! A random test of what the programs claim. Replicas and agents are real processes that die,
//! freeze, lose connections, join, leave and vanish, while Services change. Meanwhile
//! `headgatectl`, pods that stop, and pods that start ask what all nodes have programmed. Each
//! answer is compared with what the kernels forward (discovery.proto, sections 16 and 18).
//!
//! The seed determines the faults, changes and questions of each round, but not their exact timing.
//! To run more rounds, one round, or only some faults:
//!
//! ```sh
//! HEADGATE_CLAIMS_ROUNDS=500 HEADGATE_CLAIMS_SEED=7 HEADGATE_CLAIMS_MODE=iptables-nft \
//!   HEADGATE_CLAIMS_FIRST=41 HEADGATE_CLAIMS_FAULTS=Vanish,Reject HEADGATE_CLAIMS_WORLD=1 \
//!   cargo nextest run -p headgate-tests --test programs what_the_programs_claim --no-capture
//! ```

mod asking;
mod faults;
mod kernel;
mod world;

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    net::{IpAddr, TcpStream},
    sync::{Arc, Mutex},
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use asking::{Asker, Question, Tally};
use fastrand::Rng;
use faults::Fault;
use headgate_tests::{
    simulate::source,
    testbed::process::{output, program},
};
use kernel::Backend;
use source::{CLUSTER, CROWD, LOCAL, NODES, Phase, SERVICES, Source, cluster_ip};
use world::{PLACES, World, lock};

/// A guard against hanging. No test asserts on time.
const GUARD: Duration = Duration::from_secs(120);
/// The number of rounds before all programs start anew: `HEADGATE_CLAIMS_WORLD`.
const ROUNDS_OF_A_WORLD: usize = 8;
/// `--uncovered-after-seconds` of every second world: longer than the time from a fault to its end,
/// so that replicas remember each agent.
const UNCOVERED_AFTER_SECONDS: usize = 15;

fn variable(name: &str) -> Option<String> {
    std::env::var(format!("HEADGATE_CLAIMS_{name}")).ok()
}

fn number(name: &str, default: usize) -> usize {
    variable(name).map_or(default, |text| text.parse().unwrap())
}

/// Waits until all nodes forward as the source says, and all agents are up to date.
fn settle(world: &World) -> Result<()> {
    let until = Instant::now() + GUARD;
    loop {
        let states = asking::states(&world.shared)?;
        if states.len() == NODES.len() && states.values().all(|state| state == "up_to_date") {
            break;
        }
        ensure!(Instant::now() < until, "not healed: {states:?}");
        sleep(Duration::from_millis(50));
    }
    for node in 0..NODES.len() {
        loop {
            let read = world.shared.read(node).map_err(|error| format!("{error:#}"));
            let difference = match read {
                Ok(kernel) => world.shared.source().compare(node, &kernel, u64::MAX, |_| true),
                Err(error) => Some(error),
            };
            let Some(difference) = difference else { break };
            ensure!(Instant::now() < until, "not healed: {difference}");
            sleep(Duration::from_millis(50));
        }
    }
    world.shared.source().settled();
    Ok(())
}

/// Checks with connections that the nodes forward to the endpoints that [`Backend::read`] returns.
fn check_with_packets(world: &World, rng: &mut Rng) -> Result<()> {
    let (node, service) = (rng.usize(0..NODES.len()), rng.usize(0..CLUSTER));
    let forwarding = world.shared.read(node)?;
    for _ in 0..5 {
        let mut answer = String::new();
        let address = IpAddr::V4(cluster_ip(service));
        world.shared.node(node).run(|| {
            let mut stream = TcpStream::connect_timeout(&(address, 80).into(), GUARD)?;
            stream.read_to_string(&mut answer)?;
            Ok(())
        })?;
        let endpoints = &forwarding[&cluster_ip(service)];
        ensure!(endpoints.contains(&answer.parse()?), "{answer} answers on {}, not one of {endpoints:?}", NODES[node]);
    }
    Ok(())
}

/// What happens in a round, in this order.
enum Act {
    Fault(Fault),
    Ask(Question),
    /// Some endpoints are added, and others removed.
    Churn,
    /// The connections of one agent break, and it connects again.
    Break,
    /// Processes start again, and connections open.
    Recover,
}

fn acts(faults: &[Fault], rng: &mut Rng) -> Vec<Act> {
    let mut acts: Vec<Act> = faults.iter().map(|fault| Act::Fault(*fault)).collect();
    acts.extend((0..rng.usize(5..10)).map(|_| Act::Ask(Question::ALL[rng.usize(0..Question::ALL.len())])));
    acts.extend((0..rng.usize(2..6)).map(|_| Act::Churn));
    acts.extend((0..rng.usize(0..3)).map(|_| Act::Break));
    acts.extend((0..rng.usize(0..2)).map(|_| Act::Recover));
    acts.push(Act::Ask(Question::Agents));
    rng.shuffle(&mut acts);
    acts
}

fn churn(world: &World, rng: &mut Rng) {
    world.shared.change(|source, api| {
        let (node, service) = (rng.usize(0..NODES.len()), rng.usize(0..=LOCAL));
        source.add(api, node, &[service], Phase::Ready);
        let free = source.free();
        if free.len() > 6 {
            source.set(api, free[rng.usize(0..free.len())], Phase::Gone);
        }
    });
}

/// Runs a round. Returns an error if the programs do not heal.
fn round(
    world: &mut World,
    faults: &[Fault],
    tally: &Mutex<Tally>,
    name: &str,
    rng: &mut Rng,
    one: bool,
) -> Result<()> {
    let has_crowd = faults.contains(&Fault::Reject);
    if has_crowd {
        // Sometimes there are more rejections than an agent remembers.
        let pods = if rng.u8(0..4) == 0 { 60 } else { 3 };
        world.shared.change(|source, api| source.add_crowd(api, pods));
        settle(world)?;
    }
    let (shared, mut result) = (Arc::clone(&world.shared), Ok(()));
    scope(|threads| {
        let ask = |question, crowd_pod, rng: &mut Rng| {
            let asker = Asker { shared: &shared, tally, rng: rng.fork(), round: name.to_owned(), one_answers: one };
            threads.spawn(move || asker.ask(question, crowd_pod));
        };
        let focus = (rng.usize(0..PLACES), rng.usize(0..NODES.len()));
        for act in acts(faults, rng) {
            match act {
                Act::Churn => churn(world, rng),
                Act::Break => world.break_connections(focus.1),
                Act::Recover => result = world.recover(),
                Act::Ask(question) => ask(question, None, rng),
                Act::Fault(fault) => {
                    result = world.inject(fault, focus, rng);
                    if fault == Fault::Reject {
                        for _ in 0..3 {
                            let pod = shared.source().take_crowd(rng.usize(0..CROWD));
                            pod.into_iter().for_each(|pod| ask(Question::Drain, Some(pod), rng));
                        }
                    }
                }
            }
            if result.is_err() {
                break;
            }
            sleep(Duration::from_millis(rng.u64(0..600)));
        }
        let calm = if rng.bool() { 6000 } else { 2000 };
        sleep(Duration::from_millis(rng.u64(0..calm)));
        result = std::mem::replace(&mut result, Ok(())).and(world.heal());
        if has_crowd {
            // The agent withdraws its rejections.
            shared.change(|source, api| source.set_crowd(api, SERVICES..SERVICES + CROWD, Phase::Gone));
        }
    });
    result?;
    if has_crowd {
        world.shared.change(Source::remove_crowd);
    }
    world.shared.change(Source::stock);
    settle(world)?;
    check_with_packets(world, rng)
}

/// Draws the faults of a round.
fn draw(allowed: &[Fault], rng: &mut Rng) -> Vec<Fault> {
    let mut faults: Vec<Fault> = (0..rng.usize(1..5)).map(|_| allowed[rng.usize(0..allowed.len())]).collect();
    faults.sort_unstable();
    // The endpoints of the crowd stop only once.
    faults.dedup_by(|one, other| one == other && *one == Fault::Reject);
    faults
}

fn run(seed: u64, rounds: usize) {
    let backend = Backend::by_name(&variable("MODE").unwrap_or_else(|| "nftables".into()));
    let named = variable("FAULTS").map(|names| names.split(',').map(str::to_owned).collect::<Vec<_>>());
    let is_allowed = |fault: &Fault| named.as_ref().is_none_or(|names| names.contains(&format!("{fault:?}")));
    let allowed: Vec<Fault> = Fault::ALL.into_iter().filter(is_allowed).collect();
    let help = output(program("headgatectl").unwrap().to_str().unwrap(), &["wait", "--help"]);
    let (tally, started, mut by_fault) =
        (Mutex::new(Tally::default()), Instant::now(), BTreeMap::<Fault, usize>::new());
    let (first, of_world) = (number("FIRST", 0), number("WORLD", ROUNDS_OF_A_WORLD));
    let (mut stories, mut world) = (Vec::new(), None);
    for index in first..first + rounds {
        let mut rng = Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(index as u64));
        let name = format!("seed {seed}, round {index}");
        if (index - first).is_multiple_of(of_world) {
            // The old programs end first.
            drop(world.take());
        }
        let world = world.get_or_insert_with(|| {
            let is_short = (index - first) / of_world % 2 == number("SHORT_MEMORY", 1) % 2;
            let seconds = if is_short { UNCOVERED_AFTER_SECONDS } else { 600 };
            let world = World::start(backend, seconds).unwrap();
            world.shared.change(Source::stock);
            settle(&world).unwrap();
            if is_short {
                // From now on, a Node without an agent may be one that never had an agent.
                sleep(Duration::from_secs(seconds as u64));
            }
            world
        });
        lock(&world.shared.story).clear();
        let faults = draw(&allowed, &mut rng);
        faults.iter().for_each(|fault| *by_fault.entry(*fault).or_default() += 1);
        let before = lock(&tally).false_claims.len();
        let result = round(world, &faults, &tally, &name, &mut rng, help.contains("--allow-absent"));
        if let Err(error) = &result {
            lock(&tally).false_claims.push(format!("{name}: {error:#}"));
        }
        if lock(&tally).false_claims.len() > before {
            let story = world.keep_logs().join(format!("story-{index}"));
            let lines = lock(&world.shared.story).join("\n");
            fs::write(&story, format!("{name}: {faults:?}\n{lines}\n")).unwrap();
            stories.push(format!("{faults:?}: {}", story.display()));
        }
        if result.is_err() || variable("VERBOSE").is_some() {
            println!("{name}: {faults:?}\n{}", lock(&world.shared.story).join("\n"));
        }
        if result.is_err() {
            break;
        }
    }
    drop(world);
    report(seed, started.elapsed(), &tally.into_inner().unwrap(), &by_fault, &stories);
}

fn report(seed: u64, took: Duration, tally: &Tally, by_fault: &BTreeMap<Fault, usize>, stories: &[String]) {
    println!("seed {seed}: {:.0} s; rounds by fault: {by_fault:?}", took.as_secs_f64());
    let (mut all, mut definite) = (0, 0);
    for (question, answers) in &tally.definite {
        let of_question = tally.outcomes.iter().filter(|((of, _), _)| of == question);
        let outcomes: Vec<String> = of_question.clone().map(|((_, name), count)| format!("{name} {count}")).collect();
        let count: usize = of_question.map(|(_, count)| count).sum();
        println!("{question:?}: {count} questions, {answers} definite ({})", outcomes.join(", "));
        // A pod that does not stop gets no definite answer.
        if *question != Question::DrainUnready {
            (all, definite) = (all + count, definite + answers);
        }
    }
    println!("{all} questions, {}% definite", definite * 100 / all.max(1));
    let claims = tally.false_claims.join("\n");
    assert!(tally.false_claims.is_empty(), "false claims:\n{claims}\nstories:\n{}", stories.join("\n"));
}

#[test]
fn what_the_programs_claim_is_true() {
    run(number("SEED", 1) as u64, number("ROUNDS", 3));
}
