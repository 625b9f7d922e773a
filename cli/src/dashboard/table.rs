//! The table of Services: listed once, and then followed while a page shows the table.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use headgate_proto::v1::{ListServicesRequest, ServiceInfo, WatchEvent, WatchRequest};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout};
use tonic::Status;

use super::rows;
use crate::client::Replica;

/// Nothing is followed if no page has asked for this time.
const IDLE: Duration = Duration::from_secs(60);
/// The most rows of an answer.
const MAX_ROWS: usize = 200;

type Key = (String, String);

/// The Services of a replica.
struct Table {
    services: BTreeMap<Key, ServiceInfo>,
    /// Services whose endpoints have changed since the row was read.
    stale: BTreeSet<Key>,
    asked: Instant,
}

/// The table, once it is listed.
#[derive(Default)]
pub(super) struct Services(tokio::sync::Mutex<Option<Rc<RefCell<Table>>>>);

/// What a page asks for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Query {
    /// A part of "namespace/name", or of an address.
    pub search: String,
    /// "unready", "conflict", "problem", or empty for all.
    pub only: String,
    pub offset: usize,
    pub limit: usize,
}

impl Query {
    fn selects(&self, (namespace, name): &Key, service: &ServiceInfo) -> bool {
        let is_wanted = match self.only.as_str() {
            "unready" => service.ready_endpoints == 0,
            "conflict" => !service.conflicts.is_empty(),
            "problem" => !service.problems.is_empty(),
            _ => true,
        };
        let mut addresses = service.cluster_ips.iter().chain(&service.external_ips).chain(&service.load_balancer_ips);
        is_wanted
            && (format!("{namespace}/{name}").contains(&self.search)
                || addresses.any(|address| address.contains(&self.search)))
    }
}

impl Services {
    /// Answers a page. Rows whose endpoints have changed are read again first.
    pub(super) async fn answer(&self, replica: &mut Replica, query: &Query) -> Result<Value, Status> {
        let table = self.table(replica).await?;
        let page = |table: &Table| -> (usize, Vec<Key>) {
            let found: Vec<&Key> = table
                .services
                .iter()
                .filter(|(key, service)| query.selects(key, service))
                .map(|(key, _)| key)
                .collect();
            let rows = found.iter().skip(query.offset).take(query.limit.min(MAX_ROWS)).map(|key| (*key).clone());
            (found.len(), rows.collect())
        };
        let (total, keys) = page(&table.borrow());
        for key in &keys {
            if table.borrow_mut().stale.remove(key) {
                let new = list(replica, &key.0, &key.1).await?;
                table.borrow_mut().services.extend(new);
            }
        }
        let table = table.borrow();
        let rows: Vec<Value> = keys.iter().filter_map(|key| table.services.get(key)).map(rows::service).collect();
        Ok(json!({ "all": table.services.len(), "total": total, "services": rows }))
    }

    /// The table. The first page that asks waits for the list, and so do pages that ask meanwhile.
    async fn table(&self, replica: &mut Replica) -> Result<Rc<RefCell<Table>>, Status> {
        let mut held = self.0.lock().await;
        // The follower holds the only other reference. It ends if the watch breaks.
        if let Some(table) = held.as_ref().filter(|table| Rc::weak_count(table) > 0) {
            table.borrow_mut().asked = Instant::now();
            return Ok(Rc::clone(table));
        }
        // The watch begins before the list, so that no change is missed between them.
        let events = replica.client.watch(WatchRequest::default()).await?.into_inner();
        let services = list(replica, "", "").await?.into_iter().collect();
        let table = Rc::new(RefCell::new(Table { services, stale: BTreeSet::new(), asked: Instant::now() }));
        spawn_local(follow(Rc::downgrade(&table), events));
        Ok(Rc::clone(held.insert(table)))
    }
}

/// Lists one Service, or all.
async fn list(replica: &mut Replica, namespace: &str, name: &str) -> Result<Vec<(Key, ServiceInfo)>, Status> {
    let request = ListServicesRequest { namespace: namespace.to_owned(), name: name.to_owned() };
    let mut answer = replica.client.list_services(request).await?.into_inner();
    let mut services = Vec::new();
    while let Some(service) = answer.message().await? {
        services.push(((service.namespace.clone(), service.name.clone()), service));
    }
    Ok(services)
}

async fn follow(table: Weak<RefCell<Table>>, mut events: tonic::Streaming<WatchEvent>) {
    loop {
        // The timeout makes a follower of a quiet cluster notice that no page asks any more.
        let event = timeout(IDLE, events.message()).await;
        let Some(table) = table.upgrade() else { return };
        let mut table = table.borrow_mut();
        match event {
            Ok(Ok(Some(event))) => table.take(event),
            Ok(_) => return,
            Err(_) => {}
        }
        if table.asked.elapsed() > IDLE {
            return;
        }
    }
}

impl Table {
    fn take(&mut self, event: WatchEvent) {
        let WatchEvent { action, service, endpoint, .. } = event;
        match (service, endpoint) {
            (Some(service), _) if action == "removed" => {
                self.services.remove(&(service.namespace, service.name));
            }
            (Some(service), _) => {
                self.services.insert((service.namespace.clone(), service.name.clone()), service);
            }
            (None, Some(endpoint)) => {
                self.stale.insert((endpoint.namespace, endpoint.name));
            }
            (None, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_the_page_are_read() {
        let query: Query = serde_urlencoded::from_str("search=a%26b&only=unready&offset=80&limit=40&else=1").unwrap();
        assert_eq!((query.search.as_str(), query.only.as_str(), query.offset, query.limit), ("a&b", "unready", 80, 40));
    }

    #[test]
    fn services_are_found_by_name_by_address_and_by_what_is_wrong() {
        let service =
            ServiceInfo { cluster_ips: vec!["10.96.0.1".into()], ready_endpoints: 1, ..ServiceInfo::default() };
        let is_found = |search: &str, only: &str, service: &ServiceInfo| {
            let query = Query { search: search.into(), only: only.into(), ..Query::default() };
            query.selects(&("shop".into(), "web".into()), service)
        };
        assert!(is_found("", "", &service) && is_found("p/w", "", &service) && is_found("96.0", "", &service));
        assert!(
            !is_found("cart", "", &service)
                && !is_found("", "unready", &service)
                && !is_found("", "conflict", &service)
        );
        let unready = ServiceInfo { ready_endpoints: 0, conflicts: vec!["x".into()], ..service };
        assert!(is_found("shop", "unready", &unready) && is_found("", "conflict", &unready));
        assert!(!is_found("", "problem", &unready));
    }
}
