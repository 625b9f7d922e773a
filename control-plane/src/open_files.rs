//! The limit of open files of this process, which also limits its connections.
//!
//! The limit has two parts (getrlimit(2)). The kernel enforces the soft limit. A process may raise
//! the soft limit up to the hard limit. Container runtimes often set the soft limit to 1,024, and
//! the hard limit to half a million or more.

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

/// Raises the soft limit to the hard limit, and returns the hard limit.
///
/// # Errors
///
/// The error of the system call. A retry does not help.
pub fn raise() -> Result<u64, Errno> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// The soft limit; `u64::MAX` if the system does not report it.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_limit() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard.min(500), hard).unwrap();
        assert_eq!(limit(), hard.min(500));
        assert_eq!(raise(), Ok(hard));
        assert_eq!(limit(), hard);
    }
}
