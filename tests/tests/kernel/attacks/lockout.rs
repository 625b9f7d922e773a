//! A tenant's Service takes the address and port at which agents reach the control plane. The agent
//! must still hear that the Service was deleted, also after a restart.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Result, ensure};
use headgate_tests::testbed::manifests::{NAMESPACE, Port, Service};
use headgate_tests::testbed::plan::{self, CONTROL, CONTROL_PORT, INSPECT_PORT, LINE_PORT};
use headgate_tests::testbed::process::program;
use headgate_tests::testbed::relay;
use headgate_tests::testbed::{AgentSetup, Backend, Manifests, Outcome, Request, Testbed, Transport};
use headgate_tests::uml;
use serde_json::{Value, json};

const NODE: &str = "node-a";
/// A machine with a relay to the control plane, whose address the control plane does not know.
const RELAY: &str = "outside-1";

fn address_of(machine: &str) -> SocketAddr {
    SocketAddr::new(plan::address(machine).unwrap().v4.into(), CONTROL_PORT)
}

/// A Service with the control plane's port and another one, at the external address of the patch.
fn hostile(patch: fn(&Service) -> Value) -> Service {
    let port = |name, port| Port { name, transport: Transport::Tcp, port, target_port: LINE_PORT };
    let ports = vec![port("taken", CONTROL_PORT), port("other", 80)];
    Service { ports, patch: Some(patch), ..Service::new("hostile", &["b1"]) }
}

/// The problem of the hostile Service, as `headgatectl status` shows it.
fn problem(bed: &Testbed) -> Result<Option<String>> {
    let mut command = Command::new(program("headgatectl")?);
    let server = format!("http://{}:{INSPECT_PORT}", address_of(CONTROL).ip());
    command.args(["--server", &server, "--output", "json", "status"]);
    let status: Value = serde_json::from_str(&bed.machines().machine(CONTROL)?.output(command)?)?;
    let object = format!("Service {NAMESPACE}/hostile");
    let problems = status["problems"].as_array().cloned().unwrap_or_default();
    let of_service = problems.into_iter().find(|problem| problem["object"] == *object);
    Ok(of_service.map(|problem| ["field", "message"].map(|name| problem[name].as_str().unwrap_or_default()).join(": ")))
}

/// Runs the attack on an agent that reaches the control plane at an address.
fn attack(bed: &Testbed, taken: SocketAddr, patch: fn(&Service) -> Value) -> Result<()> {
    let setup = AgentSetup { control_plane: Some(taken), ..AgentSetup::default() };
    bed.start_programs(NODE, &setup)?;
    bed.update(|manifests| manifests.add(hostile(patch)))?;
    let found = problem(bed)?.unwrap_or_default();
    let names_it = found.starts_with(&format!("spec.externalIPs: {}", taken.ip())) && found.contains("is reserved");
    ensure!(names_it, "{found:?} is not the problem of the Service");
    // The stream breaks, and the agent connects again.
    bed.stop_control_plane()?;
    bed.start_control_plane()?;
    bed.wait_programmed()?;
    let is_served = || {
        let other = Request::new(Transport::Tcp, SocketAddr::new(taken.ip(), 80));
        let outcome = bed.machines().ask("a1", &other)?;
        Ok::<_, anyhow::Error>(matches!(&outcome, Outcome::Answered(answer) if answer.server == "b1"))
    };
    // In mode IPVS, the node would hold the address itself.
    ensure!(is_served()? == (bed.backend() != Backend::Ipvs), "the other port of the Service");
    // The agent begins with the state on disk, while no control plane runs.
    bed.stop_agent(NODE)?;
    bed.stop_control_plane()?;
    bed.start_agent_with(NODE, &setup)?;
    bed.start_control_plane()?;
    bed.wait_programmed()?;
    bed.kill_agent(NODE)?;
    bed.start_programmed(NODE, &setup)?;
    bed.update(|manifests| manifests.remove("hostile").map(drop))?;
    ensure!(!is_served()?, "the deleted Service is served");
    ensure!(problem(bed)?.is_none(), "{:?}", problem(bed)?);
    Ok(())
}

fn run(backend: Backend) {
    let test = || {
        let bed = Testbed::machines_only(backend, Manifests::default()).unwrap();
        let own: fn(&Service) -> Value = |_| json!({"spec": {"externalIPs": [address_of(CONTROL).ip()]}});
        attack(&bed, address_of(CONTROL), own).unwrap();
        bed.stop_agent(NODE).unwrap();
        bed.stop_control_plane().unwrap();
        let machine = bed.machines().machine(RELAY).unwrap();
        relay::start(machine, address_of(RELAY), address_of(CONTROL)).unwrap();
        let relayed: fn(&Service) -> Value = |_| json!({"spec": {"externalIPs": [address_of(RELAY).ip()]}});
        attack(&bed, address_of(RELAY), relayed).unwrap();
    };
    if backend.runs_in_uml() { uml::inside(test) } else { test() }
}

#[test]
fn nftables() {
    run(Backend::Nftables);
}

#[test]
fn iptables() {
    run(Backend::IptablesLegacy);
}

#[test]
fn userspace() {
    run(Backend::Userspace);
}

#[test]
fn ipvs() {
    run(Backend::Ipvs);
}
