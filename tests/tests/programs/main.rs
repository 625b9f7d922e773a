//! Tests of our programs as processes, from outside. Some give the node a network namespace.

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
