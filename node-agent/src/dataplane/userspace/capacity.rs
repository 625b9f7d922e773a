//! How many connections and UDP sessions the limit of open files allows.

/// Descriptors for everything except connections and datagrams: streams, TLS files, children, and
/// the connections of HTTP ports, which are at most 512.
const OTHER_DESCRIPTORS: u64 = 2_000;
/// With a lower limit of open files, a few hundred connections would use all descriptors, and all
/// further clients would wait. The rules straight to endpoints have no such limit.
const MIN_OPEN_FILES: u64 = 2 * OTHER_DESCRIPTORS;

/// What the proxy can carry at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Capacity {
    /// Connections, with two descriptors each.
    pub(super) connections: u64,
    /// UDP sessions, with one descriptor each.
    pub(super) sessions: u64,
}

impl Capacity {
    /// The capacity for a limit of open files.
    /// Errors: the limit is too low for a proxy. The sentence names the limit and the remedy.
    pub(super) fn of(open_files: u64) -> Result<Self, String> {
        if open_files < MIN_OPEN_FILES {
            return Err(format!(
                "traffic goes straight to endpoints, and Services that use the PROXY protocol are refused, because the agent may open only {open_files} files, and the proxy of mode userspace needs {MIN_OPEN_FILES}: raise the hard limit of open files (LimitNOFILE of a systemd unit, or the limit that the container runtime sets), and restart the agent"
            ));
        }
        // Each listener for datagrams needs a descriptor too; sessions get half of their part.
        let part = (open_files - OTHER_DESCRIPTORS) / 4;
        Ok(Self { connections: part * 3 / 2, sessions: part / 2 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_fits_into_its_limit_and_a_low_limit_has_none() {
        // The default hard limit of Linux is 4,096.
        assert_eq!(Capacity::of(4_096), Ok(Capacity { connections: 786, sessions: 262 }));
        assert_eq!(Capacity::of(20_000), Ok(Capacity { connections: 6_750, sessions: 2_250 }));
        for limit in [4_000, 4_001, 65_536, 1_048_576] {
            let Capacity { connections, sessions } = Capacity::of(limit).unwrap();
            assert!(2 * connections + sessions + OTHER_DESCRIPTORS <= limit && sessions > 0);
        }
        assert!(Capacity::of(u64::MAX).is_ok());
        for limit in [0, 1_024, 2_003, 3_999] {
            let sentence = Capacity::of(limit).unwrap_err();
            assert!(sentence.contains(&format!(" {limit} files")) && sentence.contains("LimitNOFILE"), "{sentence}");
        }
    }
}
