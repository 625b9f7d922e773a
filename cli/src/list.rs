//! Lists of Services, endpoints and nodes: printed once, or followed as they change.

use std::collections::HashMap;

use headgate_proto::v1::{
    AgentInfo, EndpointInfo, ListEndpointsRequest, ListServicesRequest, ServiceInfo, WatchEvent, WatchRequest,
};
use serde::Serialize;
use serde_json::Value;
use tonic::{Response, Status, Streaming};

use crate::answer::{Failure, Session, now_unix_ms};
use crate::args::{ListArgs, Output, RowArgs, Selected};
use crate::render::{self, Style};

/// The number of rows that decide how wide columns are.
const LAYOUT_ROWS: usize = 100;

/// A row of a list.
pub(crate) trait Row: Serialize + Clone + PartialEq {
    /// The name by which other commands know the object.
    fn name(&self) -> String;

    /// What tells the object from all others of the list.
    fn key(&self) -> String {
        self.name()
    }

    fn table(rows: &[Self], is_wide: bool, style: Style) -> String;
}

impl Row for ServiceInfo {
    fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn table(rows: &[Self], is_wide: bool, style: Style) -> String {
        render::services(rows, is_wide, style)
    }
}

impl Row for EndpointInfo {
    fn name(&self) -> String {
        self.address.clone()
    }

    fn key(&self) -> String {
        format!("endpoint {} of {}/{}", self.address, self.namespace, self.name)
    }

    fn table(rows: &[Self], is_wide: bool, style: Style) -> String {
        render::endpoints(rows, is_wide, style)
    }
}

impl Row for AgentInfo {
    fn name(&self) -> String {
        self.node.clone()
    }

    fn table(rows: &[Self], is_wide: bool, style: Style) -> String {
        render::agents(rows, now_unix_ms(), is_wide, style)
    }
}

/// The rows of a list that has been printed.
pub(crate) struct List<R> {
    rows: HashMap<String, R>,
    /// The first rows. Rows that change get columns of the same width.
    first: Vec<R>,
    /// The last header.
    header: String,
    shown: RowArgs,
}

impl<R: Row> List<R> {
    /// Prints a list, of which a table has at most `limit` rows. `empty` is the text for no row.
    pub(crate) fn print(
        session: &mut Session<'_>,
        rows: Vec<R>,
        shown: RowArgs,
        limit: usize,
        empty: &str,
    ) -> Result<Self, Failure> {
        let (some, more) = render::limited(&rows, limit);
        let text = session.table(some);
        let header = lines(&text, 0, 1);
        match session.output {
            Output::Json | Output::Yaml if shown.watch => rows.iter().try_for_each(|row| session.write_item(row))?,
            Output::Json | Output::Yaml => session.write_data(&rows)?,
            Output::Name => rows.iter().try_for_each(|row| session.write_name(&row.name()))?,
            Output::Table | Output::Wide if shown.no_headers => session.write(&lines(&text, 1, some.len()))?,
            Output::Table | Output::Wide if some.is_empty() => session.write(&format!("{empty}\n"))?,
            Output::Table | Output::Wide => session.write(&(text + &more))?,
        }
        session.out.flush()?;
        let first = rows.iter().take(LAYOUT_ROWS).cloned().collect();
        Ok(Self { rows: rows.into_iter().map(|row| (row.key(), row)).collect(), first, header, shown })
    }

    /// Returns whether the list has a row of the same object.
    pub(crate) fn has(&self, row: &R) -> bool {
        self.rows.contains_key(&row.key())
    }

    /// Prints a row that is new or has changed.
    pub(crate) fn change(&mut self, session: &mut Session<'_>, row: &R) -> Result<(), Failure> {
        let known = self.rows.insert(row.key(), row.clone());
        match session.output {
            _ if known.as_ref() == Some(row) => return Ok(()),
            Output::Json | Output::Yaml => return session.write_item(row),
            Output::Name => session.write_name(&row.name())?,
            Output::Table | Output::Wide => {
                self.first.push(row.clone());
                let table = session.table(&self.first);
                self.first.pop();
                let mut text = lines(&table, self.first.len() + 1, 1);
                if !self.shown.no_headers {
                    let header = lines(&table, 0, 1);
                    let alone = session.table(std::slice::from_ref(row));
                    text = if header == self.header { text } else { header.clone() + &text }
                        + &lines(&alone, 2, usize::MAX);
                    self.header = header;
                }
                session.write(&text)?;
            }
        }
        Ok(session.out.flush()?)
    }

    /// Prints that an object is gone: in JSON and YAML its last row, with the field `removed`.
    pub(crate) fn remove(&mut self, session: &mut Session<'_>, key: &str) -> Result<(), Failure> {
        let Some(row) = self.rows.remove(key) else { return Ok(()) };
        match session.output {
            Output::Json | Output::Yaml => {
                let mut value = serde_json::to_value(&row).map_err(std::io::Error::from)?;
                value["removed"] = Value::Bool(true);
                return session.write_item(&value);
            }
            Output::Name => session.write_name(&row.name())?,
            Output::Table | Output::Wide => session.write(&render::removed(key, session.style))?,
        }
        Ok(session.out.flush()?)
    }
}

