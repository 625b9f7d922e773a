//! Detects the features of a kernel by trials, not by the version of the kernel.

use crate::{
    AddressFamily, Bytes, Chain, CtKey, DataType, Direction, DynamicSet, DynamicSetOperation, Expression, Family,
    Fault, FibFlags, FibResult, Generator, Malformed, MetaKey, NatFlags, NatKind, NetlinkError, Nftables,
    NftablesError, Register, Reject, Rule, Set, Table, TableName, Transaction, Value,
};

/// A feature that some kernels lack because of their version or configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// `fib` (module `nft_fib_inet` and similar). Some distributions omit it.
    Fib,
    /// `numgen` (module `nft_numgen`).
    NumberGenerator,
    /// `hash` (module `nft_hash`).
    Hash,
    /// `nat` (module `nft_nat`).
    Nat,
    /// `masq` (module `nft_masq`).
    Masquerade,
    /// `reject` (module `nft_reject_inet` and similar).
    Reject,
    /// `ct` keys for IPv4 addresses and for IPv6 addresses, in tables of any family (Linux 4.17).
    ConntrackAddresses,
    /// `dynset` that deletes elements (Linux 5.1).
    DynamicSetDelete,
    /// `limit` (module `nft_limit`).
    Limit,
    /// Expressions that each element of a set has, such as counters (Linux 5.7).
    SetExpressions,
    /// Owned tables that persist after their connection closes (Linux 6.9).
    OwnerAndPersist,
}

/// Whether the kernel supports a feature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    /// The feature.
    pub feature: Feature,
    /// Why the kernel does not support the feature. None if the kernel supports the feature.
    pub fault: Option<Fault>,
}

/// Tries features for tables of a family in transactions that are rejected on purpose, so that only
/// modules are loaded. Errors: the kernel does not answer.
pub fn probe(kernel: &mut Nftables, family: Family, features: &[Feature]) -> Result<Vec<Support>, NftablesError> {
    let mut support = |feature: &Feature| {
        let fault = refusals(kernel, &attempt(*feature, family))?.into_iter().next();
        Ok(Support { feature: *feature, fault })
    };
    features.iter().map(&mut support).collect()
}

/// Lists what the kernel would reject in a transaction, without executing it, except checks at its
/// end: loops of jumps, and expressions in chains of the wrong type. Errors: the kernel does not
/// answer.
pub fn refusals(kernel: &mut Nftables, transaction: &Transaction) -> Result<Vec<Fault>, NftablesError> {
    let mut attempt = transaction.clone();
    // No table can have a name of this length (`NFT_NAME_MAXLEN` is 256), so the kernel always
    // rejects the deletion, and with it the whole transaction.
    attempt.delete_table(&TableName::new(Family::Inet, "refused-on-purpose-".repeat(16)));
    let last = attempt.message_count() - 1;
    match kernel.commit(&attempt) {
        Err(NftablesError::Refused(faults)) => {
            Ok(faults.into_iter().filter(|fault| fault.message != Some(last)).collect())
        }
        Err(error) => Err(error),
        Ok(()) => Err(NetlinkError::Malformed(Malformed("the kernel deleted a table that cannot exist")).into()),
    }
}

fn attempt(feature: Feature, family: Family) -> Transaction {
    let name = TableName::new(family, format!("nftables-netlink-probe-{}", std::process::id()));
    let table = Table::new(name.clone());
    let mut all = Transaction::new();
    all.add_table(&if feature == Feature::OwnerAndPersist { table.owned_and_persistent() } else { table });
    all.add_chain(&Chain::regular(&name, "chain"));
    let set = Set::new(&name, "set", &[DataType::Mark]);
    match feature {
        Feature::SetExpressions => all.add_set(&Set { expressions: vec![Expression::counter()], ..set }),
        Feature::DynamicSetDelete => all.add_set(&set.with_size(16).with_timeout_ms(1000).dynamic()),
        _ => {}
    }
    all.add_rule(&Rule::new(&name, "chain", rule(feature, family)));
    all
}

/// The expression of a feature, after those that must precede it. Sets and tables have none.
fn rule(feature: Feature, of_table: Family) -> Vec<Expression> {
    let to = Register::R1;
    let family = match of_table {
        Family::Ip => AddressFamily::Ip,
        Family::Ip6 => AddressFamily::Ip6,
        _ => AddressFamily::Inet,
    };
    let number = Expression::Immediate { to, value: Value::host_u32(1) };
    let to_port = |expression| {
        let is_tcp = [Expression::Meta { key: MetaKey::L4Protocol, to }, Expression::equal(to, Value::byte(6))];
        let port = Expression::Immediate { to, value: Value::port(1) };
        is_tcp.into_iter().chain([port, expression]).collect()
    };
    match feature {
        Feature::Fib => vec![Expression::Fib { result: FibResult::AddressType, flags: FibFlags::DESTINATION, to }],
        Feature::NumberGenerator => {
            vec![Expression::NumberGenerator { generator: Generator::Random, modulus: 2, offset: 0, to }]
        }
        Feature::Hash => {
            vec![number, Expression::Hash { from: to, length: 4, modulus: 2, seed: Some(1), offset: 0, to }]
        }
        Feature::Nat => {
            let (kind, flags) = (NatKind::Destination, NatFlags::NONE);
            to_port(Expression::Nat { kind, family, address: None, port: Some(to.into()), flags })
        }
        Feature::Masquerade => to_port(Expression::Masquerade { port: None, flags: NatFlags::FULLY_RANDOM }),
        // `ICMP_PORT_UNREACH` and `ICMPV6_PORT_UNREACH`
        Feature::Reject => vec![Expression::Reject(match of_table {
            Family::Ip => Reject::Icmp(3),
            Family::Ip6 => Reject::Icmp(4),
            _ => Reject::TcpReset,
        })],
        Feature::ConntrackAddresses => {
            let key = if of_table == Family::Ip6 { CtKey::DestinationIp6 } else { CtKey::DestinationIp };
            vec![Expression::Conntrack { key, direction: Some(Direction::Original), to }]
        }
        Feature::DynamicSetDelete => {
            let (set, operation) = ("set".into(), DynamicSetOperation::Delete);
            let change = DynamicSet { set, operation, key: to, data: None, timeout_ms: None, expressions: Vec::new() };
            vec![number, Expression::DynamicSet(change)]
        }
        Feature::Limit => {
            vec![Expression::Limit { rate: 1, seconds: 1, burst: 5, bytes: Bytes::Ignored, inverted: false }]
        }
        Feature::SetExpressions | Feature::OwnerAndPersist => Vec::new(),
    }
}
