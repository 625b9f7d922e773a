//! Returns unused memory to the system.

/// Returns the memory of a full sync, which the C library would keep for the next one, perhaps for
/// days. Takes a few milliseconds: too slow for every change.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub(crate) fn give_back() {
    // SAFETY: malloc_trim(3) may be called at any time from any thread; it locks by itself.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries have no `malloc_trim`.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
