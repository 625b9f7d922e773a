//! Stale UDP flows of services are deleted from the kernel's connection tracking table. All other
//! flows stay.

mod kernel;
mod services;
mod table;
