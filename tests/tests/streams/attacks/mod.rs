//! Attacks on a replica in the test's process.

mod lockout;
