//! Tests of the runner for User-Mode Linux. A test inside User-Mode Linux runs on its own kernel,
//! and the host reports the test's failure. Packet cases also pass on this kernel.

use std::time::Duration;

use headgate_tests::cases::{self, table};
use headgate_tests::testbed::{Backend, Testbed};
use headgate_tests::uml::{self, Failure};

mod kernel {
    use super::*;

    /// Every scheduler that the IPVS backend offers.
    const SCHEDULERS: [&str; 13] =
        ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf"];

    #[test]
    fn has_the_modules_that_the_backends_need() {
        uml::inside(|| {
            let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
            assert!(version.starts_with("6.1."), "{version}");
            let modules = std::fs::read_to_string("/proc/modules").unwrap();
            let is_loaded = |name: &str| modules.lines().any(|line| line.split(' ').next() == Some(name));
            for scheduler in SCHEDULERS {
                assert!(is_loaded(&format!("ip_vs_{scheduler}")), "{scheduler}");
            }
            assert!(is_loaded("ip_set_hash_ipportip") && is_loaded("dummy"));
            assert!(std::path::Path::new("/proc/net/ip_vs").exists());
        });
    }

    #[test]
    fn cannot_write_the_hosts_files() {
        uml::inside(|| {
            let written = std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/written-by-a-test"), "");
            assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
            assert!(std::env::temp_dir().starts_with("/run"));
        });
    }
}

/// The runner's reports of tests that fail, hang or crash inside User-Mode Linux.
mod runner {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(120);

    #[test]
    fn a_failure_inside_is_reported_and_keeps_files() {
        let outcome = uml::try_inside(LIMIT, || {
            std::fs::write(std::env::temp_dir().join("evidence"), "of a failure").unwrap();
            panic!("on purpose");
        });
        match outcome {
            Some(Err(Failure::Failed { how, kept, console })) => {
                assert_eq!(how, "exit status 101");
                let evidence = std::fs::read_to_string(kept.unwrap().join("evidence")).unwrap();
                assert_eq!(evidence, "of a failure");
                assert!(std::fs::read_to_string(console).unwrap().contains("Linux version 6.1"));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_kernel_crash_is_reported_and_the_next_test_runs() {
        let outcome = uml::try_inside(LIMIT, || {
            std::fs::write("/proc/sysrq-trigger", "c").unwrap();
            std::thread::sleep(LIMIT);
        });
        match outcome {
            Some(Err(Failure::Ended { when, tail, .. })) => {
                assert_eq!(when, "during the test");
                assert!(tail.contains("Kernel panic"), "{tail}");
            }
            other => panic!("{other:?}"),
        }
        uml::run_inside("uml::kernel::has_the_modules_that_the_backends_need", LIMIT).unwrap();
    }
}

/// These packet cases pass on the host's kernel. If they fail inside User-Mode Linux, the cause is
/// User-Mode Linux, and not the backend.
#[test]
fn packet_cases_pass_with_iptables() {
    uml::inside(|| {
        let manifests = table::services().unwrap();
        let bed = Testbed::start(Backend::IptablesLegacy, manifests).unwrap_or_else(|error| panic!("{error:?}"));
        for name in ["cluster_ip", "external_traffic_policy"] {
            let (_, cases) = table::GROUPS.iter().find(|(group, _)| *group == name).unwrap();
            cases::run(&bed, &cases()).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        }
    });
}
