//! Desired iptables rules.
