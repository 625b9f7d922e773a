//! The control plane as a process, and its pages over plain HTTP.

use std::{fs, net::SocketAddr, path::Path};

use headgate_tests::testbed::{control_plane::ControlPlane, page};

/// Starts the program with a folder without objects as its source. The folder `tls` holds
/// `tls.crt`, `tls.key` and `ca.crt`, and the folder that contains it may hold `node-ca.crt`.
pub(crate) fn control_plane(folder: &Path, tls: &Path) -> ControlPlane {
    let source = folder.join("manifests");
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
    control_plane_with(folder, tls, &[format!("--source=files:{}", source.display())])
}

/// As [`control_plane`], with these options instead of a source.
pub(crate) fn control_plane_with(folder: &Path, tls: &Path, options: &[String]) -> ControlPlane {
    let file = |option: &str, name: &str| format!("{option}={}", tls.join(name).display());
    let mut all = vec![file("--tls-cert", "tls.crt"), file("--tls-key", "tls.key"), file("--tls-client-ca", "ca.crt")];
    if tls.join("../node-ca.crt").exists() {
        all.push(file("--tls-node-ca", "../node-ca.crt"));
    }
    ControlPlane::start(folder, &[&all[..], options].concat()).unwrap()
}

/// Gets a page and returns its body.
pub(crate) fn page(address: SocketAddr, path: &str) -> Result<String, String> {
    let answer = page::get(address, path).map_err(|error| error.to_string())?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).ok_or(answer)
}

/// The value of a sample on the page of metrics, or 0 if the sample is missing.
pub(crate) fn metric(address: SocketAddr, sample: &str) -> u64 {
    page::sample(&page(address, "/metrics").unwrap(), sample)
}
