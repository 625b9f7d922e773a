//! Work that blocks.

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    task::{JoinError, spawn_blocking},
};

/// Does work that blocks on a thread for such work. A runtime of one thread does it on that thread,
/// so that the order of its work never depends on another thread.
///
/// # Errors
/// The work panics on the other thread, or the runtime ends. In a runtime of one thread, a panic
/// passes to the caller.
///
/// # Panics
/// There is no runtime.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::CurrentThread => Ok(work()),
        _ => spawn_blocking(work).await,
    }
}
