//! Finds processes of service proxies in `/proc`.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

/// The names of programs that are service proxies, whatever their arguments are: kube-proxy (also
/// that of RKE2), and the node program of OVN-Kubernetes.
const PROXIES: [&str; 2] = ["kube-proxy", "ovnkube"];

/// This program is a service proxy unless an argument says otherwise.
const KUBE_ROUTER: &str = "kube-router";
const NO_PROXY: &[u8] = b"--run-service-proxy=false";

/// The line of `status` with the effective capabilities, in hexadecimal digits.
const CAPABILITIES: &str = "CapEff:";

/// `CAP_NET_ADMIN` (`linux/capability.h`), without which nobody writes rules.
const NET_ADMIN: u64 = 1 << 12;

/// The program of a service proxy that runs in the network namespace of this process, and could
/// write rules. A pod may give its programs any name, and a process that could write the rules
/// itself gains nothing by one. Other programs, such as `k3s`, contain a service proxy or not,
/// which only pages and rules tell.
pub(super) fn find() -> Option<String> {
    let own = namespace(Path::new("/proc/thread-self")).ok();
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
        (is_one && may_write_rules(&process) && !arguments().is_empty() && is_in(&process, own))
            .then(|| name.to_owned())
    })
}

/// True if the process belongs to root, and has the capability to write rules. Anybody may read
/// both. The capability is that in the process's own user namespace.
fn may_write_rules(process: &Path) -> bool {
    let is_of_root = fs::metadata(process).is_ok_and(|process| process.uid() == 0);
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let capabilities = status.lines().find_map(|line| line.strip_prefix(CAPABILITIES));
    let capabilities = capabilities.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    is_of_root && capabilities.is_some_and(|all| all & NET_ADMIN != 0)
}

/// What the network namespace of a process has for itself: the inode of a file under its `net`
/// (`fs/proc/proc_net.c`). Its `ns/net` tells nothing to a process with fewer capabilities, but
/// anybody may look into `net`.
fn namespace(process: &Path) -> io::Result<u64> {
    Ok(fs::metadata(process.join("net/unix"))?.ino())
}

/// True if the process is in the network namespace `own`, or if that cannot be found out.
fn is_in(process: &Path, own: Option<u64>) -> bool {
    match namespace(process) {
        Ok(namespace) => own.is_none_or(|own| own == namespace),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{process::Command, thread::sleep, time::Duration};

    use super::*;

    /// What [`find`] finds while a program named `kube-router` runs with these words before it.
    fn found(words: &[&str]) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(KUBE_ROUTER);
        fs::copy("/bin/sleep", &program).unwrap();
        let mut command = words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        command.extend([program.display().to_string(), "60".to_owned()]);
        let mut child = Command::new(&command[0]).args(&command[1..]).spawn().unwrap();
        let [comm, arguments] = ["comm", "cmdline"].map(|file| format!("/proc/{}/{file}", child.id()));
        // A process has its new name a little before it has its new arguments.
        let has_begun =
            || fs::read_to_string(&comm).unwrap().trim() == KUBE_ROUTER && !fs::read(&arguments).unwrap().is_empty();
        while !has_begun() {
            assert!(child.try_wait().unwrap().is_none(), "{words:?} ended");
            sleep(Duration::from_millis(10));
        }
        let found = find();
        child.kill().unwrap();
        child.wait().unwrap();
        found
    }

    /// A pod on the node may run as root, and may give its programs any name.
    #[test]
    fn only_programs_that_could_write_rules_of_this_node_count() {
        assert_eq!(found(&["setpriv", "--bounding-set=-net_admin"]), None);
        assert_eq!(found(&["unshare", "--net"]), None);
        let other_user =
            ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=+net_admin", "--ambient-caps=+net_admin"];
        assert_eq!(found(&other_user), None);
        assert_eq!(found(&["setpriv", "--bounding-set=-sys_ptrace"]).as_deref(), Some(KUBE_ROUTER));
    }
}
