//! Explanations of the table's cases: what an agent says about a packet must agree with what the
//! case expects of the packet.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result, ensure};
use headgate_proto::v1;

use super::case::{Case, Expect, SourceAddress};
use crate::testbed::{
    Family, Testbed, Transport,
    manifests::{NAMESPACE, Via},
    plan,
};

/// Asks the agents to explain the packets of all cases, each for its ports and families.
///
/// # Errors
/// Some explanations disagree with their cases. The error lists all of them.
pub fn agree(bed: &Testbed, cases: &[Case]) -> Result<()> {
    if std::env::var_os("HEADGATE_PROGRAMS").is_some() {
        println!("explanations are not compared: a program of another version may have none (HEADGATE_PROGRAMS)");
        return Ok(());
    }
    let mut jobs = Vec::new();
    for case in cases.iter().filter(|case| !case.excluded.iter().any(|(backend, _)| *backend == bed.backend())) {
        for family in case.families {
            for port in case.ports {
                jobs.push((
                    case,
                    *family,
                    question(bed, case, *family, port)?,
                    bed.service(case.service)?.port(port)?.transport,
                ));
            }
        }
    }
    let questions = jobs.iter().map(|(_, _, question, _)| question.clone()).collect();
    let answers = bed.explain(questions)?;
    ensure!(answers.len() == jobs.len(), "{} of {} packets were explained", answers.len(), jobs.len());
    let mut failures = Vec::new();
    for ((case, family, (_, query), transport), answer) in jobs.iter().zip(answers) {
        if let Err(error) = check(bed, case, *family, query, *transport, &answer) {
            failures.push(format!("{case:?} over {family}: {error:#}: {answer:#?}"));
        }
    }
    ensure!(failures.is_empty(), "{} explanations are wrong:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}

/// Returns the node that gets the packet, and the question to its agent.
fn question(bed: &Testbed, case: &Case, family: Family, port: &str) -> Result<(&'static str, v1::ExplainQuery)> {
    let service = bed.service(case.service)?;
    let node = match case.via {
        Via::NodePort(node) => node,
        _ => plan::entry_of(case.from).context("no node gets the packet")?,
    };
    let octets = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let source = if node == case.from {
        Vec::new()
    } else {
        octets(plan::address(case.from).context("the client has no address")?.of(family))
    };
    let to: SocketAddr = service.socket_address(case.via, family, port)?;
    let protocol = match service.port(port)?.transport {
        Transport::Tcp | Transport::Http => "TCP",
        Transport::Udp => "UDP",
        Transport::Sctp => "SCTP",
    };
    let query = v1::ExplainQuery {
        service: Some(v1::ServiceKey { namespace: NAMESPACE.to_owned(), name: case.service.to_owned() }),
        source: source.into(),
        source_is_local_pod: false,
        destination: octets(to.ip()).into(),
        port: to.port().into(),
        protocol: protocol.to_owned(),
    };
    Ok((node, query))
}

fn check(
    bed: &Testbed,
    case: &Case,
    family: Family,
    query: &v1::ExplainQuery,
    transport: Transport,
    answer: &[v1::Explanation],
) -> Result<()> {
    let [v1::Explanation { fate, steps, endpoints, .. }] = answer else {
        // Agents do not serve Services such as headless ones.
        ensure!(answer.is_empty() && !matches!(case.expect, Expect::Answered { .. }), "one explanation is expected");
        return Ok(());
    };
    let is_node_port = matches!(case.via, Via::NodePort(_) | Via::Localhost);
    match &case.expect {
        Expect::Answered { .. } if bed.backend().refuses_sctp() && transport == Transport::Sctp => {
            ensure!(fate == "rejected", "mode userspace refuses SCTP");
        }
        Expect::Answered { by, source, .. } => {
            ensure!(fate == "forwarded", "the packet is answered");
            let address = |name: &&str| plan::address(name).map(|addresses| addresses.of(family).to_string());
            let expected: BTreeSet<String> = by.iter().filter_map(address).collect();
            let chosen = endpoints.iter().filter(|endpoint| endpoint.is_chosen);
            let chosen: BTreeSet<String> = chosen.map(|endpoint| endpoint.address.clone()).collect();
            ensure!(chosen == expected, "{expected:?} answer");
            let last = steps.last().context("no step")?;
            let is_carried = bed.backend().carries_to(transport, case.via, by);
            // If the only endpoint is the client itself, the step names both source addresses.
            let is_kept = !query.source.is_empty() && last.contains("The endpoint sees the source address");
            let is_hairpin = last.contains("If the node chooses the client itself");
            let expects_kept = *source == SourceAddress::Kept && !is_carried;
            let is_node =
                plan::node_of(case.from).is_some_and(|node| node.name == case.from) && query.source.is_empty();
            ensure!(is_kept == expects_kept || is_hairpin || is_node, "the source address is {source:?}");
        }
        // No program on the node listens at a port that no Service has.
        Expect::Refused if is_node_port && fate == "not served" => {}
        Expect::Refused => ensure!(fate == "rejected", "the packet is refused"),
        Expect::Dropped | Expect::Gone => {
            ensure!(fate == "dropped" || fate == "not served", "the packet gets no answer");
        }
    }
    Ok(())
}
