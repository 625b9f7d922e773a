//! Lists of Services and endpoints.

use headgate_proto::v1::{EndpointInfo, ListEndpointsRequest, ListServicesRequest, ServiceInfo};
use serde::Serialize;

use crate::answer::{Failure, Session};
use crate::args::{ListArgs, Output, Selected};
use crate::render::{self, plain};

/// Runs `headgatectl services`.
pub(crate) async fn services(session: &mut Session<'_>, wanted: &ListArgs, of: &Selected) -> Result<(), Failure> {
    let services = session.services(of).await?;
    if services.is_empty() && !of.name.is_empty() {
        return Err(Failure::NotFound(no_such_service(session, of).await?));
    }
    let empty = match of.namespace.as_str() {
        "" => "No Services.".to_owned(),
        namespace => format!("No Services in namespace {namespace}."),
    };
    let table = render::services(&services, session.output == Output::Wide, session.style);
    session.list(&services, name, wanted.rows.no_headers, &table, &empty)
}

/// Runs `headgatectl endpoints`.
pub(crate) async fn endpoints(session: &mut Session<'_>, wanted: &ListArgs, of: &Selected) -> Result<(), Failure> {
    let request = ListEndpointsRequest { namespace: of.namespace.clone(), name: of.name.clone() };
    let answer = session.replica.client.list_endpoints(request).await;
    let endpoints = match session.collect(answer).await {
        Err(Failure::NotFound(_)) => return Err(Failure::NotFound(no_such_service(session, of).await?)),
        result => result?,
    };
    let empty = match of.name.as_str() {
        "" => "No endpoints.".to_owned(),
        name => format!("Service {}/{name} has no endpoints.", of.namespace),
    };
    let name = |of: &EndpointInfo| format!("{}/{} {}", of.namespace, of.name, of.address);
    let table = render::endpoints(&endpoints, session.output == Output::Wide, session.style);
    session.list(&endpoints, name, wanted.rows.no_headers, &table, &empty)
}

/// The name of a Service as commands accept it.
pub(crate) fn name(service: &ServiceInfo) -> String {
    format!("{}/{}", service.namespace, service.name)
}

/// Says that there is no such Service, and in which other namespaces there is one of its name.
pub(crate) async fn no_such_service(session: &mut Session<'_>, of: &Selected) -> Result<String, Failure> {
    let Selected { namespace, name: wanted } = of;
    let found = session.services(&Selected { namespace: String::new(), name: wanted.clone() }).await?;
    let hint = match &found[..] {
        [] => ": `headgatectl services` lists the existing Services".to_owned(),
        [one, ..] => {
            let names = found.iter().map(name).collect::<Vec<_>>().join(", ");
            format!(", but {names}: write {}, or --namespace {}", name(one), one.namespace)
        }
    };
    Ok(plain(&format!("no service {namespace}/{wanted}{hint}")).into_owned())
}

impl Session<'_> {
    pub(crate) async fn services(&mut self, of: &Selected) -> Result<Vec<ServiceInfo>, Failure> {
        let request = ListServicesRequest { namespace: of.namespace.clone(), name: of.name.clone() };
        let answer = self.replica.client.list_services(request).await;
        self.collect(answer).await
    }

    /// Writes a list: names, data, only the rows of its table, or the table and what is below.
    pub(crate) fn list<T: Serialize>(
        &mut self,
        items: &[T],
        name: impl Fn(&T) -> String,
        is_bare: bool,
        table: &str,
        empty: &str,
    ) -> Result<(), Failure> {
        match self.output {
            Output::Json | Output::Yaml => self.write_data(&items),
            Output::Name => Ok(items.iter().try_for_each(|item| writeln!(self.out, "{}", plain(&name(item))))?),
            _ if is_bare => self.write(&table.split_inclusive('\n').skip(1).take(items.len()).collect::<String>()),
            _ if items.is_empty() => self.write(&format!("{empty}\n")),
            _ => self.write(table),
        }
    }
}
