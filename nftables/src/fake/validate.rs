//! Checks of all chains that packets can reach: loops and depth of jumps, and expressions that only
//! some chains may contain.

use std::collections::HashMap;

use super::{
    apply::{Applied, require},
    state::{FakeChain, FakeTable, State, jump, set_name},
};
use crate::{BaseChain, ChainType, ElementData, Expression, FibFlags, FibResult, Hook, NatKind, SetData, Verdict};

/// `NFT_JUMP_STACK_SIZE`
const DEEPEST: usize = 16;

pub(super) fn validate(state: &State) -> Applied {
    for table in &state.tables {
        for chain in &table.chains {
            if let Some(base) = &chain.chain.base {
                validate_chain(state, table, base, chain, 0, &mut HashMap::new())?;
            }
        }
    }
    Ok(())
}

/// Validates a chain. `seen` holds the depths at which chains were found valid. A chain that is
/// valid at a depth is also valid at smaller depths.
fn validate_chain<'a>(
    state: &'a State,
    table: &'a FakeTable,
    base: &BaseChain,
    chain: &'a FakeChain,
    depth: usize,
    seen: &mut HashMap<&'a str, usize>,
) -> Applied {
    require(depth < DEEPEST, libc::EMLINK)?;
    if seen.get(chain.chain.name.as_str()).is_some_and(|seen| *seen >= depth) {
        return Ok(());
    }
    for expression in chain.rules.iter().flat_map(|(_, rule)| &rule.expressions) {
        require(fits(base, expression), libc::EOPNOTSUPP)?;
        let mut targets: Vec<&str> = jump(expression).into_iter().collect();
        // Like the kernel, follow the verdicts of the map for every kind of lookup.
        let map = set_name(expression).and_then(|name| table.set_of(name));
        if let Some(set) = map.filter(|map| map.set.data == Some(SetData::Verdicts)) {
            targets.extend(state.contents_of(set).filter_map(|stored| match &stored.element.data {
                Some(ElementData::Verdict(verdict)) => Verdict::chain(verdict),
                _ => None,
            }));
        }
        for target in targets {
            if let Some(next) = table.chain(target) {
                validate_chain(state, table, base, next, depth + 1, seen)?;
            }
        }
    }
    seen.insert(&chain.chain.name, depth);
    Ok(())
}

/// Whether rules reachable from a base chain may contain an expression.
fn fits(base: &BaseChain, expression: &Expression) -> bool {
    use Hook::{Forward, Input, Output, Postrouting, Prerouting};
    let hooks = |allowed: &[Hook]| allowed.contains(&base.hook);
    let is_nat = base.kind == ChainType::Nat;
    match expression {
        Expression::Nat { kind: NatKind::Source, .. } => is_nat && hooks(&[Postrouting, Input]),
        Expression::Nat { kind: NatKind::Destination, .. } => is_nat && hooks(&[Prerouting, Output]),
        Expression::Masquerade { .. } => is_nat && hooks(&[Postrouting]),
        Expression::Redirect { .. } => is_nat && hooks(&[Prerouting, Output]),
        Expression::Reject(_) => hooks(&[Input, Forward, Output, Prerouting]),
        Expression::TransparentProxy { .. } => hooks(&[Prerouting]),
        Expression::Socket { .. } => hooks(&[Prerouting, Input, Output]),
        Expression::Fib { result: FibResult::AddressType, flags, .. } => {
            let input = !flags.contains(FibFlags::INPUT) || hooks(&[Prerouting, Input, Forward]);
            input && (!flags.contains(FibFlags::OUTPUT) || hooks(&[Output, Postrouting, Forward]))
        }
        Expression::Fib { .. } => hooks(&[Prerouting, Input, Forward]),
        _ => true,
    }
}
