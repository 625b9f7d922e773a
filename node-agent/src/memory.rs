//! Giving memory back to the system.

/// Returns what a full sync needed for a moment (its script, and what the kernel had) to the
/// system. The C library would keep it for the next full sync, which may be days away. A few
/// milliseconds, so not for every change.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub(crate) fn give_back() {
    // SAFETY: malloc_trim (malloc_trim(3)) may be called at any time from any thread; it takes the
    // allocator's own locks.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries have nothing like it.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
