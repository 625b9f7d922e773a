//! Reads the rules of kube-proxy, in mode iptables (both variants) or nftables, and decodes them.
//! It writes nothing, and makes the kernel load no module. Rules of other proxies, and of
//! kube-proxy in mode ipvs, are not understood.

use headgate_core::{
    Family,
    forwarding::{Problem, Table},
    iptables::RulesTable,
    view::LocalDetector,
};
use headgate_oracle::{iptables, nftables};
use nftables_netlink::Nftables;

use super::{
    DataplaneError, ErrorKind,
    kernel_modules::NF_TABLES,
    nftables::{dump, failure, kube_proxys_table},
    xtables::{Variant, programs::Programs},
};

/// How often a table is read that changes meanwhile.
const ATTEMPTS: usize = 3;

/// The reader.
#[derive(Debug, Default)]
pub struct OtherRules {
    nftables: Option<Nftables>,
}

impl OtherRules {
    /// Returns what kube-proxy forwards in a family. `detector` is how its rules should recognise
    /// pods of the node. If kube-proxy writes while its rules are read, the result may mix old and
    /// new rules, so a difference counts only if it is found twice.
    /// Errors: the rules cannot be read. Try again.
    pub fn decode(&mut self, family: Family, detector: Option<&LocalDetector>) -> Result<Table, DataplaneError> {
        let mut tables = Vec::new();
        tables.extend(self.nftables(family, detector)?);
        let mut missing = None;
        for variant in [Variant::Legacy, Variant::Nft] {
            if variant == Variant::Nft && !NF_TABLES.is_present() {
                continue;
            }
            match iptables(&Programs::new(family, variant), detector) {
                // Without its programs, a variant may have rules.
                Err(error) if error.kind == ErrorKind::Unavailable => missing = Some(error),
                decoded => tables.extend(decoded?),
            }
        }
        if let Some(error) = missing.filter(|_| tables.is_empty()) {
            return Err(error);
        }
        let problem = match tables.len() {
            1 => return Ok(tables.remove(0)),
            0 => Problem::Broken(format!("there are no {family} rules of kube-proxy in mode iptables or nftables")),
            _ => Problem::GivenUp(format!(
                "cannot verify {family}: there are rules of kube-proxy in several modes or variants of iptables, and their order is undefined: remove those that it does not use"
            )),
        };
        let of_kube_proxy = tables.first().and_then(|table| table.of_kube_proxy);
        Ok(Table { problems: [problem].into(), of_kube_proxy, ..Table::new(family) })
    }

    fn nftables(&mut self, family: Family, detector: Option<&LocalDetector>) -> Result<Option<Table>, DataplaneError> {
        if !NF_TABLES.is_present() {
            return Ok(None);
        }
        let mut result = Ok(None);
        for _ in 0..ATTEMPTS {
            let mut nftables = match self.nftables.take() {
                Some(open) => open,
                None => Nftables::open().map_err(|error| failure("connecting to nftables", &error))?,
            };
            result = dump::read(&mut nftables, &kube_proxys_table(family));
            if result.is_ok() {
                self.nftables = Some(nftables);
                break;
            }
        }
        let dump = result.map_err(|error| failure("reading the table of kube-proxy", &error))?;
        Ok(dump.map(|dump| nftables::decode_kube_proxy(&dump, detector)))
    }
}

/// Decodes the rules that a variant of iptables shows. `None` if none of them is of a Service.
fn iptables(programs: &Programs, detector: Option<&LocalDetector>) -> Result<Option<Table>, DataplaneError> {
    let (mut rules, mut has_services) = (iptables::Rules::default(), false);
    for table in [RulesTable::Nat, RulesTable::Filter] {
        programs.save(table, |line| {
            has_services |= line.starts_with("-A KUBE-SERVICES ");
            rules.line(line);
        })?;
    }
    Ok(has_services.then(|| iptables::decode_kube_proxy(&rules, programs.family(), detector)))
}
