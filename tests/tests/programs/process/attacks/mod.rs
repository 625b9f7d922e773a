//! Attacks of pods, tenants and nodes. Each test checks that others are unharmed.

mod http_ports;
mod objects;
