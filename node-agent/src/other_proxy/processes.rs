//! Finds processes of service proxies in `/proc`.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

/// The names of programs that are service proxies, whatever their arguments are: kube-proxy (also
/// that of RKE2), and the node program of OVN-Kubernetes.
const PROXIES: [&str; 2] = ["kube-proxy", "ovnkube"];

/// This program is a service proxy unless an argument says otherwise.
const KUBE_ROUTER: &str = "kube-router";
const NO_PROXY: &[u8] = b"--run-service-proxy=false";

/// The program of a service proxy that runs in the network namespace of this process. A process
/// whose network namespace cannot be read counts. Other programs, such as `k3s`, contain a service
/// proxy or not, which only pages and rules tell.
pub(super) fn find() -> Option<String> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).find_map(|process| {
        let name = fs::read_to_string(process.join("comm")).ok()?;
        let name = name.trim();
        // A process that has ended and whose parent has not noticed has no arguments.
        let arguments = || fs::read(process.join("cmdline")).unwrap_or_default();
        let is_one = match name {
            KUBE_ROUTER => !arguments().split(|byte| *byte == 0).any(|argument| argument == NO_PROXY),
            name => PROXIES.contains(&name),
        };
        (is_one && is_of_root(&process) && !arguments().is_empty() && is_in(&process, own.as_deref()))
            .then(|| name.to_owned())
    })
}

/// Other users may give their programs any name.
fn is_of_root(process: &Path) -> bool {
    fs::metadata(process).is_ok_and(|process| process.uid() == 0)
}

fn is_in(process: &Path, own: Option<&Path>) -> bool {
    match fs::read_link(process.join("ns/net")) {
        Ok(namespace) => own.is_none_or(|own| own == namespace),
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}
