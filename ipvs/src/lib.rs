#![doc = include_str!("../README.md")]

mod command;
mod model;
mod wire;

pub use command::Command;
pub use headgate_netlink::{Malformed, NetlinkError, Refusal};
pub use model::{
    Destination, DestinationEntry, Family, Forwarding, Info, Netmask, Persistence, Protocol, SchedulerFlags, Service,
    ServiceEntry, ServiceId, Statistics, Timeouts, Tunnel, TunnelKind,
};

use headgate_netlink::{Connection, Request, generic};

/// `IPVS_GENL_NAME`.
const FAMILY: &str = "IPVS";
/// `IPVS_GENL_VERSION`.
const FAMILY_VERSION: u8 = 1;

/// Why nothing is known, or nothing done.
#[derive(Debug, thiserror::Error)]
pub enum IpvsError {
    /// The kernel has no IPVS, and found no module for it.
    #[error("this kernel has no IPVS: load the module ip_vs (modprobe ip_vs)")]
    Missing,
    /// The kernel cannot be reached, or refuses a question.
    #[error("IPVS: {0}")]
    Netlink(#[from] NetlinkError),
    /// An answer is none.
    #[error("IPVS: the kernel's answer is malformed: {0}")]
    Malformed(#[from] Malformed),
}

/// A command that the kernel refuses. The others of its batch are done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Which of the commands.
    pub index: usize,
    /// Why; [`Command::explain`] says it in words.
    pub refusal: Refusal,
}

/// A connection to IPVS in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Ipvs {
    connection: Connection,
    family: generic::Family,
}

impl Ipvs {
    /// Connects.
    ///
    /// # Errors
    /// [`IpvsError::Missing`] when the kernel has no IPVS.
    pub fn open() -> Result<Self, IpvsError> {
        let mut connection = Connection::open(libc::NETLINK_GENERIC)?;
        match generic::Family::find(&mut connection, FAMILY, FAMILY_VERSION) {
            Ok(family) => Ok(Self { connection, family }),
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Err(IpvsError::Missing),
            Err(error) => Err(error.into()),
        }
    }

    /// The version of IPVS and the size of its connection table.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn info(&mut self) -> Result<Info, IpvsError> {
        self.ask(wire::get_info(self.family), wire::info)
    }

    /// How long connections live without packets.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn timeouts(&mut self) -> Result<Timeouts, IpvsError> {
        self.ask(wire::get_timeouts(self.family), wire::timeouts)
    }

    /// Sets how long connections live without packets. Zero leaves a timeout as it is.
    ///
    /// # Errors
    /// When the kernel refuses: some timeout is longer than it can count.
    pub fn set_timeouts(&mut self, timeouts: &Timeouts) -> Result<(), IpvsError> {
        Ok(self.connection.ask(wire::set_timeouts(self.family, timeouts), |_, _| {})?)
    }

    /// All virtual services. What changes meanwhile may be missing, or listed twice.
    ///
    /// # Errors
    /// When the kernel does not list them. Try again when [`NetlinkError::is_transient`].
    pub fn services(&mut self) -> Result<Vec<ServiceEntry>, IpvsError> {
        self.list(&wire::list_services(self.family), wire::service)
    }

    /// A virtual service; none when it does not exist.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn service(&mut self, id: ServiceId) -> Result<Option<ServiceEntry>, IpvsError> {
        match self.ask(wire::get_service(self.family, id), wire::service) {
            Err(IpvsError::Netlink(error)) if error.refusal_code() == Some(libc::ESRCH) => Ok(None),
            result => result.map(Some),
        }
    }

    /// All destinations of a virtual service, those of weight 0 included; empty when there is no such service.
    ///
    /// # Errors
    /// When the kernel does not list them. Try again when [`NetlinkError::is_transient`].
    pub fn destinations(&mut self, id: ServiceId) -> Result<Vec<DestinationEntry>, IpvsError> {
        self.list(&wire::list_destinations(self.family, id), |payload| wire::destination(payload, id.family()))
    }

    /// Carries out commands in their order, many in one send. Each stands for itself: those that the kernel refuses are returned, in their order, the
    /// others are done.
    ///
    /// # Errors
    /// What was done is not known, all or part of it.
    pub fn execute<'a>(&mut self, commands: impl IntoIterator<Item = &'a Command>) -> Result<Vec<Refused>, IpvsError> {
        let mut all_refused = Vec::new();
        let family = self.family;
        let requests = commands.into_iter().map(|command| wire::command(family, command));
        self.connection.execute(requests, |index, refusal| all_refused.push(Refused { index, refusal }))?;
        Ok(all_refused)
    }

    /// Removes every virtual service of the namespace, whoever made it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn flush(&mut self) -> Result<(), IpvsError> {
        Ok(self.connection.ask(wire::flush(self.family), |_, _| {})?)
    }

    fn ask<T>(&mut self, request: Request, read: impl Fn(&[u8]) -> Result<T, Malformed>) -> Result<T, IpvsError> {
        let mut found = Err(Malformed("there is none"));
        self.connection.ask(request, |_, payload| found = read(payload))?;
        Ok(found?)
    }

    fn list<T>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, IpvsError> {
        self.connection.list(request, |found: &mut Vec<T>, payload| {
            found.push(read(payload)?);
            Ok(())
        })
    }
}
