//! Lists of connections, counters that outlive the endpoints of a Service, and ends of connections.

use std::sync::Mutex;

use super::*;

fn listed(bed: &Bed, account: Option<&str>, limit: usize) -> ConnectionList {
    bed.proxy.connections(ListFilter { account: account.map(Into::into), limit })
}

fn web() -> ServiceSettings {
    ServiceSettings { name: "default/web:http".into(), account: "default/web".into(), ..ServiceSettings::default() }
}

#[test]
fn the_list_shows_the_connections_with_the_most_bytes() {
    let endpoint = echo();
    let bed = Bed::new(&TcpSettings { threads: 3, ..TcpSettings::default() }, web(), &[endpoint]);
    let open: Vec<TcpStream> = (1..=20)
        .map(|bytes| {
            let mut stream = bed.connect();
            stream.write_all(&vec![0; bytes]).unwrap();
            stream.read_exact(&mut vec![0; bytes]).unwrap();
            stream
        })
        .collect();
    let list = listed(&bed, Some("default/web"), 3);
    let bytes: Vec<u64> = list.connections.iter().map(|one| one.bytes_to_endpoint).collect();
    assert_eq!((bytes, list.left_out), (vec![20, 19, 18], 17));
    let first = &list.connections[0];
    assert_eq!((&*first.service, first.client), ("default/web:http", open[19].local_addr().unwrap()));
    assert_eq!((first.destination, first.endpoint, first.state), (bed.address, endpoint, ConnectionState::Open));
    assert_eq!(first.bytes_to_client, 20);
    assert_eq!(listed(&bed, Some("default/other"), 3), ConnectionList::default());
    assert_eq!(listed(&bed, None, 100).connections.len(), 20);
}

#[test]
fn the_list_shows_connections_that_wait_and_that_are_half_closed() {
    let until = |bed: &Bed, wanted: ConnectionState| {
        eventually(
            "the state is listed",
            || matches!(&listed(bed, None, 9).connections[..], [one] if one.state == wanted),
        );
    };
    let (address, _silent) = silent();
    // The connection waits for as long as the test does.
    let settings = TcpSettings { connect_timeout: GUARD, ..TcpSettings::default() };
    let bed = Bed::new(&settings, web(), &[address]);
    let _waiting = bed.connect();
    until(&bed, ConnectionState::Connecting);
    let done = endpoint(|stream| {
        stream.shutdown(Shutdown::Write).unwrap();
        loop {
            thread::park();
        }
    });
    let bed = Bed::new(&TcpSettings::default(), web(), &[done]);
    let _half_closed = bed.connect();
    until(&bed, ConnectionState::EndpointDone);
}

#[test]
fn counters_survive_the_endpoints_and_totals_survive_the_service() {
    let bed = Bed::new(&TcpSettings::default(), web(), &[echo()]);
    let ask = || {
        let mut stream = bed.connect();
        round_trip(&mut stream);
        stream
    };
    let accepted = || bed.services.stats().0.get("default/web").map(|stats| stats.accepted);
    let open = ask();
    assert!(bed.services.remove_address(SERVICE, Scope::default(), Protocol::Tcp, bed.address));
    assert!(bed.services.remove_service(SERVICE));
    assert_eq!((accepted(), bed.stats().open), (Some(1), 1), "the Service has no endpoint left");
    let again = ServiceId(2);
    bed.services.set_service(again, web());
    bed.services.set_address(again, Scope::default(), Protocol::Tcp, bed.address);
    bed.services.set_endpoint(again, echo(), 1);
    drop(ask());
    assert_eq!(accepted(), Some(2));
    bed.services.remove_address(again, Scope::default(), Protocol::Tcp, bed.address);
    bed.services.remove_service(again);
    bed.services.remove_account("default/web");
    assert_eq!((accepted(), bed.stats().accepted), (None, 2));
    drop(open);
    eventually("the connection ends", || bed.stats().open == 0);
    assert_eq!(bed.stats().bytes_to_clients, 2);
}

static ENDED: Mutex<Vec<(ConnectionInfo, HowEnded)>> = Mutex::new(Vec::new());

#[test]
fn the_end_of_each_connection_is_told() {
    let on_end = |info: &ConnectionInfo, how| ENDED.lock().unwrap().push((info.clone(), how));
    let how = || ENDED.lock().unwrap().iter().map(|(_, how)| *how).collect::<Vec<_>>();
    let settings = TcpSettings { on_end: Some(on_end), ..TcpSettings::default() };
    let bed = Bed::new(&settings, web(), &[echo()]);
    let mut closed = bed.connect();
    closed.write_all(b"12345").unwrap();
    closed.shutdown(Shutdown::Write).unwrap();
    closed.read_to_end(&mut Vec::new()).unwrap();
    eventually("a connection ended", || how() == [HowEnded::Closed]);
    // A proxy of its own, so that the first connection cannot be idle for too long.
    let hasty = TcpSettings { idle_timeout: Duration::from_millis(200), ..settings };
    let hasty = Bed::new(&hasty, web(), &[echo()]);
    let _idle = hasty.connect();
    eventually("two connections ended", || how() == [HowEnded::Closed, HowEnded::Idle]);
    let (info, _) = ENDED.lock().unwrap()[0].clone();
    assert_eq!((info.bytes_to_endpoint, info.bytes_to_client, info.client), (5, 5, closed.local_addr().unwrap()));
    bed.services.remove_endpoint(SERVICE, info.endpoint);
    bed.services.set_endpoint(SERVICE, refusing(), 1);
    // The reset may come before `connect` returns.
    let _failed = TcpStream::connect(bed.address);
    eventually("no endpoint accepted", || how().last() == Some(&HowEnded::Failed));
}
