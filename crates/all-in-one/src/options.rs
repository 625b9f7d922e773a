//! The command line: options of the control plane and of the agent. The parsers of both programs
//! read the options, so that values have one meaning.

use std::{ffi::OsString, path::PathBuf};

use clap::{Arg, ArgMatches, Command, CommandFactory as _, Parser as _, parser::ValueSource, value_parser};
use headgate_control_plane::{
    options::Options as ControlPlaneOptions,
    serve::{AGENTS_SOCKET, INSPECT_SOCKET},
};
use headgate_node_agent::options::{Options as AgentOptions, with_dashes};

/// The options of the control plane that one node needs.
const OF_CONTROL_PLANE: [&str; 5] = ["source", "kubeconfig", "watch_silence_seconds", "metrics_listen", "replica_name"];

/// The options of the agent that have no meaning here, because the agent uses the control plane of
/// its process. `--kubeconfig` is an option of the control plane.
const NOT_OF_AGENT: [&str; 8] = [
    "control_plane",
    "insecure_loopback",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "enrolment_address",
    "enrolment_token",
    "kubeconfig",
];

/// The options of the agent that run one task. They need no source.
const TASKS: [&str; 3] = ["cleanup", "init_only", "write_config_to"];

/// The parsers require an address, but the sockets take its place.
const LISTEN: &str = "127.0.0.1:0";

/// The default of `--runtime-dir`, which headgatectl knows.
const RUNTIME_DIR: &str = "/run/headgate";

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) control_plane: ControlPlaneOptions,
    pub(crate) agent: AgentOptions,
}

impl Options {
    /// Parses the program's arguments. The first argument is the program's name. Errors: the
    /// arguments are invalid or ask for help. Call [`clap::Error::exit`] to print the message.
    pub(crate) fn read<T: Into<OsString>>(arguments: impl IntoIterator<Item = T>) -> Result<Self, clap::Error> {
        let arguments = arguments.into_iter().map(|argument| with_dashes(argument.into()));
        let matches = command().try_get_matches_from(arguments)?;
        let mut of_agent: Vec<OsString> = vec!["headgate".into()];
        of_agent.extend(["--insecure-loopback".into(), format!("--control-plane=http://{LISTEN}").into()]);
        of_agent.extend(given(&matches, agent_arguments()));
        let mut of_control_plane: Vec<OsString> = vec!["headgate".into()];
        of_control_plane.extend(["--insecure-loopback".into(), format!("--listen={LISTEN}").into()]);
        of_control_plane.extend(["--peers=none".into(), "--drain-grace-ms=0".into()]);
        // A task uses neither the source nor the address.
        if matches.value_source("source").is_none() {
            of_control_plane.push("--source=kubernetes".into());
        }
        of_control_plane.extend(given(&matches, control_plane_arguments()));
        let folder = matches.get_one::<PathBuf>("runtime_dir").cloned().unwrap_or_else(|| RUNTIME_DIR.into());
        let mut agent = AgentOptions::read(of_agent)?;
        agent.control_plane = vec![format!("unix:{}", folder.join(AGENTS_SOCKET).display())];
        let control_plane = ControlPlaneOptions::try_parse_from(of_control_plane)?;
        Ok(Self { control_plane: ControlPlaneOptions { sockets: Some(folder), ..control_plane }, agent })
    }
}

fn control_plane_arguments() -> impl Iterator<Item = Arg> {
    let command = ControlPlaneOptions::command();
    let all: Vec<Arg> = command.get_arguments().cloned().collect();
    all.into_iter().filter(|argument| OF_CONTROL_PLANE.contains(&argument.get_id().as_str()))
}

fn agent_arguments() -> impl Iterator<Item = Arg> {
    let command = AgentOptions::command();
    let all: Vec<Arg> = command.get_arguments().cloned().collect();
    all.into_iter().filter(|argument| !NOT_OF_AGENT.contains(&argument.get_id().as_str()))
}

fn command() -> Command {
    let control_plane = control_plane_arguments().map(|argument| match argument.get_id().as_str() {
        "source" => argument.required(false).required_unless_present_any(TASKS),
        _ => argument,
    });
    Command::new("headgate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Headgate on a single node: the control plane and the node agent in one process, without certificates")
        .args(control_plane.map(|argument| argument.help_heading("Options of the control plane")))
        .arg(
            Arg::new("runtime_dir")
                .long("runtime-dir")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help_heading("Options of the control plane")
                .help(format!(
                    "Folder of the sockets of this program, which only its own user may enter: headgatectl and grpcurl connect to {INSPECT_SOCKET}, and \
                     the agent to {AGENTS_SOCKET} [default: {RUNTIME_DIR}]"
                )),
        )
        .args(agent_arguments())
}

/// The arguments of the command line among `known`, each as `--NAME=VALUE`. Both parsers read the
/// environment themselves.
fn given(matches: &ArgMatches, known: impl Iterator<Item = Arg>) -> Vec<OsString> {
    let mut given = Vec::new();
    for argument in
        known.filter(|argument| matches.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine))
    {
        let Some(name) = argument.get_long() else { continue };
        for value in matches.get_raw(argument.get_id().as_str()).into_iter().flatten() {
            let mut option = OsString::from(format!("--{name}="));
            option.push(value);
            given.push(option);
        }
    }
    given
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::read(["headgate"].iter().chain(arguments))
    }

    #[test]
    fn every_option_reaches_the_part_that_has_it() {
        command().debug_assert();
        let arguments = "--source=files:/tmp --metrics_listen=127.0.0.1:1 --kubeconfig=file --node-name=a \
                         --proxy-mode=userspace --masquerade-all --cluster-cidr=10.0.0.0/8,fd00::/8 -v4 --log-format=json --runtime-dir=/x";
        let Options { control_plane, agent } = read(&arguments.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!(control_plane.source.to_string(), "files:/tmp");
        assert_eq!(control_plane.metrics_listen.port(), 1);
        assert_eq!(control_plane.kubeconfig.as_deref(), Some("file".as_ref()));
        assert_eq!(control_plane.listen().sockets.as_deref(), Some("/x".as_ref()));
        assert_eq!(agent.control_plane, ["unix:/x/agents.sock"]);
        control_plane.security().unwrap();
        agent.control_planes().unwrap();
        assert_eq!(agent.node_name.as_deref(), Some("a"));
        let settings = agent.configured().unwrap().settings;
        assert!(settings.masquerade_all && settings.mode == headgate_node_agent::options::ProxyMode::Userspace);
        assert_eq!(agent.kube_proxy.given, ["--proxy-mode", "--cluster-cidr", "--masquerade-all", "--v"]);
    }

    #[test]
    fn only_tasks_need_no_source_and_options_for_several_replicas_do_not_exist() {
        assert!(read(&[]).unwrap_err().to_string().contains("--source"));
        assert!(read(&["--cleanup"]).unwrap().agent.cleanup);
        for option in [
            "--tls-cert=x",
            "--control-plane=http://127.0.0.1:1",
            "--inspect-listen=127.0.0.1:1",
            "--insecure-loopback",
        ] {
            let error = read(&["--source=kubernetes", option]).unwrap_err().to_string();
            assert!(error.contains("unexpected argument"), "{error}");
        }
        let default = read(&["--source=kubernetes"]).unwrap().control_plane.listen().sockets;
        assert_eq!(default.as_deref(), Some(RUNTIME_DIR.as_ref()));
    }
}
