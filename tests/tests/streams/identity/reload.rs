//! Replaces the control plane's TLS files while streams are open.

use std::{fs, os::unix::fs::symlink, path::Path};

use headgate_control_plane::serve::Settings;
use rcgen::date_time_ymd;

use super::{
    authority::{Authority, Pair},
    client::Client,
    server::{Server, eventually},
};

const SUCCESS: &str = "headgate_tls_reloads_total{result=\"success\"}";
const FAILURE: &str = "headgate_tls_reloads_total{result=\"failure\"}";

/// Replaces the files of a mounted Secret as the kubelet does: writes a new folder, and replaces
/// the link `..data` by renaming a new link.
fn swap(folder: &Path, number: u8, own: &Pair, authority: &Authority) {
    own.write(&folder.join(format!("..2026_{number}")), &[authority]);
    symlink(format!("..2026_{number}"), folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
}

#[tokio::test]
async fn replacing_a_mounted_secret_affects_no_stream() {
    let authority = Authority::new("authority");
    let folder = tempfile::tempdir().unwrap();
    swap(folder.path(), 1, &authority.server(|_| {}), &authority);
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        symlink(format!("..data/{name}"), folder.path().join(name)).unwrap();
    }
    let server = Server::in_folder(folder, Settings::default()).await;
    let address = server.running.local_addr;
    let client = Client::new(&authority, &authority.node("n1"));
    let mut stream = client.connect(address).await.unwrap().sync("n1").await.unwrap();
    stream.until_message_about("service-1").await;
    let renewed = authority.server(|params| params.not_after = date_time_ymd(2060, 1, 1));
    swap(server.path("").as_path(), 2, &renewed, &authority);
    server.until_metric(SUCCESS, 1).await;
    assert_eq!(server.metric("headgate_tls_certificate_not_after_seconds{file=\"cert\"}"), 2_840_140_800);
    let other = Client::new(&authority, &authority.node("n2")).connect(address).await.unwrap();
    assert_eq!(other.server_certificate, renewed.der);
    other.sync("n2").await.unwrap().until_message_about("service-1").await;
    server.put(2);
    stream.until_message_about("service-2").await;
    assert_eq!((server.metric(SUCCESS), server.metric(FAILURE)), (1, 0));
}

#[tokio::test]
async fn the_old_files_stay_in_use_until_the_new_ones_match() {
    let authority = Authority::new("authority");
    let own = authority.server(|_| {});
    let server = Server::start_with(&own, &authority, Settings::default()).await;
    let address = server.running.local_addr;
    let served = async || {
        let client = Client::new(&authority, &authority.node("n1"));
        client.connect(address).await.unwrap().server_certificate
    };
    let (renewed, expired) =
        (authority.server(|_| {}), authority.server(|params| params.not_after = date_time_ymd(2020, 1, 1)));
    // Write a certificate without its key, and next an expired certificate. Last, remove `tls.crt`
    // and write an invalid `ca.crt`.
    fs::write(server.path("tls.crt"), &renewed.certificate).unwrap();
    server.until_metric(FAILURE, 1).await;
    assert_eq!(served().await, own.der);
    expired.write(&server.path(""), &[&authority]);
    server.until_metric(FAILURE, 2).await;
    fs::remove_file(server.path("tls.crt")).unwrap();
    server.until_metric(FAILURE, 3).await;
    fs::write(server.path("ca.crt"), "garbage").unwrap();
    assert_eq!(served().await, own.der);
    assert_eq!(server.metric(SUCCESS), 0);
    renewed.write(&server.path(""), &[&authority]);
    server.until_metric(SUCCESS, 1).await;
    assert_eq!(served().await, renewed.der);
}

#[tokio::test]
async fn an_added_authority_is_trusted() {
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    let server = Server::start(&first).await;
    let address = server.running.local_addr;
    let newcomer = Client::new(&first, &second.node("n2"));
    let refused = newcomer.refusal(address).await;
    assert!(headgate_tls::explain(&refused, &super::client::files()).is_some(), "{refused}");
    fs::write(server.path("ca.crt"), [first.pem(), second.pem()].concat()).unwrap();
    eventually("the second authority is trusted", || async {
        match newcomer.connect(address).await {
            Ok(connection) => connection.sync("n2").await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}
