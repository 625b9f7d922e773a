//! Health-check node ports as an external load balancer sees them.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_tests::testbed::{
    AgentSetup, Backend, Manifests, Outcome, Request, Testbed, Transport,
    iptables::{self, Variant},
    manifests::{Endpoint, Port, Service, Slice, Via, ready},
    plan::{self, Family, SECOND_LINE_PORT},
};
use headgate_tests::uml;
use serde_json::{Value, json};

/// The longest wait for an expected state. It is only a guard against hanging, because changes take
/// milliseconds.
const GUARD: Duration = Duration::from_secs(60);
const PORT: u16 = 32_100;

/// The outcome of a request to a health-check node port.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Health {
    /// The connection is refused: nothing listens on the port.
    Closed,
    /// The SYN is not answered.
    Silent,
    /// An HTTP response: its status, the weight in its header, and the Service and the number of
    /// local endpoints in its body.
    Answered { status: u16, weight: u32, service: String, local_endpoints: u32 },
}

fn answer(status: u16, service: &str, endpoints: u32) -> Health {
    Health::Answered { status, weight: endpoints, service: format!("testbed/{service}"), local_endpoints: endpoints }
}

fn node_address(node: &str, family: Family) -> IpAddr {
    plan::address(node).unwrap().of(family)
}

/// Sends a request from a machine.
fn ask(bed: &Testbed, from: &str, to: SocketAddr) -> Result<Health> {
    bed.machines().machine(from)?.run(|| {
        let mut stream = match TcpStream::connect_timeout(&to, Duration::from_secs(1)) {
            Ok(stream) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(Health::Closed),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Ok(Health::Silent),
            Err(error) => return Err(error).context("connecting"),
        };
        stream.set_read_timeout(Some(GUARD))?;
        stream.write_all(b"GET /whatever/path HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut response = String::new();
        match stream.read_to_string(&mut response) {
            // The agent closed the port during the request.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(Health::Closed),
            read => read?,
        };
        if response.is_empty() {
            // As above, but the agent had already accepted the connection.
            return Ok(Health::Closed);
        }
        parse(&response).with_context(|| format!("{to} answered {response:?}"))
    })
}

fn parse(response: &str) -> Result<Health> {
    let (head, body) = response.split_once("\r\n\r\n").context("the headers have no end")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?.parse()?;
    let header = |name: &str| {
        let found = head.lines().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        });
        found.with_context(|| format!("no header {name}"))
    };
    ensure!(header("Content-Type")? == "application/json", "the content type is not JSON");
    ensure!(header("X-Content-Type-Options")? == "nosniff", "X-Content-Type-Options is not nosniff");
    let weight = header("X-Load-Balancing-Endpoint-Weight")?.parse()?;
    let body: Value = serde_json::from_str(body)?;
    ensure!(body["serviceProxyHealthy"] == true, "the proxy is not healthy");
    let text = |field: &str| {
        body["service"][field].as_str().with_context(|| format!("the body has no service.{field}")).map(str::to_owned)
    };
    let local_endpoints = body["localEndpoints"].as_u64().context("the body has no localEndpoints")?.try_into()?;
    Ok(Health::Answered {
        status,
        weight,
        service: format!("{}/{}", text("namespace")?, text("name")?),
        local_endpoints,
    })
}

