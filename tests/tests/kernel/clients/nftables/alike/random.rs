//! Random transactions over a few names and keys. The kernel refuses most of the transactions, for
//! various reasons.

use fastrand::Rng;
use nftables_netlink::Existing;

use super::*;

const CHAINS: [&str; 4] = ["a", "b", "c", "base"];
const SETS: [&str; 4] = ["map", "verdicts", "set", "other"];

fn chain(random: &mut Rng) -> &'static str {
    CHAINS[random.usize(..CHAINS.len())]
}

fn existing(random: &mut Rng) -> Existing {
    if random.u8(..4) == 0 { Existing::Refused } else { Existing::Kept }
}

fn element(random: &mut Rng, set: &str) -> Element {
    let element = number(random.u32(..4));
    match set {
        "map" => element.with_value(Value::host_u32(random.u32(..2))),
        "verdicts" => element.with_verdict(if random.bool() { goto(chain(random)) } else { Verdict::Drop }),
        _ => element,
    }
}

fn expressions(random: &mut Rng) -> Vec<Expression> {
    match random.u8(..5) {
        0 => vec![Expression::counter()],
        1 | 2 => vec![jump(chain(random))],
        3 => vec![mark(), find("verdicts", LookupResult::Verdict)],
        _ => vec![mark(), find(SETS[random.usize(..SETS.len())], LookupResult::Present)],
    }
}

fn set(table: &TableName, name: &str) -> Set {
    match name {
        "map" => Set::map(table, name, &[DataType::Mark], &[DataType::Mark]),
        "verdicts" => Set::verdict_map(table, name, &[DataType::Mark]),
        _ => Set::new(table, name, &[DataType::Mark]).with_size(2),
    }
}

fn add_change(random: &mut Rng, all: &mut Transaction, table: &TableName) {
    let name = SETS[random.usize(..SETS.len())];
    match random.u8(..20) {
        0 => all.put_chain(&Chain::regular(table, CHAINS[random.usize(..3)]), existing(random)),
        1 => all.delete_chain(table, chain(random)),
        2 => all.put_chain(&base(table, "base", ChainType::Filter, Hook::Input, 0), existing(random)),
        3..=6 => all.add_rule(&Rule::new(table, chain(random), expressions(random))),
        7 => all.flush_chain(table, chain(random)),
        8 => drop(all.put_set(&set(table, name), existing(random))),
        9 => all.delete_set(table, name),
        10..=14 => {
            let elements: Vec<_> = (0..random.u8(1..3)).map(|_| element(random, name)).collect();
            all.put_elements(table, name, elements, existing(random));
        }
        15..=17 => all.delete_elements(table, name, [number(random.u32(..4))]),
        18 => all.flush_set(table, name),
        _ if random.u8(..8) == 0 => {
            all.delete_table(table);
            all.add_table(&Table::new(table.clone()));
        }
        _ => all.flush_table(table),
    }
}

#[test]
fn the_fake_and_the_real_kernel_agree_on_random_transactions() {
    let table = table_name();
    let (differences, accepted) = in_namespace("random", || {
        let (mut real, mut fake) = (Nftables::open()?, FakeKernel::new().connect());
        let (mut differences, mut accepted) = (Vec::new(), 0);
        for seed in 0..20 {
            let mut random = Rng::with_seed(seed);
            for kernel in [&mut real as &mut dyn Kernel, &mut fake] {
                kernel.commit(&prepared())?;
            }
            for step in 0..50 {
                let mut all = Transaction::new();
                for _ in 0..random.u8(1..4) {
                    add_change(&mut random, &mut all, &table);
                }
                let (kernel, memory) = (answer(real.commit(&all)), answer(fake.commit(&all)));
                accepted += usize::from(kernel.0 == 0);
                let (held, remembered) = (contents(&mut real)?, contents(&mut fake)?);
                if kernel != memory || held != remembered {
                    let what = format!("seed {seed}, step {step}: real kernel {kernel:?}, fake kernel {memory:?}");
                    differences.push(format!("{what}\n{all:?}\nreal kernel {held:#?}\nfake kernel {remembered:#?}"));
                    break;
                }
            }
            for kernel in [&mut real as &mut dyn Kernel, &mut fake] {
                kernel.commit(&change(Transaction::delete_table))?;
            }
        }
        Ok((differences, accepted))
    });
    assert!(differences.is_empty(), "{} differences, first {}", differences.len(), differences[0]);
    assert!((100..900).contains(&accepted), "{accepted} of 1000 transactions were accepted");
}
