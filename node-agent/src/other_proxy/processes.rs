//! Finds processes of service proxies in `/proc`.

use std::{fs, io, path::Path};

/// The names of programs that are service proxies, whatever their arguments are: kube-proxy (also
/// that of RKE2), and the node program of OVN-Kubernetes.
const PROXIES: [&str; 2] = ["kube-proxy", "ovnkube"];

/// kube-router is a service proxy unless this argument says otherwise.
const KUBE_ROUTER: (&str, &str) = ("kube-router", "--run-service-proxy=false");

/// The program of a service proxy that runs in the network namespace of this process. A process
/// whose network namespace cannot be read counts. Other programs, such as `k3s`, contain a service
/// proxy or not, which only pages and rules tell.
pub(super) fn find() -> Option<String> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).find_map(|process| {
        let name = fs::read_to_string(process.join("comm")).ok()?;
        let name = name.trim();
        let is_proxy = PROXIES.contains(&name) || name == KUBE_ROUTER.0 && !has_argument(&process, KUBE_ROUTER.1);
        (is_proxy && is_alive(&process) && is_in(&process, own.as_deref())).then(|| name.to_owned())
    })
}

/// True if this process sees all processes of the node: only the host's PID namespace has threads
/// of the kernel.
pub(crate) fn are_visible() -> bool {
    fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd")
}

fn has_argument(process: &Path, argument: &str) -> bool {
    let arguments = fs::read(process.join("cmdline")).unwrap_or_default();
    arguments.split(|byte| *byte == 0).any(|found| found == argument.as_bytes())
}

/// False for a process that has ended and whose parent has not noticed.
fn is_alive(process: &Path) -> bool {
    fs::read(process.join("cmdline")).is_ok_and(|arguments| !arguments.is_empty())
}

fn is_in(process: &Path, own: Option<&Path>) -> bool {
    match fs::read_link(process.join("ns/net")) {
        Ok(namespace) => own.is_none_or(|own| own == namespace),
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}
