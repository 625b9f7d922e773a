//! Detects the features of a kernel by trials, not by the version of the kernel.

use crate::{
    AddressFamily, DataType, Direction, DynamicSet, DynamicSetOperation, Element, Expression, Family, Fault, FibFlags,
    FibResult, Generator, Malformed, MetaKey, NatFlags, NatKind, Nftables, NftablesError, Register, Reject, Rule, Set,
    SocketKey, Table, TableName, Transaction, Value,
    model::{Chain, CtKey},
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
    /// `redir` (module `nft_redir`).
    Redirect,
    /// `reject` (module `nft_reject_inet` and similar).
    Reject,
    /// `ct` (module `nft_ct`).
    Conntrack,
    /// `ct` keys for IPv4 addresses and for IPv6 addresses, in tables of any family (Linux 4.17).
    ConntrackAddresses,
    /// `dynset`.
    DynamicSet,
    /// `dynset` that deletes elements (Linux 5.1).
    DynamicSetDelete,
    /// `limit` (module `nft_limit`).
    Limit,
    /// `log` (module `nft_log`).
    Log,
    /// `socket` (module `nft_socket`).
    Socket,
    /// `tproxy` (module `nft_tproxy`).
    TransparentProxy,
    /// Sets of concatenated ranges (Linux 5.6).
    ConcatenatedRanges,
    /// Expressions that each element of a set has, such as counters (Linux 5.7).
    SetExpressions,
    /// Catch-all elements, which match all other keys (Linux 5.13).
    CatchAll,
    /// Owned tables (Linux 5.12).
    Owner,
    /// Owned tables that persist after their connection closes (Linux 6.9).
    OwnerAndPersist,
}

impl Feature {
    /// All features.
    pub const ALL: [Self; 20] = [
        Self::Fib,
        Self::NumberGenerator,
        Self::Hash,
        Self::Nat,
        Self::Masquerade,
        Self::Redirect,
        Self::Reject,
        Self::Conntrack,
        Self::ConntrackAddresses,
        Self::DynamicSet,
        Self::DynamicSetDelete,
        Self::Limit,
        Self::Log,
        Self::Socket,
        Self::TransparentProxy,
        Self::ConcatenatedRanges,
        Self::SetExpressions,
        Self::CatchAll,
        Self::Owner,
        Self::OwnerAndPersist,
    ];
}

/// Whether the kernel supports a feature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    /// The feature.
    pub feature: Feature,
    /// Why the kernel does not support the feature. None if the kernel supports the feature.
    pub fault: Option<Fault>,
}

/// Tries features in transactions that are rejected on purpose, so that they leave no changes. The
/// kernel loads available modules. `family` is the family of the table; the supported expressions
/// depend on the family.
///
/// # Errors
/// The kernel does not answer.
pub fn probe(kernel: &mut Nftables, family: Family, features: &[Feature]) -> Result<Vec<Support>, NftablesError> {
    let mut all = Vec::new();
    for feature in features {
        let fault = refusals(kernel, &attempt(*feature, family))?.into_iter().next();
        all.push(Support { feature: *feature, fault });
    }
    Ok(all)
}

/// Lists what the kernel would reject in a transaction, without executing the transaction. The list
/// does not include checks at the end of a transaction: loops of jumps, and expressions in chains
/// of the wrong type.
///
/// # Errors
/// The kernel does not answer.
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
        Ok(()) => Err(Malformed("the kernel deleted a table that cannot exist").into()),
    }
}

fn attempt(feature: Feature, family: Family) -> Transaction {
    let name = TableName::new(family, format!("nftables-netlink-probe-{}", std::process::id()));
    let mut table = Table::new(name.clone());
    table.owned = matches!(feature, Feature::Owner | Feature::OwnerAndPersist);
    table.persistent = feature == Feature::OwnerAndPersist;
    let mut all = Transaction::new();
    all.add_table(&table);
    all.add_chain(&Chain::regular(&name, "chain"));
    if let Some((set, elements)) = set(feature, &name) {
        all.add_set(&set);
        all.add_elements(&name, set.name.as_str(), elements);
    }
    if let Some(expression) = expression(feature, family) {
        all.add_rule(&Rule::new(&name, "chain", before(feature).into_iter().chain([expression]).collect()));
    }
    all
}