/// Some of the lines of a text.
fn lines(text: &str, first: usize, count: usize) -> String {
    text.split_inclusive('\n').skip(first).take(count).collect()
}

/// Runs `headgatectl services`.
pub(crate) async fn services(session: &mut Session<'_>, wanted: &ListArgs, of: Selected) -> Result<(), Failure> {
    // The changes begin before the list, so that none is missed.
    let events = if wanted.rows.watch { Some(session.events(&of).await?) } else { None };
    let services = session.services(&of).await?;
    if services.is_empty() && !of.name.is_empty() && events.is_none() {
        return Err(Failure::NotFound(no_such_service(session, &of).await?));
    }
    let empty = match of.namespace.as_str() {
        "" => "No Services.".to_owned(),
        namespace => format!("No Services in namespace {namespace}."),
    };
    let mut list = List::print(session, services, wanted.rows, 0, &empty)?;
    let Some(mut events) = events else { return Ok(()) };
    loop {
        // The number of ready endpoints changes with each endpoint.
        let of = match session.next(&mut events).await? {
            WatchEvent { service: Some(ServiceInfo { namespace, name, .. }), .. }
            | WatchEvent { endpoint: Some(EndpointInfo { namespace, name, .. }), .. } => Selected { namespace, name },
            WatchEvent { service: None, endpoint: None, .. } => continue,
        };
        match session.services(&of).await?.pop() {
            Some(service) => list.change(session, &service)?,
            None => list.remove(session, &format!("{}/{}", of.namespace, of.name))?,
        }
    }
}

/// Runs `headgatectl endpoints`.
pub(crate) async fn endpoints(session: &mut Session<'_>, wanted: &ListArgs, of: Selected) -> Result<(), Failure> {
    // The changes begin before the list, so that none is missed.
    let events = if wanted.rows.watch { Some(session.events(&of).await?) } else { None };
    let request = ListEndpointsRequest { namespace: of.namespace.clone(), name: of.name.clone() };
    let answer = session.replica.client.list_endpoints(request).await;
    let endpoints = match session.collect(answer).await {
        Err(Failure::NotFound(_)) if events.is_some() => Vec::new(),
        Err(Failure::NotFound(_)) => return Err(Failure::NotFound(no_such_service(session, &of).await?)),
        result => result?,
    };
    let empty = match of.name.as_str() {
        "" => "No endpoints.".to_owned(),
        name => format!("Service {}/{name} has no endpoints.", of.namespace),
    };
    let mut list = List::print(session, endpoints, wanted.rows, 0, &empty)?;
    let Some(mut events) = events else { return Ok(()) };
    loop {
        match session.next(&mut events).await? {
            WatchEvent { endpoint: Some(gone), action, .. } if action == "removed" => {
                list.remove(session, &gone.key())?;
            }
            WatchEvent { endpoint: Some(endpoint), .. } => list.change(session, &endpoint)?,
            _ => {}
        }
    }
}

/// Says that there is no such Service, and in which other namespaces there is one of its name.
pub(crate) async fn no_such_service(session: &mut Session<'_>, of: &Selected) -> Result<String, Failure> {
    let Selected { namespace, name } = of;
    let elsewhere = session.services(&Selected { namespace: String::new(), name: name.clone() }).await?;
    let text = format!("no service {namespace}/{name}");
    Ok(match &elsewhere[..] {
        [] => format!("{text}: `headgatectl services` lists the existing Services"),
        found => {
            let names: Vec<String> = found.iter().map(Row::name).collect();
            let hint = format!("write {}, or --namespace {}", names[0], found[0].namespace);
            render::plain(&format!("{text}, but {}: {hint}", names.join(", "))).into_owned()
        }
    })
}

impl Session<'_> {
    fn table<R: Row>(&self, rows: &[R]) -> String {
        R::table(rows, self.output == Output::Wide, self.style)
    }

    fn write_name(&mut self, name: &str) -> Result<(), Failure> {
        Ok(writeln!(self.out, "{}", render::plain(name))?)
    }

    pub(crate) async fn services(&mut self, of: &Selected) -> Result<Vec<ServiceInfo>, Failure> {
        let request = ListServicesRequest { namespace: of.namespace.clone(), name: of.name.clone() };
        let answer = self.replica.client.list_services(request).await;
        self.collect(answer).await
    }

    /// Follows changes from now on.
    pub(crate) async fn events(&mut self, of: &Selected) -> Result<Streaming<WatchEvent>, Failure> {
        let request = WatchRequest { namespace: of.namespace.clone(), name: of.name.clone() };
        let answer = self.replica.client.watch(request).await;
        self.stream(answer)
    }

    pub(crate) fn stream<T>(&self, answer: Result<Response<Streaming<T>>, Status>) -> Result<Streaming<T>, Failure> {
        Ok(answer.map_err(|status| self.refused(&status))?.into_inner())
    }

    /// The next message of a stream that has no end.
    pub(crate) async fn next<T>(&self, stream: &mut Streaming<T>) -> Result<T, Failure> {
        let ended = || Status::unavailable("the replica ended the watch; run the command again to continue");
        let message = stream.message().await.and_then(|message| message.ok_or_else(ended));
        message.map_err(|status| self.refused(&status))
    }
}
