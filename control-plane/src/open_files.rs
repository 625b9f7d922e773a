//! How many files, and so connections, this process may have open.
//!
//! The limit has two parts (getrlimit(2)): what holds, and what a process may raise that to.
//! Container runtimes begin with 1,024 and allow half a million.

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

/// Raises what holds to what is allowed. Returns it.
///
/// # Errors
///
/// What the system says; trying again does not help.
pub fn raise() -> Result<u64, Errno> {
    let (holds, allowed) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if holds < allowed {
        setrlimit(Resource::RLIMIT_NOFILE, allowed, allowed)?;
    }
    Ok(allowed)
}

/// What holds. Everything, where the system does not say.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(holds, _)| holds)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_allowed_holds_afterwards() {
        let (_, allowed) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, allowed.min(500), allowed).unwrap();
        assert_eq!(limit(), allowed.min(500));
        assert_eq!(raise(), Ok(allowed));
        assert_eq!(limit(), allowed);
    }
}
