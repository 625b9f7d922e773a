//! Attacks on the programs of a node, and what others notice of them: nothing.

mod http_ports;
