//! `headgatectl version`: the versions of this program, of the replicas and of the agents.

use std::io::Write;

use headgate_proto::v1::GetStatusResponse;
use serde::Serialize;

use crate::answer::{Failure, Session, write_data};
use crate::args::Args;
use crate::render::{self, Style, counted, thousands};

const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// The answer, as JSON and YAML have it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Versions {
    client: &'static str,
    replicas: Vec<ReplicaVersion>,
    agents: Vec<AgentVersion>,
}

#[derive(Debug, Serialize)]
struct ReplicaVersion {
    replica: String,
    /// Empty if the replica does not answer.
    version: String,
}

#[derive(Debug, Serialize)]
struct AgentVersion {
    version: String,
    agents: u64,
}

/// Prints the version of this program, even if no replica answers.
pub(crate) async fn run(args: &Args, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let known = match Session::open(args, style, out).await {
        Ok(mut session) => session.status().await,
        Err(failure) => Err(failure),
    };
    let (versions, failure) = match known {
        Ok(status) => (Versions::of(status), None),
        Err(failure) => (Versions { client: CLIENT, ..Versions::default() }, Some(failure)),
    };
    if args.output.is_data() {
        write_data(out, args.output, &versions)?;
    } else {
        let mut text = versions.table(style);
        if failure.is_none() {
            text += &(versions.skew() + "\n");
        }
        out.write_all(render::fit(&text, style).as_bytes())?;
    }
    failure.map_or(Ok(()), Err)
}

impl Versions {
    fn of(status: GetStatusResponse) -> Self {
        let asked = (status.replica, status.build);
        let others = status.replicas.into_iter().map(|other| (other.replica, other.build));
        let agents = status.fleet.unwrap_or_default().agent_versions.into_iter();
        Self {
            client: CLIENT,
            replicas: [asked]
                .into_iter()
                .chain(others)
                .map(|(replica, version)| ReplicaVersion { replica, version })
                .collect(),
            agents: agents.map(|of| AgentVersion { version: of.version, agents: of.agents }).collect(),
        }
    }

    fn table(&self, style: Style) -> String {
        let mut rows = vec![("headgatectl".to_owned(), CLIENT.to_owned())];
        rows.extend(self.replicas.iter().map(|of| (format!("replica {}", of.replica), of.version.clone())));
        rows.extend(self.agents.iter().map(|of| (counted(of.agents, "agent"), of.version.clone())));
        render::versions(&rows, style)
    }

    /// Says whether the versions differ.
    fn skew(&self) -> String {
        let silent = self.replicas.iter().filter(|of| of.version.is_empty()).count() as u64;
        let others = |of: &&ReplicaVersion| !of.version.is_empty() && of.version != CLIENT;
        let replicas = self.replicas.iter().filter(others).count() as u64;
        let all: u64 = self.agents.iter().map(|of| of.agents).sum();
        let agents: u64 = self.agents.iter().filter(|of| of.version != CLIENT).map(|of| of.agents).sum();
        let counts = [(replicas, self.replicas.len() as u64, "replica"), (agents, all, "agent")];
        let differ: Vec<String> = counts
            .into_iter()
            .filter(|(count, ..)| *count > 0)
            .map(|(count, all, what)| format!("{} of {}", thousands(count), counted(all, what)))
            .collect();
        let mut text = match &differ[..] {
            [] if silent > 0 => format!("All that answer have version {CLIENT}"),
            [] => format!("All have version {CLIENT}"),
            differ => format!("Another version than headgatectl's {CLIENT}: {}", differ.join(", ")),
        };
        if silent > 0 {
            text += &format!("; unknown: {}", counted(silent, "replica"));
        }
        text + "."
    }
}

#[cfg(test)]
mod tests {
    use headgate_proto::v1::{self, FleetInfo, ReplicaInfo};

    use super::*;

    fn skew(replicas: &[&str], agents: &[(&str, u64)]) -> String {
        let build = |build: &&str| ReplicaInfo { build: (*build).into(), ..ReplicaInfo::default() };
        let agent_versions =
            agents.iter().map(|&(version, agents)| v1::AgentVersion { version: version.into(), agents }).collect();
        let status = GetStatusResponse {
            build: CLIENT.into(),
            replicas: replicas.iter().map(build).collect(),
            fleet: Some(FleetInfo { agent_versions, ..FleetInfo::default() }),
            ..GetStatusResponse::default()
        };
        Versions::of(status).skew().replace(CLIENT, "V")
    }

    #[test]
    fn one_sentence_says_whether_versions_differ() {
        assert_eq!(skew(&[CLIENT], &[(CLIENT, 5000)]), "All have version V.");
        assert_eq!(skew(&[""], &[]), "All that answer have version V; unknown: 1 replica.");
        assert_eq!(
            skew(&["9.9.9", ""], &[("0.0.1", 1), (CLIENT, 4999)]),
            "Another version than headgatectl's V: 1 of 3 replicas, 1 of 5,000 agents; unknown: 1 replica."
        );
    }
}