/// Expressions that must precede an expression of the feature in its rule.
fn before(feature: Feature) -> Vec<Expression> {
    let meta =
        |key, value: Value| vec![Expression::Meta { key, to: Register::R1 }, Expression::equal(Register::R1, value)];
    match feature {
        Feature::Hash | Feature::DynamicSet | Feature::DynamicSetDelete => {
            vec![Expression::Immediate { to: Register::R1, value: Value::host_u32(1) }]
        }
        Feature::TransparentProxy | Feature::Redirect | Feature::Masquerade | Feature::Nat => {
            let mut all = meta(MetaKey::L4Protocol, Value::byte(6));
            all.push(Expression::Immediate { to: Register::R1, value: Value::port(1) });
            all
        }
        _ => Vec::new(),
    }
}

fn set(feature: Feature, table: &TableName) -> Option<(Set, Vec<Element>)> {
    let ports = [DataType::Port, DataType::Port];
    let key = |port| Value::concatenation(&[Value::port(port), Value::port(port)]);
    let set = Set::new(table, "set", &[DataType::Mark]);
    Some(match feature {
        Feature::ConcatenatedRanges => {
            let set = Set::new(table, "set", &ports).with_ranges(&ports);
            (set, vec![Element::range(key(1), key(2))])
        }
        Feature::SetExpressions => (Set { expressions: vec![Expression::counter()], ..set }, vec![]),
        Feature::CatchAll => (set, vec![Element { catch_all: true, ..Element::default() }]),
        Feature::DynamicSet | Feature::DynamicSetDelete => (set.with_size(16).with_timeout_ms(1000).dynamic(), vec![]),
        _ => return None,
    })
}

fn expression(feature: Feature, of_table: Family) -> Option<Expression> {
    let to = Register::R1;
    let dynamic = |operation| {
        Expression::DynamicSet(DynamicSet {
            set: "set".into(),
            operation,
            key: to,
            data: None,
            timeout_ms: None,
            expressions: Vec::new(),
        })
    };
    let family = match of_table {
        Family::Ip => AddressFamily::Ip,
        Family::Ip6 => AddressFamily::Ip6,
        _ => AddressFamily::Inet,
    };
    Some(match feature {
        Feature::Fib => Expression::Fib { result: FibResult::AddressType, flags: FibFlags::DESTINATION, to },
        Feature::NumberGenerator => {
            Expression::NumberGenerator { generator: Generator::Random, modulus: 2, offset: 0, to }
        }
        Feature::Hash => Expression::Hash { from: to, length: 4, modulus: 2, seed: Some(1), offset: 0, to },
        Feature::Nat => {
            let (kind, flags) = (NatKind::Destination, NatFlags::NONE);
            Expression::Nat { kind, family, address: None, port: Some(to.into()), flags }
        }
        Feature::Masquerade => Expression::Masquerade { port: None, flags: NatFlags::FULLY_RANDOM },
        Feature::Redirect => Expression::Redirect { port: Some(to.into()), flags: NatFlags::NONE },
        // `ICMP_PORT_UNREACH` and `ICMPV6_PORT_UNREACH`
        Feature::Reject => Expression::Reject(match of_table {
            Family::Ip => Reject::Icmp(3),
            Family::Ip6 => Reject::Icmp(4),
            _ => Reject::TcpReset,
        }),
        Feature::Conntrack => Expression::Conntrack { key: CtKey::Status, direction: None, to },
        Feature::ConntrackAddresses => {
            let key = if of_table == Family::Ip6 { CtKey::DestinationIp6 } else { CtKey::DestinationIp };
            Expression::Conntrack { key, direction: Some(Direction::Original), to }
        }
        Feature::DynamicSet => dynamic(DynamicSetOperation::Update),
        Feature::DynamicSetDelete => dynamic(DynamicSetOperation::Delete),
        Feature::Limit => {
            Expression::Limit { rate: 1, seconds: 1, burst: 5, bytes: crate::Bytes::Ignored, inverted: false }
        }
        Feature::Log => Expression::Log { prefix: Some("probe".into()), level: None, group: None },
        Feature::Socket => Expression::Socket { key: SocketKey::Transparent, to },
        Feature::TransparentProxy => Expression::TransparentProxy { family, address: None, port: Some(to) },
        _ => return None,
    })
}
