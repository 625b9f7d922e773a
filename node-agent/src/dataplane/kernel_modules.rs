//! Finds out what the kernel has, without requests that make the kernel load modules.

use std::fs;

/// Returns whether the kernel has a module now, loaded or built in. `function` is a function of the
/// module: `/proc/kallsyms` also lists it if the module is built in. Sends no netlink request,
/// because the kernel loads the module that a request needs.
pub(super) fn is_present(module: &str, function: &str) -> bool {
    let symbol = format!(" {function}");
    let has_symbol = |symbols: Vec<u8>| symbols.windows(symbol.len()).any(|window| window == symbol.as_bytes());
    fs::exists(format!("/sys/module/{module}")).unwrap_or(true) || fs::read("/proc/kallsyms").is_ok_and(has_symbol)
}

/// Returns whether the kernel has nftables now.
pub(super) fn has_nftables() -> bool {
    is_present("nf_tables", "nft_do_chain")
}
