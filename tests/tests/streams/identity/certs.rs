//! Tests of `headgatectl certs` and of programs that use its files.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use headgate_tests::testbed::process::program;
use serde_json::Value;

use super::program::control_plane;

pub(super) fn headgatectl(arguments: &[&str]) -> Output {
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn certs(folder: &Path, arguments: &[&str]) -> Output {
    let out = folder.display().to_string();
    headgatectl(&[&["certs", "--out", &out], arguments].concat())
}

pub(super) fn made(folder: &Path, arguments: &[&str]) -> String {
    let output = certs(folder, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(folder: &Path, arguments: &[&str], code: i32) -> String {
    let output = certs(folder, arguments);
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn certificates_of_headgatectl_give_the_intended_access() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("my certs");
    let text = made(&out, &["--node=a,b", "--server-name=headgate.example", "--server-ip=127.0.0.1", "--reader=ops"]);
    for part in ["--tls-client-ca", "--node-name b", "headgatectl --server https://headgate.example:7444", "kubectl"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(
        text.contains("/my certs/ca.crt'") || text.contains("/my certs'/ca.crt"),
        "the path is not quoted:\n{text}"
    );
    let control_plane = control_plane(folder.path(), &out.join("control-plane"));
    let server = format!("--server=https://{}", control_plane.inspect);
    let ask = |name: &str| {
        let file = |option: &str, name: &str| format!("{option}={}", out.join(name).display());
        let [cert, key] = [("--tls-cert", "crt"), ("--tls-key", "key")].map(|(o, e)| file(o, &format!("{name}.{e}")));
        headgatectl(&[&server, &cert, &key, &file("--tls-ca", "ca.crt"), "status", "-o", "json"])
    };
    let answer = ask("readers/ops");
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    let denied = ask("nodes/a");
    let error = String::from_utf8(denied.stderr).unwrap();
    assert!(denied.status.code() == Some(1) && error.contains("--nodes-may-inspect"), "{error}");
    let other = folder.path().join("other");
    made(&other, &["--reader=ops"]);
    let file = |option: &str, folder: &Path, name: &str| format!("{option}={}", folder.join(name).display());
    let authority = file("--tls-ca", &out, "ca.crt");
    for (signer, code, expected) in
        [(&other, 1, "signed by an authority of the replica's --tls-client-ca"), (&out, 2, "other/readers/ops.key")]
    {
        let (cert, key) = (file("--tls-cert", signer, "readers/ops.crt"), file("--tls-key", &other, "readers/ops.key"));
        let refused = headgatectl(&[&server, &cert, &key, &authority, "status"]);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(code) && error.contains(expected), "{error}");
    }
}

#[test]
fn the_authority_is_reused_and_files_are_overwritten_only_with_force() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("certs");
    let read = |name: &str| fs::read(out.join(name)).unwrap();
    made(&out, &["--node=a", "--server-ip=192.0.2.1", "--reader=ops"]);
    for key in ["ca.key", "node-ca.key", "nodes/a.key", "readers/ops.key", "control-plane/tls.key"] {
        assert_eq!(fs::metadata(out.join(key)).unwrap().permissions().mode() & 0o777, 0o600, "{key}");
    }
    let (authority, of_nodes, first) = (read("ca.crt"), read("node-ca.crt"), read("nodes/a.crt"));
    let text = made(&out, &["--node=b", "--output=json"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["authority_is_new"], false);
    assert_eq!(json["files"].as_array().unwrap().len(), 2, "{json}");

    let error = refused(&out, &["--node=c,a"], 1);
    assert!(error.contains("nodes/a.key: exists already; pass --force"), "{error}");
    assert!(!out.join("nodes/c.crt").exists(), "a refused command wrote some of its files");
    made(&out, &["--node=a", "--force"]);
    assert_ne!(read("nodes/a.crt"), first);
    assert_eq!((read("ca.crt"), read("nodes/ca.crt")), (authority.clone(), authority));
    assert_eq!(read("node-ca.crt"), of_nodes);
}

#[test]
fn errors_name_the_problem_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("certs");
    assert!(refused(&out, &[], 2).contains("nothing to create: pass --server-name"));
    assert!(refused(&out, &["--node=Node_A"], 2).contains("--node: \"Node_A\" is not a valid name"));
    assert!(refused(&out, &["--node=ca"], 2).contains("in another folder"));
    assert!(refused(&out, &["--node=a,a"], 2).contains("--node a is given twice"));
    assert!(!out.exists());
    made(&out, &["--reader=ops"]);
    assert!(!out.join("node-ca.crt").exists(), "certificates of readers need no authority of nodes");
    assert!(refused(&out, &["--node=a", "--days=3650"], 1).contains("the certificates must be valid for 3650 days"));
    let key = fs::read(out.join("ca.key")).unwrap();
    fs::remove_file(out.join("ca.key")).unwrap();
    assert!(refused(&out, &["--node=a"], 1).contains("ca.key: missing, but ca.crt exists"));
    fs::copy(out.join("readers/ops.key"), out.join("ca.key")).unwrap();
    assert!(refused(&out, &["--node=a"], 1).contains("is not the key of"));
    fs::write(out.join("ca.key"), key).unwrap();
    fs::copy(out.join("readers/ops.crt"), out.join("ca.crt")).unwrap();
    fs::copy(out.join("readers/ops.key"), out.join("ca.key")).unwrap();
    assert!(refused(&out, &["--node=a"], 1).contains("is not an authority's certificate"));
    fs::write(out.join("ca.crt"), "garbage").unwrap();
    assert!(refused(&out, &["--node=a"], 1).contains("ca.crt: is not a PEM certificate"));
}
