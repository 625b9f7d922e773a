//! The stand-in API server, held against kube-rs's own watcher and against plain HTTP.

mod faults;
mod follower;
mod plain_http;
mod portable;
