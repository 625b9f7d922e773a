//! The limit of open files of this process (getrlimit(2)). The kernel enforces the soft limit,
//! which a process may raise to the hard limit. Container runtimes often set 1,024 and half a
//! million.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// Raises the soft limit to the hard limit. Returns the soft limit. Failures are logged.
pub fn raise() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        warn!(%error, "cannot raise the limit of open files (ulimit -n); each connection needs one");
    }
    self::limit()
}

/// The soft limit; `u64::MAX` if there is none.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_limit() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        let hard = maximum.unwrap_or(u64::MAX);
        setrlimit(Resource::Nofile, Rlimit { current: Some(hard.min(500)), maximum }).unwrap();
        assert_eq!(limit(), hard.min(500));
        assert_eq!(raise(), hard);
        assert_eq!(limit(), hard);
    }
}