/// Waits until a machine outside gets the expected outcome from a node, in both families.
fn expect(bed: &Testbed, node: &str, port: u16, expected: &Health) -> Result<()> {
    for family in Family::BOTH {
        let to = SocketAddr::new(node_address(node, family), port);
        let deadline = Instant::now() + GUARD;
        loop {
            let found = ask(bed, "outside-1", to)?;
            if found == *expected {
                break;
            }
            if Instant::now() > deadline {
                bail!("{node} over {family}: {found:?}, not {expected:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// A Service with a health-check node port.
fn service(name: &str, endpoints: &[&str]) -> Service {
    let patch = |_: &Service| json!({ "spec": { "healthCheckNodePort": PORT } });
    Service { external_local: true, patch: Some(patch), ..Service::new(name, endpoints) }
}

fn cluster(service: Service) -> Manifests {
    let mut manifests = Manifests::default();
    manifests.add(service).unwrap();
    manifests
}

fn scenario(backend: Backend, manifests: Manifests, work: impl FnOnce(&Testbed) -> Result<()>) {
    let bed = Testbed::start(backend, manifests).unwrap();
    if let Err(error) = work(&bed) {
        panic!("{error:#}");
    }
}

// rows: 67, 69
#[test]
fn nodes_with_endpoints_are_healthy_and_report_the_number_of_endpoints() {
    // One pod in two slices with different ports counts as one endpoint.
    let port = Port { name: "more", transport: Transport::Tcp, port: 91, target_port: SECOND_LINE_PORT };
    let again = Slice { suffix: "again", ports: vec![port], endpoints: ready(&["a1"]) };
    let web = Service { more_slices: vec![again], ..service("web", &["a1", "a2", "b1"]) };
    scenario(Backend::IptablesLegacy, cluster(web), |bed| {
        expect(bed, "node-a", PORT, &answer(200, "web", 2))?;
        expect(bed, "node-b", PORT, &answer(200, "web", 1))?;
        expect(bed, "node-c", PORT, &answer(503, "web", 0))?;
        bed.update_service("web", |web| {
            web.more_slices.clear();
            web.endpoints = vec![Endpoint::ready("a1"), Endpoint::not_ready("b1"), Endpoint::ready("c1")];
        })?;
        expect(bed, "node-a", PORT, &answer(200, "web", 1))?;
        expect(bed, "node-b", PORT, &answer(503, "web", 0))?;
        expect(bed, "node-c", PORT, &answer(200, "web", 1))
    });
}

// rows: 68
#[test]
fn a_node_with_only_terminating_endpoints_is_unhealthy_and_still_serves() {
    scenario(Backend::IptablesNft, cluster(service("web", &["a1", "b1"])), |bed| {
        expect(bed, "node-a", PORT, &answer(200, "web", 1))?;
        bed.update_service("web", |service| {
            service.endpoints = vec![Endpoint::terminating("a1"), Endpoint::ready("b1")];
        })?;
        expect(bed, "node-a", PORT, &answer(503, "web", 0))?;
        for family in Family::BOTH {
            let to = bed.address("web", Via::NodePort("node-a"), family, "tcp")?;
            let outcome = bed.machines().ask("outside-1", &Request::new(Transport::Tcp, to))?;
            let by_a1 = matches!(&outcome, Outcome::Answered(answer) if answer.server == "a1");
            ensure!(by_a1, "{outcome}, not answered by a1");
        }
        Ok(())
    });
}

// rows: 70
#[test]
fn ports_open_and_close_and_other_services_can_use_them() {
    scenario(Backend::IptablesLegacy, cluster(service("web", &["a1"])), |bed| {
        expect(bed, "node-a", PORT, &answer(200, "web", 1))?;
        let set_local = |local: bool| {
            bed.update_service("web", |web| {
                web.external_local = local;
                // The API server clears `healthCheckNodePort` when the policy changes, so the test
                // clears it too.
                web.patch = if local { service("web", &[]).patch } else { None };
            })
        };
        set_local(false)?;
        expect(bed, "node-a", PORT, &Health::Closed)?;
        set_local(true)?;
        expect(bed, "node-a", PORT, &answer(200, "web", 1))?;
        bed.update(|manifests| {
            manifests.remove("web")?;
            manifests.add(service("api", &["a1", "a2"]))
        })?;
        expect(bed, "node-a", PORT, &answer(200, "api", 2))?;
        bed.update(|manifests| manifests.remove("api").map(drop))?;
        expect(bed, "node-a", PORT, &Health::Closed)
    });
}

// rows: 70
#[test]
fn a_port_in_use_is_reported_and_opens_when_it_is_free() {
    scenario(Backend::IptablesLegacy, Manifests::default(), |bed| {
        let taken = |address: &str| TcpListener::bind((address, PORT)).context("taking the port");
        let listener = bed.machines().machine("node-a")?.run(|| taken("192.0.2.11"))?;
        bed.update(|manifests| manifests.add(service("web", &["a1", "b1"])))?;
        expect(bed, "node-b", PORT, &answer(200, "web", 1))?;
        let log = bed.machines().folder().join("agent-node-a.log");
        let deadline = Instant::now() + GUARD;
        let is_reported = |log: &str| {
            log.lines().any(|line| {
                line.contains("healthCheckNodePort") && line.contains("testbed/web") && line.contains("32100")
            })
        };
        while !is_reported(&std::fs::read_to_string(&log)?) {
            ensure!(Instant::now() < deadline, "the agent does not report that the port is taken");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(listener);
        expect(bed, "node-a", PORT, &answer(200, "web", 1))
    });
}

// rows: 71
#[test]
fn ports_listen_only_on_node_port_addresses() {
    let bed = Testbed::machines_only(Backend::IptablesLegacy, cluster(service("web", &["a1"]))).unwrap();
    let run = || -> Result<()> {
        bed.start_control_plane()?;
        let ranges = "192.0.2.0/24,2001:db8:0:1::/64";
        bed.start_programmed("node-a", &AgentSetup::with(&["--nodeport-addresses", ranges]))?;
        expect(&bed, "node-a", PORT, &answer(200, "web", 1))?;
        for family in Family::BOTH {
            let found = ask(&bed, "node-a", SocketAddr::new(family.loopback(), PORT))?;
            ensure!(found == Health::Closed, "{found:?} at the loopback address");
        }
        Ok(())
    };
    if let Err(error) = run() {
        panic!("{error:#}");
    }
}

// rows of iptables: 72
#[test]
fn the_hosts_firewall_lets_health_checks_through() {
    for (backend, variant) in [(Backend::IptablesLegacy, Variant::Legacy), (Backend::IptablesNft, Variant::Nft)] {
        lets_health_checks_through(backend, variant);
    }
}

// rows of ipvs: 72
#[test]
fn the_hosts_firewall_lets_health_checks_through_to_virtual_servers() {
    uml::inside(|| lets_health_checks_through(Backend::Ipvs, Variant::Legacy));
}

fn lets_health_checks_through(backend: Backend, variant: Variant) {
    scenario(backend, cluster(service("web", &["a1"])), |bed| {
        let node = bed.machines().machine("node-a")?;
        let other = PORT + 1;
        let _listening: Vec<TcpListener> = Family::BOTH
            .into_iter()
            .map(|family| node.run(|| Ok(TcpListener::bind((node_address("node-a", family), other))?)))
            .collect::<Result<_>>()?;
        expect(bed, "node-a", PORT, &answer(200, "web", 1))?;
        for family in Family::BOTH {
            let rule = format!("-A INPUT -p tcp --dport {PORT}:{other} -j DROP");
            let lock = bed.machines().xtables_lock("node-a");
            iptables::run(node, variant, family, &lock, &rule.split(' ').collect::<Vec<_>>())?;
            let found = ask(bed, "outside-1", SocketAddr::new(node_address("node-a", family), other))?;
            ensure!(found == Health::Silent, "{found:?} at a port that the firewall closes");
        }
        expect(bed, "node-a", PORT, &answer(200, "web", 1))
    });
}
