//! Tests of `headgatectl ca`: an authority is replaced while the programs run.

use std::{fs, path::Path};

use headgate_tests::testbed::control_plane::ControlPlane;

use super::{
    agent::Agent,
    certs::{headgatectl, made},
    program::control_plane,
    server::eventually,
};

/// Runs a step for the authority of replicas and readers, and returns the error if the step fails.
fn rotate(out: &Path, step: &str) -> Result<(), String> {
    rotate_with(out, step, &[])
}

/// Runs a step with further options, and returns the error if the step fails.
pub(super) fn rotate_with(out: &Path, step: &str, options: &[&str]) -> Result<(), String> {
    let output = headgatectl(&[&["ca", "rotate", step, "--out", &out.display().to_string()], options].concat());
    if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).unwrap()) }
}

fn refused(out: &Path, step: &str, reason: &str) {
    let error = rotate(out, step).unwrap_err();
    assert!(error.contains(reason), "{error}");
}

/// Asks for the state of the replica, and returns the error if the replica or its certificate is
/// not accepted.
fn status(control_plane: &ControlPlane, own: &Path, authority: &Path) -> Result<(), String> {
    let output = headgatectl(&[
        &format!("--server=https://{}", control_plane.inspect),
        &format!("--tls-cert={}.crt", own.display()),
        &format!("--tls-key={}.key", own.display()),
        &format!("--tls-ca={}", authority.display()),
        "status",
    ]);
    if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).unwrap()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_of_the_authority_interrupts_no_stream_and_locks_nobody_out() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("certs");
    let path = |name: &str| out.join(name);
    let output = headgatectl(&["ca", "init", "--out", &out.display().to_string()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let all = ["--node=n1,n2", "--server-ip=127.0.0.1", "--reader=ops"];
    made(&out, &all);
    let old = folder.path().join("old");
    for extension in ["crt", "key"] {
        fs::copy(path("readers/ops").with_extension(extension), old.with_extension(extension)).unwrap();
    }
    let old_authority = folder.path().join("old-authority");
    fs::copy(path("ca.crt"), &old_authority).unwrap();
    let control_plane = control_plane(folder.path(), &path("control-plane"));
    let url = format!("https://{}", control_plane.address);
    let agent = |node: &str| Agent::of_node(node, &url, &path("nodes").join(node), &path("nodes/ca.crt"));
    let first = agent("n1");
    first.until_connected(true).await;

    refused(&out, "sign", "next.key: missing: first run step trust");
    refused(&out, "retire", "contains only one authority");
    rotate(&out, "trust").unwrap();
    refused(&out, "trust", "continue with step sign");
    refused(&out, "retire", "first run step sign");
    let bundle = fs::read_to_string(path("ca.crt")).unwrap();
    let (_, new) = bundle.split_at(fs::read(&old_authority).unwrap().len());
    fs::write(folder.path().join("new-authority"), new).unwrap();
    let new_authority = folder.path().join("new-authority");
    for copy in ["control-plane/ca.crt", "nodes/ca.crt"] {
        assert_eq!(fs::read_to_string(path(copy)).unwrap(), bundle);
    }
    assert!(status(&control_plane, &old, &old_authority).is_ok(), "the old authority does not sign any more");

    rotate(&out, "sign").unwrap();
    assert!(!path("next.key").exists());
    refused(&out, "retire", "is not a certificate of the new authority");
    made(&out, &[&all[..], &["--force"]].concat());
    eventually("the replica has a certificate of the new authority, and trusts its readers", || async {
        status(&control_plane, &path("readers/ops"), &new_authority).is_ok()
    })
    .await;
    assert_eq!(status(&control_plane, &old, &path("ca.crt")), Ok(()), "the old authority is not trusted any more");

    rotate(&out, "retire").unwrap();
    assert_eq!(fs::read_to_string(path("ca.crt")).unwrap(), new);
    eventually("the replica declines certificates of the old authority", || async {
        status(&control_plane, &old, &new_authority).is_err_and(|error| error.contains("signed by an authority"))
    })
    .await;
    let second = agent("n2");
    second.until_connected(true).await;
    assert_eq!(first.status()["connected"], true);
    assert_eq!(
        first.metric("headgate_agent_tls_handshakes_total{kind=\"full\"}"),
        1,
        "the first stream was interrupted"
    );
    drop(first);
    agent("n1").until_connected(true).await;
}

#[test]
fn an_existing_authority_is_not_replaced_by_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    assert!(headgatectl(&["ca", "init", "--out", &out]).status.success());
    let key = fs::read(folder.path().join("ca.key")).unwrap();
    let output = headgatectl(&["ca", "init", "--out", &out]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("headgatectl ca rotate"), "{error}");
    assert_eq!(fs::read(folder.path().join("ca.key")).unwrap(), key);
    fs::write(folder.path().join("ca.crt"), "").unwrap();
    refused(folder.path(), "trust", "contains no authority: create an authority with `headgatectl ca init`");
}
