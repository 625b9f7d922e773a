//! Attacks of tenants and pods, with real programs.

mod deputy;
