//! The access log: one line for each TCP connection that ends.

use headgate_userspace::{ConnectionInfo, HowEnded};
use tracing::info;

/// The target of the lines, by which the filter of the log can select them.
const TARGET: &str = "headgate::access";

/// Writes the line of a connection. The proxy's threads wait while the log cannot be written.
pub(super) fn write(connection: &ConnectionInfo, how: HowEnded) {
    let ConnectionInfo { service, client, destination, endpoint, .. } = connection;
    info!(
        target: TARGET,
        %service,
        %client,
        address = %destination,
        %endpoint,
        duration_ms = connection.age_ms,
        bytes_to_endpoint = connection.bytes_to_endpoint,
        bytes_to_client = connection.bytes_to_client,
        "connection ended: {}",
        how.as_str()
    );
}
