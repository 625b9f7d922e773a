//! Attacks on the programs, and what happens to the others.

mod trust;
