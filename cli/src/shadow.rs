//! `headgatectl shadow`: what the other proxies of nodes in standby do.

use headgate_proto::v1::NodeVerification;

use crate::answer::{Failure, Session};
use crate::args::VerifyArgs;
use crate::render::{self, thousands};
use crate::verify::ask;

pub(crate) async fn run(session: &mut Session<'_>, wanted: &VerifyArgs) -> Result<(), Failure> {
    let mut nodes = ask(session, wanted).await?.nodes;
    nodes.retain(|node| node.shadow.is_some());
    if session.output.is_data() {
        session.write_data(&nodes)?;
    } else if !nodes.is_empty() {
        let (shown, more) = render::limited(&nodes, wanted.limit);
        session.write(&(render::shadows(shown, session.style) + &more))?;
    }
    result(&nodes, wanted.node.as_deref())
}

/// Returns the failure, which has the exit code. Success means that the rules of all nodes agree.
fn result(nodes: &[NodeVerification], wanted: Option<&str>) -> Result<(), Failure> {
    if nodes.is_empty() {
        let which = wanted.map_or_else(|| "no node is".to_owned(), |node| format!("node {node} is not"));
        return Err(Failure::NotFound(format!(
            "{which} in standby: `headgatectl verify` verifies nodes that Headgate programs"
        )));
    }
    let count = |result| nodes.iter().filter(|node| node.result == result).count() as u64;
    let (all, drift, unverified) = (thousands(nodes.len() as u64), count("drift"), count("unverified"));
    let mut problems = Vec::new();
    if drift > 0 {
        problems.push(format!(
            "differences on {} of {all} nodes: the other proxy does not do what the API requires, or is set otherwise than Headgate",
            thousands(drift)
        ));
    }
    if unverified > 0 {
        problems.push(format!("{} of {all} nodes not compared, for the reasons above", thousands(unverified)));
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::Faulty(problems.join("\n"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_that_agree_are_a_success() {
        let node = |result: &str| NodeVerification { result: result.into(), ..NodeVerification::default() };
        let code = |nodes: &[NodeVerification]| result(nodes, None).err().map(|failure| failure.exit_code());
        assert_eq!(code(&[node("verified")]), None);
        assert_eq!(code(&[node("verified"), node("drift")]), Some(1));
        assert_eq!(code(&[node("unverified")]), Some(1));
        assert_eq!(code(&[]), Some(1));
    }
}
