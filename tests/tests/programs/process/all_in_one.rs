//! `headgate`: the control plane and the agent of one node in one process.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::UnixStream,
    },
};

use headgate_tests::apiserver::{ApiServer, Restart};
use nix::unistd::{Uid, setfsuid};

use super::{
    proxy::{self, exchange, serve},
    rig::{Rig, eventually, node, service, slice},
};

const CLUSTER_IP: &str = "10.96.0.1:80";

/// A node with the Service ns/web, on which no program runs.
fn rig() -> Rig {
    let mut rig = proxy::rig();
    rig.stop_control_plane();
    serve(&rig);
    rig
}

#[test]
fn one_program_forwards_connections_by_a_folder_of_manifests_and_serves_all_pages() {
    let rig = rig();
    let headgate = rig.all_in_one(&[&rig.manifests(), "--proxy-mode=nftables"]);
    eventually("the Service forwards", || exchange(&rig, CLUSTER_IP, 1));

    rig.until_said(&[&rig.socket(), "agents"], &["fleet: 1 of 1 node up to date"]);
    assert_eq!(rig.until_health("/healthz", 200)["nodeEligible"], true);
    assert_eq!(rig.replica_page("/readyz").unwrap().0, 200);
    let (_, of_control_plane) = rig.replica_page("/metrics").unwrap();
    assert!(of_control_plane.contains("\nheadgate_streams 1\n"), "{of_control_plane}");
    rig.until_programmed();

    // The program follows edits of the folder, and does not cut connections.
    let mut open = exchange(&rig, CLUSTER_IP, 1).unwrap();
    rig.put("more", &(service("more", 2, "") + "---\n" + &slice("more", &[("node-a", 1)], "")));
    eventually("the new Service forwards", || exchange(&rig, "10.96.0.2:80", 1));

    // The rules stay after the end, so connections continue.
    let (status, log) = headgate.terminate();
    assert!(status.success() && log.contains("stopped; the rules stay in the kernel"), "{status}: {log}");
    open.write_all(b"x").unwrap();
    open.read_exact(&mut [0]).unwrap();
    exchange(&rig, CLUSTER_IP, 1).unwrap();
    let (status, log) = rig.all_in_one(&[&rig.manifests(), "--cleanup"]).ended();
    assert!(status.success() && rig.node_port_addresses().is_err(), "{status}: {log}");
}

#[test]
fn one_program_follows_an_api_server_and_forwards_while_the_server_is_down() {
    let rig = rig();
    let api = rig.run(|| ApiServer::start().unwrap());
    let apply = |text: &str| api.apply(serde_saphyr::from_str(text).unwrap()).unwrap();
    for text in [node(""), service("web", 1, ""), slice("web", &[("node-a", 1)], "")] {
        apply(&text);
    }
    let kubeconfig = format!("--kubeconfig={}", rig.write("kubeconfig", &api.kubeconfig()).display());
    let _headgate = rig.all_in_one(&["--source=kubernetes", &kubeconfig, "--proxy-mode=nftables"]);
    eventually("the Service forwards", || exchange(&rig, CLUSTER_IP, 1));
    api.stop();
    exchange(&rig, CLUSTER_IP, 1).unwrap();
    rig.run(|| api.restart(&Restart::KeepHistory).unwrap());
    apply(&service("more", 2, ""));
    apply(&slice("more", &[("node-a", 1)], ""));
    eventually("the new Service forwards", || exchange(&rig, "10.96.0.2:80", 1));
}

#[test]
fn open_connections_of_mode_userspace_may_end_before_the_program_ends() {
    let rig = rig();
    let headgate = rig.all_in_one(&[&rig.manifests(), "--proxy-mode=userspace", proxy::POD_RANGES]);
    let mut open = eventually("the program carries a connection", || {
        let open = exchange(&rig, CLUSTER_IP, 1)?;
        // On a busy machine, the connection may have gone past the program.
        let list = rig.headgatectl(&[&rig.socket(), "connections", "node-a"])?;
        if list.contains(CLUSTER_IP) { Ok(open) } else { Err(list) }
    });
    headgate.signal(nix::sys::signal::Signal::SIGTERM);
    headgate.until_logged("stopping");
    // The control plane still serves.
    assert_eq!(rig.replica_page("/readyz").unwrap().0, 200);
    open.write_all(b"x").unwrap();
    open.read_exact(&mut [0]).unwrap();
    drop(open);
    let (status, log) = headgate.ended();
    assert!(status.success() && log.contains("all connections of the proxy have ended"), "{status}: {log}");
}

#[test]
fn a_part_that_cannot_start_ends_the_program() {
    let rig = rig();
    for (argument, reason) in [
        ("--runtime-dir=/proc/nothing", "cannot listen on /proc/nothing/agents.sock"),
        ("--runtime-dir=/tmp", "others may enter the folder"),
        ("--config=/missing.yaml", "/missing.yaml"),
    ] {
        let (status, log) = rig.all_in_one(&[&rig.manifests(), argument]).ended();
        assert!(status.code() == Some(1) && log.contains(reason), "{argument}: {status}: {log}");
    }
    let (status, log) = rig.all_in_one(&["--source=kubernetes", "--kubeconfig=/missing"]).ended();
    let times = log.matches("the kubeconfig /missing cannot be used").count();
    assert!(status.code() == Some(1) && times == 1, "{status}: {log}");
}

#[test]
fn the_program_of_one_node_trusts_no_other_user_of_the_node() {
    let rig = Rig::new();
    let _headgate = rig.all_in_one(&[&rig.manifests()]);
    let socket = rig.path("run/inspect.sock");
    rig.until_said(&[&rig.socket(), "agents"], &["fleet: 1 of 1 node up to date"]);
    for path in [rig.path("run"), socket.clone(), rig.path("run/agents.sock")] {
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.permissions().mode() & 0o077, found.uid()), (0, 0), "{}", path.display());
    }
    // No port of the program takes the place of the sockets: only its pages listen.
    let listening = rig.tool("ss", &["-Hltn"]);
    let ports: Vec<&str> =
        listening.lines().filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()).collect();
    assert!(ports.iter().all(|port| ["10256", "10249", "10262", "7480"].contains(port)), "{listening}");
    // Another user cannot open the socket, also if the path to it is open.
    fs::set_permissions(rig.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(rig.path("run"), fs::Permissions::from_mode(0o755)).unwrap();
    let connect = |path: &std::path::Path| UnixStream::connect(path).map(drop).map_err(|error| error.kind());
    assert_eq!(connect(&socket), Ok(()));
    let refused = std::thread::scope(|scope| {
        // The rights of another user, for this thread only.
        let other = scope.spawn(|| {
            setfsuid(Uid::from_raw(65_534));
            connect(&socket)
        });
        other.join().unwrap()
    });
    assert_eq!(refused, Err(ErrorKind::PermissionDenied));
    // A second program does not take the sockets of the first one.
    fs::set_permissions(rig.path("run"), fs::Permissions::from_mode(0o700)).unwrap();
    let (status, log) = rig.all_in_one(&[&rig.manifests()]).ended();
    assert!(!status.success() && log.contains("another program serves this socket"), "{log}");
    rig.headgatectl(&[&rig.socket(), "agents"]).unwrap();
}
