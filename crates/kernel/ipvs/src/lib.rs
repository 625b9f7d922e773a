#![doc = include_str!("../README.md")]

mod command;
mod model;
mod wire;

pub use command::Command;
pub use headgate_netlink::{Family, Malformed, NetlinkError, Protocol, Refusal, Refused};
pub use model::{
    Destination, DestinationEntry, Forwarding, Netmask, Persistence, SchedulerFlags, Service, ServiceEntry, ServiceId,
    Timeouts,
};

use headgate_netlink::{Connection, Request, generic};

/// `IPVS_GENL_NAME`.
const FAMILY: &str = "IPVS";

/// Why a request to IPVS failed.
#[derive(Debug, thiserror::Error)]
pub enum IpvsError {
    /// The kernel has no IPVS and found no module for it.
    #[error("this kernel has no IPVS: load the module ip_vs (modprobe ip_vs)")]
    Missing,
    /// The kernel cannot be reached, or rejects a query.
    #[error("IPVS: {0}")]
    Netlink(#[from] NetlinkError),
}

/// A connection to IPVS in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Ipvs {
    connection: Connection,
    kind: u16,
}

impl Ipvs {
    /// Opens a connection. Errors: [`IpvsError::Missing`] if the kernel has no IPVS.
    pub fn open() -> Result<Self, IpvsError> {
        let mut connection = Connection::open(libc::NETLINK_GENERIC)?;
        match generic::find(&mut connection, FAMILY) {
            Ok(kind) => Ok(Self { connection, kind }),
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Err(IpvsError::Missing),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets the idle timeouts of connections. Zero keeps the current value.
    /// Errors: the kernel rejects a timeout that is longer than the kernel can represent.
    pub fn set_timeouts(&mut self, timeouts: &Timeouts) -> Result<(), IpvsError> {
        Ok(self.connection.ask(wire::set_timeouts(self.kind, timeouts), |_, _| {})?)
    }

    /// Lists all virtual services. Services that change during the list may be missing or listed
    /// twice. Errors: the kernel does not return the list. Retry if [`NetlinkError::is_transient`].
    pub fn services(&mut self) -> Result<Vec<ServiceEntry>, IpvsError> {
        self.list(&wire::list_services(self.kind), wire::service)
    }

    /// Returns a virtual service, or `None` if the service does not exist.
    /// Errors: the kernel rejects the query or does not answer.
    pub fn service(&mut self, id: ServiceId) -> Result<Option<ServiceEntry>, IpvsError> {
        match self.connection.ask_one(&wire::get_service(self.kind, id), wire::service) {
            Err(error) if error.refusal_code() == Some(libc::ESRCH) => Ok(None),
            result => Ok(Some(result?)),
        }
    }

    /// Lists all destinations of a virtual service, including destinations of weight 0. The list is
    /// empty if the service does not exist.
    /// Errors: the kernel does not return the list. Retry if [`NetlinkError::is_transient`].
    pub fn destinations(&mut self, id: ServiceId) -> Result<Vec<DestinationEntry>, IpvsError> {
        self.list(&wire::list_destinations(self.kind, id), |payload| wire::destination(payload, id.family()))
    }

    fn list<T>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, IpvsError> {
        Ok(self.connection.list(request, |found: &mut Vec<_>, payload| {
            found.push(read(payload)?);
            Ok(())
        })?)
    }

    /// Executes commands in order, many in one send. Each command is independent. The result lists,
    /// in order, the commands that the kernel rejected, which [`Command::explain`] describes. The
    /// kernel has executed all other commands.
    /// Errors: the kernel may have executed none, some or all of the commands.
    pub fn execute<'a>(&mut self, commands: impl IntoIterator<Item = &'a Command>) -> Result<Vec<Refused>, IpvsError> {
        let kind = self.kind;
        Ok(self.connection.execute_all(commands.into_iter().map(|command| wire::command(kind, command)))?)
    }
}
