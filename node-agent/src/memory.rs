//! Returns unused memory to the system.

/// Returns the memory that a full sync needed for its script and for the listing of the kernel.
/// Without this call, the C library keeps this memory for the next full sync, which may be days
/// away. The call takes a few milliseconds, so it is too slow for every change.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub(crate) fn give_back() {
    // SAFETY: malloc_trim(3) may be called at any time from any thread. It acquires the locks of
    // the allocator itself.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries have no `malloc_trim`.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
