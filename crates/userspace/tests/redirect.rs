//! The engine behind real rules, in a network namespace of its own: the form of listeners and
//! redirects that the crate's documentation recommends. The test needs `unshare`, `ip` and `nft`.

#![allow(clippy::unwrap_used)]

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    process::Command,
    sync::Arc,
    thread,
    time::Duration,
};

use headgate_userspace::{
    Destination, Protocol, Scope, ServiceId, ServiceSettings, Services, TcpProxy, TcpSettings, UdpProxy, UdpSettings,
};
use rustix::net::{AddressFamily, SocketType};

/// Set in the process that runs in the namespace.
const INSIDE: &str = "HEADGATE_TEST_INSIDE_NAMESPACE";

/// Runs this test again in a new network namespace. Returns true inside of it.
fn is_inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net"]).arg(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env(INSIDE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn set_up() {
    for command in [
        "ip link set lo up",
        "ip address add 10.0.0.1/32 dev lo",
        "ip route add 10.96.0.0/16 dev lo src 10.0.0.1",
        "ip route add local 169.254.77.0/24 dev lo",
        "ip -6 address add fd00::1/128 dev lo nodad",
        "ip -6 route add fd00:96::/64 dev lo src fd00::1",
        "ip -6 route add local fd00:77::1/128 dev lo",
        // The address of a UDP Service. No interface has it.
        "ip route add local 10.96.0.53/32 dev lo",
        "nft add table ip test",
        "nft add chain ip test output { type nat hook output priority -100 ; }",
        "nft add rule ip test output ip daddr 10.96.0.10 tcp dport 80 dnat to 169.254.77.1:10258",
        "nft add table ip6 test",
        "nft add chain ip6 test output { type nat hook output priority -100 ; }",
        "nft add rule ip6 test output ip6 daddr fd00:96::10 tcp dport 80 dnat to [fd00:77::1]:10258",
    ] {
        run(command);
    }
}

/// An endpoint that answers one byte of each connection with the text.
fn endpoint(address: &str, text: &'static str) -> SocketAddr {
    let listener = TcpListener::bind(address).unwrap();
    let bound = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
        }
    });
    bound
}

/// A listener on an address that a local route makes local. IPv6 needs IPV6_FREEBIND for that.
fn listen(address: SocketAddr) -> OwnedFd {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_freebind(&socket, true).unwrap();
    }
    rustix::net::bind(&socket, &address).unwrap();
    rustix::net::listen(&socket, 4096).unwrap();
    socket
}

fn answer(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"?")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn redirected_connections_reach_their_service_and_direct_ones_are_reset() {
    if !is_inside("redirected_connections_reach_their_service_and_direct_ones_are_reset") {
        return;
    }
    set_up();
    let services = Arc::new(Services::default());
    let proxy = TcpProxy::start(&TcpSettings::default(), &services).unwrap();
    for (id, address, listener, endpoint) in [
        (ServiceId(4), "10.96.0.10:80", "169.254.77.1:10258", endpoint("127.0.0.1:0", "four")),
        (ServiceId(6), "[fd00:96::10]:80", "[fd00:77::1]:10258", endpoint("[::1]:0", "six")),
    ] {
        services.set_service(id, ServiceSettings::default());
        services.set_address(id, Scope::default(), Protocol::Tcp, address.parse().unwrap());
        services.set_endpoint(id, endpoint, 1);
        proxy.listen(listen(listener.parse().unwrap()), Scope::default(), Destination::Original).unwrap();
    }
    assert_eq!(answer("10.96.0.10:80").unwrap(), "four");
    assert_eq!(answer("[fd00:96::10]:80").unwrap(), "six");
    for listener in ["169.254.77.1:10258", "[fd00:77::1]:10258"] {
        assert_eq!(answer(listener).unwrap_err().kind(), ErrorKind::ConnectionReset, "{listener} serves nothing");
    }
    assert_eq!(proxy.stats().unknown_destination, 2);
}

#[test]
fn a_udp_reply_comes_from_the_service_address_that_no_interface_has() {
    if !is_inside("a_udp_reply_comes_from_the_service_address_that_no_interface_has") {
        return;
    }
    set_up();
    let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
    let services = Arc::new(Services::default());
    services.set_service(ServiceId(1), ServiceSettings::default());
    services.set_address(ServiceId(1), Scope::default(), Protocol::Udp, "10.96.0.53:53".parse().unwrap());
    services.set_endpoint(ServiceId(1), echo.local_addr().unwrap(), 1);
    thread::spawn(move || {
        let mut buffer = [0; 100];
        while let Ok((count, from)) = echo.recv_from(&mut buffer) {
            echo.send_to(&buffer[..count], from).unwrap();
        }
    });
    let proxy = UdpProxy::start(&UdpSettings::default(), &services).unwrap();
    let address = "10.96.0.53:53".parse().unwrap();
    proxy.listen(UdpSocket::bind(address).unwrap(), Scope::default(), address).unwrap();
    let client = UdpSocket::bind("10.0.0.1:0").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    client.send_to(b"question", "10.96.0.53:53").unwrap();
    let (count, from) = client.recv_from(&mut [0; 100]).unwrap();
    assert_eq!((count, from), (8, "10.96.0.53:53".parse().unwrap()));
}
