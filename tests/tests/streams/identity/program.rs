//! The control plane as a process, and its pages over plain HTTP.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use headgate_tests::testbed::{
    page,
    process::{KilledOnDrop, control_plane_addresses, program},
};

use super::server::GUARD;

/// The running program. Dropping the value kills the process.
pub(crate) struct ControlPlane {
    _process: KilledOnDrop,
    log: PathBuf,
    pub(crate) address: SocketAddr,
    pub(crate) inspect: SocketAddr,
    pub(crate) metrics: SocketAddr,
}

impl ControlPlane {
    /// Starts the program with a folder without objects as its source. The folder `tls` holds
    /// `tls.crt`, `tls.key` and `ca.crt`.
    pub(crate) fn start(folder: &Path, tls: &Path) -> Self {
        let source = folder.join("manifests");
        fs::create_dir_all(&source).unwrap();
        fs::write(source.join("none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
        let source = format!("--source=files:{}", source.display());
        Self::start_with(folder, tls, &["--listen=127.0.0.1:0".to_owned(), source])
    }

    /// As [`Self::start`], with these options instead of an address and a source.
    pub(crate) fn start_with(folder: &Path, tls: &Path, options: &[String]) -> Self {
        let log = folder.join("log");
        let file = |option: &str, name: &str| format!("{option}={}", tls.join(name).display());
        let child = Command::new(program("headgate-control-plane").unwrap())
            .args(["--metrics-listen=127.0.0.1:0"])
            .args([file("--tls-cert", "tls.crt"), file("--tls-key", "tls.key"), file("--tls-client-ca", "ca.crt")])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let unbound = SocketAddr::from(([0, 0, 0, 0], 0));
        let (address, inspect, metrics) = (unbound, unbound, unbound);
        let mut new = Self { _process: KilledOnDrop(child), log, address, inspect, metrics };
        new.until_logged("control plane runs");
        let addresses = control_plane_addresses(&fs::read_to_string(&new.log).unwrap());
        [new.address, new.inspect, new.metrics] = addresses.unwrap();
        new
    }

    /// Waits for a line with this text in the log, and returns the line.
    pub(crate) fn until_logged(&self, text: &str) -> String {
        let deadline = Instant::now() + GUARD;
        loop {
            let log = fs::read_to_string(&self.log).unwrap();
            // A line is complete once its newline is written.
            let complete = log.rsplit_once('\n').map_or("", |(complete, _)| complete);
            if let Some(line) = complete.lines().find(|line| line.contains(text)) {
                return line.to_owned();
            }
            assert!(Instant::now() < deadline, "{text:?} is not in the log:\n{log}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
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
