//! The stand-in API server, tested with kube-rs's own watcher and with plain HTTP.

mod faults;
mod follower;
mod plain_http;
mod portable;
