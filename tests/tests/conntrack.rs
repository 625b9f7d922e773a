//! UDP flows follow their services: the kernel's connection tracking table is cleaned of what leads nowhere, and of nothing else.
#![allow(clippy::unwrap_used, missing_docs)]

mod conntrack {
    mod kernel;
    mod services;
}
