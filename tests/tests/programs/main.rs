//! Tests of our programs as processes. Some tests give the node a network namespace.

#![allow(clippy::unwrap_used, missing_docs)]

mod chaos;
mod deploy;
mod failover;
mod grpcurl;
mod headgatectl;
mod inspect;
mod process;
mod readme;
mod survival;
