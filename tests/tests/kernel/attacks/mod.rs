//! Attacks on the nodes of a cluster with real rules. Each test checks that others are unharmed.

mod large_services;
mod lockout;
