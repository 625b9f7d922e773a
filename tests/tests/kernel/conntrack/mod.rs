//! UDP flows follow their services: the kernel's connection tracking table is cleaned of what leads
//! nowhere, and of nothing else.

mod kernel;
mod services;
