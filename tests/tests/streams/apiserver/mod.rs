//! The stand-in API server, held against kube-rs's own watcher and against plain HTTP.

mod faults;
pub(crate) mod follower;
mod lists;
mod plain_http;
mod portable;
mod watches;
