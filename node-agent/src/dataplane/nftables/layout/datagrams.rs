//! The rules that send datagrams to the proxy of mode userspace, and replies back: each by itself,
//! before connection tracking and exempt from it. So a reply has the address that the client used,
//! however late, and the gate decides about each datagram.

use std::net::{IpAddr, SocketAddr};

use headgate_core::{Protocol, nftables::Lookup};
use nftables_netlink::{BaseChain, ChainType, Comparison, Expression, Hook, Policy, Verdict};

use super::{
    super::{
        elements::{REPLY_ADDRESSES, REPLY_PORTS, datagram_sets, listener_map, names},
        expressions::{Side, jump},
    },
    Builder, ChainContent, FIREWALL, FIRST, Layout, RuleContent, SECOND,
};

/// The priority of the chains: after `raw`, so that the chains see what other programs exempt from
/// connection tracking, and before connection tracking (-200).
const BEFORE_TRACKING: i32 = -290;

const DATAGRAMS: &str = "datagrams";
const GATED: &str = "gated-datagrams";
const INSIDE: &str = "inside-datagrams";
const REPLIES: &str = "datagram-replies";

fn end(verdict: Verdict) -> Vec<Expression> {
    vec![Expression::Verdict(verdict)]
}

impl Builder<'_> {
    /// Adds the rules and maps for datagrams, if a proxy runs.
    pub(super) fn add_datagrams(&self, layout: &mut Layout) {
        let Some(listener) = self.config.listeners.values().next().map(SocketAddr::ip) else { return };
        datagram_sets(&self.table, self.config.family).for_each(|set| layout.add_set(set));
        let to = self.expressions;
        let of_listener = |side| to.in_range(side, &listener.into(), Comparison::Equal);
        let is_udp = to.is_of(Protocol::Udp);
        let requests = [&is_udp[..], &[jump(DATAGRAMS)]].concat();
        let replies = [&is_udp[..], &of_listener(Side::Source), &end(Verdict::Goto(REPLIES.to_owned()))].concat();
        let mut base = |name: &str, kind, hook, rules: Vec<Vec<Expression>>| {
            let base = Some(BaseChain { kind, hook, priority: BEFORE_TRACKING, policy: Policy::Accept });
            let rules = rules.into_iter().map(Into::into).collect();
            layout.chains.insert(name.to_owned(), ChainContent { base, rules });
        };
        base("datagrams-prerouting", ChainType::Filter, Hook::Prerouting, vec![requests.clone()]);
        // The chain has the type `route`, because the kernel chose the route for the old address.
        base("datagrams-output", ChainType::Route, Hook::Output, vec![replies, requests]);
        let gated = [
            &to.is_protocol_in(names::GATE)[..],
            // The kernel would turn the absent checksum into a wrong one.
            &to.has_udp_checksum(),
            &end(Verdict::Goto(GATED.to_owned())),
        ];
        let rules = vec![
            // Redirected datagrams between programs of the node come here a second time. Other
            // programs serve the datagrams that they exempt from connection tracking.
            [to.is_untracked(), end(Verdict::Return)].concat(),
            // No datagram reaches a listener except through the address of a Service.
            [of_listener(Side::Destination), end(Verdict::Drop)].concat(),
            gated.concat(),
        ];
        layout.add_chain(DATAGRAMS, rules);
        let is_inside = |source: Vec<Expression>| {
            [self.has_target(Lookup::Inside), source, end(Verdict::Goto(INSIDE.to_owned()))].concat().into()
        };
        let mut rules = vec![RuleContent::from(vec![jump(FIREWALL)])];
        rules.extend(self.sources_inside().map(is_inside));
        rules.extend(self.redirect_datagram(Lookup::Service, listener));
        layout.add_chain(GATED, rules);
        layout.add_chain(INSIDE, self.redirect_datagram(Lookup::Inside, listener).into_iter().collect());
        let reply = vec![
            to.source_port(FIRST),
            to.lookup(REPLY_ADDRESSES, FIRST, FIRST),
            to.set_address(Side::Source, FIRST),
            to.source_port(FIRST),
            to.lookup(REPLY_PORTS, FIRST, FIRST),
            to.set_port(Side::Source, FIRST),
            Expression::NoTrack,
            Expression::Verdict(Verdict::Accept),
        ];
        layout.add_chain(REPLIES, vec![reply, end(Verdict::Drop)]);
    }

    /// Sends a datagram to the listener for its destination, unless it goes to an address of the
    /// node: it may be a reply to a masqueraded client.
    fn redirect_datagram(&self, lookup: Lookup, listener: IpAddr) -> Option<RuleContent> {
        let to = self.expressions;
        let mut rule = vec![
            to.address(Side::Destination, FIRST),
            to.destination_port(FIRST.after(to.address_bytes())),
            to.lookup(listener_map(lookup)?, FIRST, SECOND),
        ];
        if self.config.has_fib {
            rule.extend(to.is_not_local(Side::Destination));
        } else {
            rule.extend([to.address(Side::Destination, FIRST), to.is_not_in(names::NODE_ADDRESSES, FIRST)]);
        }
        rule.extend([
            to.set_port(Side::Destination, SECOND),
            Expression::Immediate { to: FIRST, value: listener.into() },
            to.set_address(Side::Destination, FIRST),
            Expression::NoTrack,
            Expression::Verdict(Verdict::Accept),
        ]);
        Some(RuleContent::with_comment(rule, "the proxy, which answers from the address that the client used"))
    }
}
