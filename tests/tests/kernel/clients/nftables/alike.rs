//! [`FakeKernel`] answers as the real kernel does. Each case runs against both kernels. Each step
//! is a transaction with the error number that both kernels must return, or 0 for success. After
//! each step, both kernels must hold equal objects.

mod elements;
mod objects;
mod random;
mod rules;

use anyhow::Result;
use nftables_netlink::{
    BaseChain, Chain, ChainType, DataType, Element, Expression, Family, Hook, Kernel, LookupResult, Nftables,
    NftablesError, Policy, Register, Rule, Set, SetName, Table, TableName, Transaction, Value, Verdict,
    fake::FakeKernel,
};

use super::{in_namespace, table_name};

pub(super) use libc::{EBUSY, EEXIST, EINVAL, EMLINK, ENFILE, ENODATA, ENOENT, EOPNOTSUPP, EPERM, ERANGE};

/// The steps of a case. Each step is a transaction and the error number of its first fault, or 0.
pub(super) type Steps = Vec<(Transaction, i32)>;

/// A transaction on the test table, written by `fill`.
pub(super) fn change(fill: impl FnOnce(&mut Transaction, &TableName)) -> Transaction {
    let mut all = Transaction::new();
    fill(&mut all, &table_name());
    all
}

/// A table with the map `map` from marks to marks, the map `verdicts`, the set `set` of at most 2
/// elements, the chains `a` and `b`, and the base chain `base`.
pub(super) fn prepared() -> Transaction {
    change(|all, table| {
        all.add_table(&Table::new(table.clone()));
        all.add_chain(&Chain::regular(table, "a"));
        all.add_chain(&Chain::regular(table, "b"));
        all.add_chain(&base(table, "base", ChainType::Filter, Hook::Input, 0));
        all.add_set(&Set::map(table, "map", &[DataType::Mark], &[DataType::Mark]));
        all.add_set(&Set::verdict_map(table, "verdicts", &[DataType::Mark]));
        all.add_set(&Set::new(table, "set", &[DataType::Mark]).with_size(2));
    })
}

pub(super) fn base(table: &TableName, name: &str, kind: ChainType, hook: Hook, priority: i32) -> Chain {
    Chain::base(table, name, BaseChain { kind, hook, priority, policy: Policy::Accept })
}

pub(super) fn number(key: u32) -> Element {
    Element::new(Value::host_u32(key))
}

pub(super) fn entry(key: u32, data: u32) -> Element {
    number(key).with_value(Value::host_u32(data))
}

pub(super) fn goto(chain: &str) -> Verdict {
    Verdict::Goto(chain.into())
}

pub(super) fn jump(chain: &str) -> Expression {
    Expression::Verdict(Verdict::Jump(chain.into()))
}

pub(super) fn load(value: Value) -> Expression {
    Expression::Immediate { to: Register::R1, value }
}

pub(super) fn mark() -> Expression {
    load(Value::host_u32(1))
}

pub(super) fn find(set: impl Into<SetName>, result: LookupResult) -> Expression {
    Expression::Lookup { set: set.into(), key: Register::R1, result }
}

/// A transaction that adds one rule.
pub(super) fn rule(chain: &str, expressions: Vec<Expression>) -> Transaction {
    change(|all, table| all.add_rule(&Rule::new(table, chain, expressions)))
}

/// The error number of the first fault, and the indexes of its message and its element. The error
/// number is 0 for success.
fn answer(result: Result<(), NftablesError>) -> (i32, Option<usize>, Option<usize>) {
    match result {
        Ok(()) => (0, None, None),
        Err(NftablesError::Refused(faults)) => (faults[0].refusal.code, faults[0].message, faults[0].element),
        Err(error) => panic!("{error}"),
    }
}

/// All tables, chains, rules, sets and elements of a kernel, in a fixed order.
fn contents(kernel: &mut impl Kernel) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for mut table in kernel.tables(Some(Family::Inet))?.into_iter().map(|table| table.object) {
        table.owner_port = table.owner_port.map(|_| 1);
        all.push(format!("{table:?}"));
        for chain in kernel.chains(&table.name)? {
            all.push(format!("{:?}", chain.object));
        }
        for rule in kernel.rules(&table.name, None)? {
            all.push(format!("{:?}", rule.object));
        }
        let mut lines = Vec::new();
        for set in kernel.sets(&table.name)?.into_iter().map(|set| set.object) {
            for mut element in kernel.elements(&table.name, &set.name)? {
                element.expires_in_ms = None;
                lines.push(format!("{} {element:?}", set.name));
            }
            lines.push(format!("{set:?}"));
        }
        lines.sort();
        all.extend(lines);
    }
    Ok(all)
}

/// Runs each case from a fresh state in both kernels, and compares answers and contents after every
/// step.
fn run(name: &str, cases: Vec<(&'static str, Steps)>) {
    let differences = in_namespace(name, || {
        let mut real = Nftables::open()?;
        let mut differences = Vec::new();
        for (case, steps) in cases {
            let mut fake = FakeKernel::new().connect();
            for (index, (transaction, expected)) in steps.iter().enumerate() {
                let (kernel, memory) = (answer(real.commit(transaction)), answer(fake.commit(transaction)));
                if kernel != memory || kernel.0 != *expected {
                    differences.push(format!(
                        "{case}, step {index}: expected {expected}, real kernel {kernel:?}, fake kernel {memory:?}"
                    ));
                }
                let (kernel, memory) = (contents(&mut real)?, contents(&mut fake)?);
                if kernel != memory {
                    differences.push(format!("{case}, step {index}: real kernel {kernel:#?}, fake kernel {memory:#?}"));
                }
            }
            if !real.tables(Some(Family::Inet))?.is_empty() {
                real.commit(&change(Transaction::delete_table))?;
            }
        }
        Ok(differences)
    });
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
