//! One replica: the real program in its own process, behind a relay that cuts its connections.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use headgate_tests::testbed::process::{control_plane_addresses, log_tail, program};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    GUARD,
    certificates::{Certificates, Holder},
    cutter::Cutter,
};

pub(crate) struct Replica {
    pub(crate) cutter: Cutter,
    name: String,
    folder: PathBuf,
    child: Option<Child>,
    starts: u32,
    is_frozen: bool,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.name, log_tail(&self.log()));
        }
    }
}

impl Replica {
    /// Creates a replica without starting it. `folder` must hold the file `kubeconfig`.
    pub(crate) async fn new(name: &str, folder: &Path, certificates: &mut Certificates, seed: u64) -> Self {
        certificates.folder(&folder.join(name), Holder::Replica);
        let cutter = Cutter::start(seed).await;
        Self { cutter, name: name.to_owned(), folder: folder.to_owned(), child: None, starts: 0, is_frozen: false }
    }

    /// The address for agents.
    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.cutter.address)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_some()
    }

    fn log(&self) -> PathBuf {
        self.folder.join(format!("{}.{}.log", self.name, self.starts))
    }

    /// Starts the program on a new port. The relay forwards new connections to this port.
    pub(crate) async fn start(&mut self) {
        if self.is_running() {
            return;
        }
        self.starts += 1;
        let tls = self.folder.join(&self.name);
        let file = |option: &str, name: &str| format!("{option}={}", tls.join(name).display());
        let mut command = Command::new(program("headgate-control-plane").unwrap());
        command.args(["--source=kubernetes", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]);
        command.arg(format!("--kubeconfig={}", self.folder.join("kubeconfig").display()));
        command.args([file("--tls-cert", "tls.crt"), file("--tls-key", "tls.key"), file("--tls-client-ca", "ca.crt")]);
        command.args(["--heartbeat-seconds=1", "--drain-grace-ms=200", &format!("--replica-name={}", self.name)]);
        let log = File::create(self.log()).unwrap();
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        let address = self.listening().await;
        self.cutter.forward_to(address);
    }

    /// Waits until the log names the listening address, and returns the address.
    async fn listening(&mut self) -> SocketAddr {
        let until = Instant::now() + GUARD;
        loop {
            let log = fs::read_to_string(self.log()).unwrap();
            if let Some([listen, ..]) = control_plane_addresses(&log) {
                return listen;
            }
            let ended = self.child.as_mut().and_then(|child| child.try_wait().unwrap());
            assert!(ended.is_none() && Instant::now() < until, "{} does not start: {log}", self.name);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills the process with SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
            self.is_frozen = false;
        }
    }

    /// Stops the process with SIGTERM, as Kubernetes does. The process asks its agents to move
    /// before it ends.
    pub(crate) fn stop(&mut self) {
        self.thaw();
        if let Some(mut child) = self.child.take() {
            signal(&child, Signal::SIGTERM);
            child.wait().unwrap();
        }
    }

    /// Freezes the process. Its sockets stay open, but the process does not answer.
    pub(crate) fn freeze(&mut self) {
        if let Some(child) = &self.child {
            signal(child, Signal::SIGSTOP);
            self.is_frozen = true;
        }
    }

    pub(crate) fn thaw(&mut self) {
        if let Some(child) = self.child.as_ref().filter(|_| self.is_frozen) {
            signal(child, Signal::SIGCONT);
            self.is_frozen = false;
        }
    }
}

impl Replica {
    /// The number of streams that resumed in this mode (`log`, `digests`, `full`), from the logs of
    /// all runs.
    pub(crate) fn resumed(&self, mode: &str) -> usize {
        let began = format!("resume=\"{mode}\"");
        let logs = (1..=self.starts).map(|start| self.folder.join(format!("{}.{start}.log", self.name)));
        let text = logs.map(|log| fs::read_to_string(log).unwrap()).collect::<String>();
        text.lines().filter(|line| line.contains("agent connected") && line.contains(&began)).count()
    }
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
}
