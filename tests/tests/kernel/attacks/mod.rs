//! Attacks of tenants, pods and nodes, with real programs and real rules.

mod lockout;
