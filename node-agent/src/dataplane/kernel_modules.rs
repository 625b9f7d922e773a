//! Finds out what the kernel has, without requests that make the kernel load modules.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    sync::LazyLock,
};

pub(super) struct Module {
    name: &'static str,
    function: &'static str,
}

pub(super) const NF_TABLES: Module = Module { name: "nf_tables", function: "nft_do_chain" };
pub(super) const NFNETLINK_ACCT: Module = Module { name: "nfnetlink_acct", function: "nfnl_acct_update" };

/// The functions of these modules that are built into the kernel. The file has megabytes and takes
/// the kernel 50 ms, and built-in functions never change, so the process reads the file once.
static BUILT_IN: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let functions = [NF_TABLES, NFNETLINK_ACCT].map(|module| module.function);
    File::open("/proc/kallsyms").map(|file| built_in(BufReader::new(file), &functions)).unwrap_or_default()
});

impl Module {
    /// Returns whether the kernel has the module now, loaded or built in. Sends no netlink request,
    /// because the kernel loads the module that a request needs.
    pub(super) fn is_present(&self) -> bool {
        // The folder of a built-in module exists only if the module has parameters.
        fs::exists(format!("/sys/module/{}", self.name)).unwrap_or(true) || BUILT_IN.contains(&self.function)
    }
}

/// The functions that are in a file with the format of `/proc/kallsyms`, but not in a loaded
/// module. A line has the address, the type and the name of a symbol, and the module in brackets.
fn built_in(mut symbols: impl BufRead, functions: &[&'static str]) -> Vec<&'static str> {
    let mut found = Vec::new();
    let mut line = String::new();
    while found.len() < functions.len() && symbols.read_line(&mut line).is_ok_and(|length| length > 0) {
        let symbol = line.trim_end().rsplit_once(' ').map(|(_, symbol)| symbol);
        found.extend(functions.iter().find(|function| symbol == Some(**function)));
        line.clear();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_loaded_modules_are_not_built_in() {
        let symbols = "0000000000000000 T nft_do_chain_inet\n\
                       0000000000000000 T nft_do_chain\n\
                       0000000000000000 t nfnl_acct_update\t[nfnetlink_acct]\n";
        let functions = [NFNETLINK_ACCT.function, NF_TABLES.function];
        assert_eq!(built_in(symbols.as_bytes(), &functions), [NF_TABLES.function]);
    }
}
