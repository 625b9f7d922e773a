//! Attacks on a replica and its agents, and what happens to the others.

mod lockout;
mod trust;
