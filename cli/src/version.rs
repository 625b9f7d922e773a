//! `headgatectl version`: the versions of this program, of the replicas and of the agents.

use std::collections::BTreeSet;
use std::io::Write;

use headgate_proto::v1::GetStatusResponse;
use serde_json::{Value, json};

use crate::answer::{Failure, Session, data};
use crate::args::Args;
use crate::render::{self, Style, counted};

const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// Prints the version of this program, even if no replica answers.
pub(crate) async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let status = match Session::open(args, style, out).await {
        Ok(mut session) => session.status(0).await,
        Err(failure) => Err(failure),
    };
    let (status, failure) = match status {
        Ok(status) => (Some(status), None),
        Err(failure) => (None, Some(failure)),
    };
    let text = match args.output.is_data() {
        true => data(args.output, &json(status), false)?,
        false => render::fit(&text(status, style), style).into_owned(),
    };
    out.write_all(text.as_bytes())?;
    failure.map_or(Ok(()), Err)
}

/// The names and versions of the replicas. A replica that does not answer has no version.
fn replicas(status: &GetStatusResponse) -> Vec<(&str, &str)> {
    let others = status.replicas.iter().map(|other| (other.replica.as_str(), other.build.as_str()));
    [(status.replica.as_str(), status.build.as_str())].into_iter().chain(others).collect()
}

fn json(status: Option<GetStatusResponse>) -> Value {
    let status = status.unwrap_or_default();
    let replica = |(name, version)| json!({ "replica": name, "version": version });
    let replicas: Vec<Value> = replicas(&status).into_iter().map(replica).collect();
    json!({ "client": CLIENT, "replicas": replicas, "agents": status.fleet.unwrap_or_default().agent_versions })
}

fn text(status: Option<GetStatusResponse>, style: Style) -> String {
    let mut rows = vec![("headgatectl".to_owned(), CLIENT)];
    let Some(status) = status else { return render::versions(&rows, style) };
    let agents = status.fleet.as_ref().map(|fleet| &fleet.agent_versions[..]).unwrap_or_default();
    rows.extend(replicas(&status).into_iter().map(|(name, version)| (format!("replica {name}"), version)));
    rows.extend(agents.iter().map(|of| (counted(of.agents, "agent"), of.version.as_str())));
    let known: BTreeSet<&str> =
        rows.iter().map(|(_, version)| *version).filter(|version| !version.is_empty()).collect();
    let silent = rows.iter().filter(|(_, version)| version.is_empty()).count();
    let mut skew = match known.len() {
        1 if silent == 0 => format!("All have version {CLIENT}"),
        1 => format!("All that answer have version {CLIENT}"),
        _ => format!("Versions differ: {}", known.into_iter().collect::<Vec<_>>().join(", ")),
    };
    if silent > 0 {
        skew += &format!("; unknown: {}", counted(silent as u64, "version"));
    }
    format!("{}{skew}.\n", render::versions(&rows, style))
}

#[cfg(test)]
mod tests {
    use headgate_proto::v1::{AgentVersion, FleetInfo, ReplicaInfo};

    use super::*;

    fn skew(replicas: &[&str], agents: &[(&str, u64)]) -> String {
        let build = |build: &&str| ReplicaInfo { build: (*build).into(), ..ReplicaInfo::default() };
        let agent_versions =
            agents.iter().map(|&(version, agents)| AgentVersion { version: version.into(), agents }).collect();
        let status = GetStatusResponse {
            build: CLIENT.into(),
            replicas: replicas.iter().map(build).collect(),
            fleet: Some(FleetInfo { agent_versions, ..FleetInfo::default() }),
            ..GetStatusResponse::default()
        };
        text(Some(status), Style::default()).lines().last().unwrap().replace(CLIENT, "V")
    }

    #[test]
    fn one_sentence_says_whether_versions_differ() {
        assert_eq!(skew(&[CLIENT], &[(CLIENT, 5000)]), "All have version V.");
        assert_eq!(skew(&[""], &[]), "All that answer have version V; unknown: 1 version.");
        assert_eq!(
            skew(&["9.9.9", ""], &[("0.0.1", 1), (CLIENT, 2)]),
            "Versions differ: 0.0.1, V, 9.9.9; unknown: 1 version."
        );
    }
}
