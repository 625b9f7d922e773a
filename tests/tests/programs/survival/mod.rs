//! Forwarding continues without the agent, the control plane, or the disk. Real programs are
//! stopped and killed in a cluster of network namespaces.

/// Declares a test for each scenario, with its backend.
macro_rules! on_machines {
    ($($name:ident: $backend:ident, $scenario:ident;)*) => { $(
        #[test]
        fn $name() {
            on_machines(headgate_tests::testbed::Backend::$backend, $scenario);
        }
    )* };
}

mod disk;
mod node;
mod restarts;
