//! Attacks of tenants, against real kernels.

mod large_services;
