//! Tests of Headgate's programs as processes. In some tests, a network namespace is the node.

#![allow(clippy::unwrap_used, missing_docs)]

mod attacks;
mod claims;
mod commands;
mod deploy;
mod fuzz;
mod grpcurl;
mod headgatectl;
mod inspect;
mod moving;
mod process;
mod readme;
mod simulation;
mod survival;
