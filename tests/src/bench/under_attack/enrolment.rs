//! Nodes that get their certificates while a pod without any credential attacks the same ports.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use headgate_tls::{Files, Side};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use rustls::{ClientConfig, ClientConnection, StreamOwned, crypto::ring, pki_types::ServerName};
use socket2::{Domain, Socket, Type};

use super::{
    Load,
    attackers::{Crowd, crowd},
    bed::{Bed, ENROLMENT_PORT, NODE_ADDRESS, SECOND_ATTACKER, STREAM_PORT},
    honest::Requests,
};
use crate::apiserver::{Token, objects};

/// The number of nodes that may enrol.
const NODES: u8 = 240;
/// The pause between the starts of two nodes.
const BETWEEN_NODES: Duration = Duration::from_millis(150);
/// A node that has no certificate after this time counts as failed.
const LONGEST_ENROLMENT: Duration = Duration::from_secs(10);
/// The longest time of one attempt.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);
/// The first pause of an agent after a failed attempt. Each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Writes an authority for replicas, a certificate for the replica, and another authority for
/// nodes.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write_authorities(folder: &Path) -> Result<()> {
    let write =
        |name: &str, text: String| fs::write(folder.join(name), text).with_context(|| format!("writing {name}"));
    let authority = |name: &str| -> Result<_> {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        Ok(CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)?)
    };
    let (replicas, nodes) = (authority("authority of replicas")?, authority("authority of nodes")?);
    let mut parameters = CertificateParams::default();
    parameters.subject_alt_names =
        vec![SanType::IpAddress(NODE_ADDRESS.into()), SanType::URI("headgate://replica/replica-0".try_into()?)];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    write("tls.crt", parameters.signed_by(&key, &replicas)?.pem())?;
    write("tls.key", key.serialize_pem())?;
    write("ca.crt", replicas.pem())?;
    write("nodes.crt", nodes.pem())?;
    write("nodes.key", nodes.key().serialize_pem())
}

fn name(number: u8) -> String {
    format!("enrols-{number}")
}

fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, 1, number)
}

/// Writes the Nodes that will enrol.
///
/// # Errors
/// The API server refuses a Node, which is a defect of the bench.
pub(super) fn write_nodes(bed: &Bed) -> Result<()> {
    (1..=NODES).try_for_each(|number| {
        bed.write(objects::node(&name(number)).address("InternalIP", &address(number).to_string()).build())
    })
}

/// Lets one node after the other enrol until `deadline`, each from its own address. A node tries
/// again with the pauses of an agent.
///
/// # Errors
/// The files of the bed cannot be read.
pub(super) fn enrolments(bed: &Bed, next: &AtomicU8, deadline: Instant) -> Result<Requests> {
    let none = bed.folder.path().join("none");
    let ca = bed.folder.path().join("ca.crt");
    let files = Files { side: Side::Client, cert: none.clone(), key: none, node_ca: ca.clone(), ca, denied: None };
    let roots = files.read_authorities(std::time::SystemTime::now()).map_err(|error| anyhow!("{error}"))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots).with_no_client_auth();
    let config = Arc::new(config);
    let request = CertificateParams::default().serialize_request(&KeyPair::generate()?)?.der().to_vec();
    let doorway = bed.pods.doorway()?;
    std::thread::scope(|scope| {
        let mut nodes = Vec::new();
        while Instant::now() < deadline {
            let number = next.fetch_add(1, Ordering::Relaxed) % NODES + 1;
            let token = bed.source.api().issue_token(Token::of_agent(&name(number)));
            let (config, request, doorway) = (&config, &request, &doorway);
            nodes.push(scope.spawn(move || -> Result<Requests> {
                doorway.enter()?;
                let (mut seen, started, mut pause) = (Requests::default(), Instant::now(), FIRST_PAUSE);
                let has_certificate = loop {
                    match enrol(config, address(number), &token, request) {
                        Ok(answer) if answer.starts_with("HTTP/1.1 200 ") => break true,
                        _ if started.elapsed() > LONGEST_ENROLMENT => break false,
                        _ => std::thread::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)),
                    }
                    pause *= 2;
                };
                seen.add(started, has_certificate);
                Ok(seen)
            }));
            std::thread::sleep(BETWEEN_NODES);
        }
        let mut all = Requests::default();
        for node in nodes {
            let seen = node.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            all.times_ms.extend(seen.times_ms);
            all.failed += seen.failed;
        }
        Ok(all)
    })
}

fn enrol(config: &Arc<ClientConfig>, source: Ipv4Addr, token: &str, request: &[u8]) -> io::Result<String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect_timeout(&SocketAddr::from((NODE_ADDRESS, ENROLMENT_PORT)).into(), LONGEST_ATTEMPT)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LONGEST_ATTEMPT))?;
    let name = ServerName::from(std::net::IpAddr::V4(NODE_ADDRESS));
    let session = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(session, stream);
    let head = format!(
        "POST /v1/enrol HTTP/1.1\r\nHost: replica\r\nAuthorization: Bearer {token}\r\nContent-Length: {}\r\n\r\n",
        request.len()
    );
    stream.write_all(&[head.as_bytes(), request].concat())?;
    let mut answer = String::new();
    match stream.read_to_string(&mut answer) {
        // The server may close the connection without the message that ends TLS.
        Err(error) if answer.is_empty() => Err(error),
        _ => Ok(answer),
    }
}

/// A pod opens connections with garbage and without a pause: three threads to the port for
/// enrolment, and one to the port for streams. Another pod holds idle connections to both: those of
/// one pod would take the places of its own garbage.
pub(super) fn garbage(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    let [enrolment, streams] = [ENROLMENT_PORT, STREAM_PORT].map(|port| SocketAddr::from((NODE_ADDRESS, port)));
    let doorway = bed.pods.doorway()?;
    std::thread::scope(|scope| {
        let throw = |target: SocketAddr| -> Result<()> {
            doorway.enter()?;
            while !is_over.load(Ordering::Relaxed) {
                // The replica may refuse any of these connections.
                let _ = throw_garbage(target);
            }
            Ok(())
        };
        let targets = [enrolment, enrolment, enrolment, streams];
        let throwers = targets.map(|target| scope.spawn(move || throw(target)));
        let crowds = [enrolment, streams].map(|target| Crowd { target, connections: load.idle / 10, bytes: 0 });
        crowd(bed, &crowds, is_over)?;
        throwers.into_iter().try_for_each(|thrower| {
            thrower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).context("sending garbage")
        })
    })
}

fn throw_garbage(target: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((SECOND_ATTACKER, 0)).into())?;
    socket.connect_timeout(&target.into(), Duration::from_secs(1))?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    stream.write_all(&[0x5a; 64])?;
    let _ = stream.read(&mut [0; 64])?;
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))
}
