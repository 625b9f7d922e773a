//! Keeps little unused memory.

/// Makes all threads allocate from one heap; call it before the first thread starts. By default,
/// glibc has a heap for each thread, and connections that come and go leave memory unused in each:
/// in bench `under-attack`, an agent grew by 27 MB, and with one heap by 13 MB.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub fn use_one_heap() {
    // SAFETY: mallopt(3) reads and writes no memory of the program, and the caller has no other
    // thread. If it fails, nothing changes.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Does nothing: other C libraries have no `mallopt`.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn use_one_heap() {}

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
