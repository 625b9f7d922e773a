//! Attacks of pods, tenants and nodes. Each test checks that others are unharmed.

mod deputy;
mod http_ports;
mod objects;
