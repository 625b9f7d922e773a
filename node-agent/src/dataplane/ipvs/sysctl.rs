//! Sets the kernel parameters that IPVS needs. kube-proxy sets the same values.

use std::{fs, path::PathBuf};

use headgate_core::ipvs::DEVICE;

use crate::sysctl::set;

/// The required parameter. Without it, conntrack does not track IPVS connections, so these
/// connections cannot be masqueraded.
const CONNTRACK: Parameter = Parameter { path: "net/ipv4/vs/conntrack", value: "1", without: "" };

#[derive(Debug, Clone, Copy)]
struct Parameter {
    /// The path below `/proc/sys`.
    path: &'static str,
    value: &'static str,
    /// The consequence if the parameter cannot be set, as a part of the warning.
    without: &'static str,
}

/// The kernel parameters below a folder. The folder is `/proc/sys` except in tests. Network
/// parameters belong to the network namespace of the calling thread.
#[derive(Debug)]
pub(super) struct IpvsSysctls {
    root: PathBuf,
}

impl Default for IpvsSysctls {
    fn default() -> Self {
        Self { root: "/proc/sys".into() }
    }
}

impl IpvsSysctls {
    /// Sets all parameters. Returns a sentence for each optional parameter that cannot be set.
    /// Errors: the required parameter cannot be set. The error includes the remedy.
    pub(super) fn set(&self, strict_arp: bool) -> Result<Vec<String>, String> {
        self.set_conntrack()?;
        let mut parameters = vec![
            Parameter {
                path: "net/ipv4/vs/expire_nodest_conn",
                value: "1",
                without: "connections to removed endpoints hang instead of ending",
            },
            Parameter {
                path: "net/ipv4/vs/expire_quiescent_template",
                value: "1",
                without: "clients with session affinity stay at draining endpoints",
            },
            Parameter {
                path: "net/ipv4/ip_forward",
                value: "1",
                without: "nothing is forwarded to endpoints on other nodes",
            },
        ];
        if reuses_connections_badly(&self.release()) {
            parameters.push(Parameter {
                path: "net/ipv4/vs/conn_reuse_mode",
                value: "0",
                without: "a connection that reuses a client port waits for a second",
            });
        }
        if strict_arp {
            let without = "other interfaces answer ARP for the services' addresses, though strictARP is set";
            parameters.push(Parameter { path: "net/ipv4/conf/all/arp_ignore", value: "1", without });
            parameters.push(Parameter { path: "net/ipv4/conf/all/arp_announce", value: "2", without });
        }
        let sentence = |Parameter { path, value, without }: Parameter| {
            self.write(path, value).err().map(|error| format!("{error}: {without}"))
        };
        Ok(parameters.into_iter().filter_map(sentence).collect())
    }

    /// Sets the required parameter.
    /// Errors: the parameter cannot be set. The error includes the remedy.
    pub(super) fn set_conntrack(&self) -> Result<(), String> {
        self.write(CONNTRACK.path, CONNTRACK.value).map_err(|error| {
            format!(
                "{error}: without it IPVS cannot masquerade; give the agent a writable /proc/sys, or first run it with --init-only as root in a privileged container"
            )
        })
    }

    /// Switches IPv6 on for our device: it may be off there, by the default or later, and on for
    /// others. Errors: the parameter cannot be set. The error is a sentence that includes the
    /// consequence.
    pub(super) fn allow_ipv6_on_device(&self) -> Result<(), String> {
        let path = format!("net/ipv6/conf/{DEVICE}/disable_ipv6");
        let without = "services cannot be reached at their IPv6 addresses";
        self.write(&path, "0").map_err(|error| format!("{error}: {without}"))
    }

    fn release(&self) -> String {
        fs::read_to_string(self.root.join("kernel/osrelease")).unwrap_or_default()
    }

    /// Sets a parameter, unless the parameter already has this value. `path` is relative to `root`.
    fn write(&self, path: &str, value: &str) -> Result<(), String> {
        let path = self.root.join(path);
        set(&path, value).map_err(|error| format!("cannot write {value} to {}: {error}", path.display()))
    }
}

/// True for Linux 4.1 to 5.8, where with conntrack a connection from a port that was used within
/// two minutes waits for a second. Older kernels lack the parameter `conn_reuse_mode`.
fn reuses_connections_badly(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return false };
    ((4, 1)..(5, 9)).contains(&(major, minor))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ALL: [&str; 7] = [
        "net/ipv4/vs/conntrack",
        "net/ipv4/vs/expire_nodest_conn",
        "net/ipv4/vs/expire_quiescent_template",
        "net/ipv4/ip_forward",
        "net/ipv4/vs/conn_reuse_mode",
        "net/ipv4/conf/all/arp_ignore",
        "net/ipv4/conf/all/arp_announce",
    ];

    fn machine(release: &str, parameters: &[&str]) -> (tempfile::TempDir, IpvsSysctls) {
        let folder = tempfile::tempdir().unwrap();
        for path in ALL.iter().chain(&["kernel/osrelease"]) {
            fs::create_dir_all(folder.path().join(path).parent().unwrap()).unwrap();
        }
        parameters.iter().for_each(|path| fs::write(folder.path().join(path), "7\n").unwrap());
        fs::write(folder.path().join("kernel/osrelease"), release).unwrap();
        let sysctls = IpvsSysctls { root: folder.path().to_owned() };
        (folder, sysctls)
    }

    #[test]
    fn parameters_are_set_where_they_are_needed() {
        let values = |release: &str, strict_arp: bool| {
            let (folder, sysctls) = machine(release, &ALL);
            assert_eq!(sysctls.set(strict_arp).unwrap(), Vec::<String>::new());
            ALL.map(|path| fs::read_to_string(folder.path().join(path)).unwrap().trim().to_owned())
        };
        assert_eq!(values("6.1.90\n", false), ["1", "1", "1", "1", "7", "7", "7"]);
        assert_eq!(values("5.4.0-150-generic\n", true), ["1", "1", "1", "1", "0", "1", "2"]);
    }

    #[test]
    fn parameters_that_cannot_be_set_are_reported_with_the_consequence() {
        let (_folder, sysctls) = machine("6.1.90", &ALL[..1]);
        let sentences = sysctls.set(false).unwrap();
        assert_eq!(sentences.len(), 3, "{sentences:?}");
        assert!(sentences[2].contains("ip_forward") && sentences[2].contains("nothing is forwarded"), "{sentences:?}");
        let (_folder, sysctls) = machine("6.1.90", &ALL[1..]);
        assert!(sysctls.set(false).unwrap_err().contains("cannot masquerade"));
    }

    #[test]
    fn kernels_that_reuse_connections_badly_are_recognised_by_their_release() {
        for (release, is_bad) in [
            ("4.0.9", false),
            ("4.1.0", true),
            ("4.19.0-26-amd64", true),
            ("5.8.18", true),
            ("5.9.0", false),
            ("6.1.0-37", false),
            ("x", false),
        ] {
            assert_eq!(reuses_connections_badly(release), is_bad, "{release}");
        }
    }
}
