//! A CPU profile of a process: `perf` takes samples while the process runs, and this module counts
//! them by purpose.
//!
//! A timer triggers the samples, so each sample represents an equal CPU time. For a sample in the
//! kernel, the call chain determines the system call. For a sample in the program, only the
//! function itself determines the purpose, because the program's call chains are incomplete.
//! Sampling slows a process down by some percent, so benches measure times without sampling.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Samples per second. The number is a prime, so that sampling does not synchronise with periodic
/// work.
const FREQUENCY: &str = "199";
/// Longest time that `perf` may take to begin or to end.
const LIMIT: Duration = Duration::from_secs(60);
/// If a profile has fewer samples than this number, the profile is discarded.
const FEWEST: u64 = 50;

/// Purposes of CPU time in the kernel, each with parts of function names. A sample counts for the
/// first purpose with a part that occurs in the name of a kernel function of the sample's call
/// chain.
const KERNEL: &[(&str, &[&str])] = &[
    ("kernel-writes", &["sys_sendto", "sys_sendmsg", "sys_write", "sys_writev"]),
    ("kernel-reads", &["sys_recvfrom", "sys_recvmsg", "sys_read"]),
    ("kernel-wake-ups", &["epoll", "futex", "eventfd", "schedule", "nanosleep", "timerfd"]),
    ("kernel-connections", &["sys_accept", "sys_close", "sys_shutdown", "sys_setsockopt"]),
    ("kernel-memory", &["page_fault", "sys_madvise", "sys_mmap", "sys_munmap", "sys_mprotect"]),
    ("kernel-interrupts", &["asm_sysvec", "asm_common_interrupt", "softirq"]),
];
const KERNEL_REST: &str = "kernel-other";
/// Purposes of CPU time in the program, each with parts of function names. A sample counts for the
/// first purpose with a part that occurs in the name of the sample's innermost function.
const PROGRAM: &[(&str, &[&str])] = &[
    ("tls", &["rustls", "ring_core", "ring::aead", "ring::ec", "aes_", "gcm", "ghash", "chacha", "poly1305", "webpki"]),
    ("acks", &["serve::inbound", "serve::agents", "serve::fleet", "AgentMessage", "agent_message", "v1::Ack", "prost"]),
    ("encoding", &["control_plane::store", "headgate_proto", "headgate_core"]),
    ("streams-and-frames", &["control_plane::serve"]),
    ("api-watch", &["control_plane::source", "control_plane::model", "serde", "kube", "hyper", "h2::"]),
    ("wake-ups", &["tokio", "mio::", "futures", "pthread_", "epoll_wait", "crossbeam", "parking_lot"]),
    ("system-calls", &["__libc_", "__send", "__recv", "__write", "syscall", "clock_gettime", "vdso"]),
    ("allocation", &["alloc", "free", "memcpy", "memmove", "memset"]),
];
const PROGRAM_REST: &str = "other";

/// A running `perf record`.
pub struct Sampling {
    child: Child,
    data: PathBuf,
    _folder: tempfile::TempDir,
}

/// The number of samples for each purpose.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    samples: BTreeMap<&'static str, u64>,
}

impl Sampling {
    /// Starts sampling a process. If `perf` is not installed or not permitted, prints the reason
    /// and returns `None`.
    ///
    /// # Errors
    /// A temporary folder cannot be created, or `perf` does not begin in time.
    pub fn start(process: u32) -> Result<Option<Self>> {
        let folder = tempfile::tempdir().context("creating a folder")?;
        let data = folder.path().join("perf.data");
        let mut command = Command::new("perf");
        // `cpu-clock` is a timer, which virtual machines also have.
        command.args(["record", "--quiet", "-e", "cpu-clock", "-F", FREQUENCY, "-g", "-p", &process.to_string()]);
        command.arg("-o").arg(&data).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("perf is not installed (Debian package linux-perf): no CPU profile is measured");
                return Ok(None);
            }
            Err(error) => return Err(error).context("running `perf`"),
        };
        let mut sampling = Self { child, data, _folder: folder };
        let until = Instant::now() + LIMIT;
        while !sampling.data.exists() {
            if let Some(status) = sampling.child.try_wait().context("waiting for `perf`")? {
                println!("perf is not permitted to take samples ({status}): no CPU profile is measured");
                return Ok(None);
            }
            if Instant::now() > until {
                bail!("`perf record` does not begin");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(sampling))
    }

    /// Ends sampling, and returns the profile. If there are too few samples, prints their number
    /// and returns `None`.
    ///
    /// # Errors
    /// `perf` does not end in time, or cannot read its file.
    pub fn finish(mut self) -> Result<Option<Profile>> {
        self.stop()?;
        let mut command = Command::new("perf");
        command.args(["script", "--no-inline", "-F", "ip,sym", "-i"]).arg(&self.data);
        let output = command.output().context("running `perf script`")?;
        if !output.status.success() {
            bail!("`perf script`: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let profile = Profile::read(&String::from_utf8_lossy(&output.stdout));
        if profile.total() < FEWEST {
            println!("perf took only {} samples: no CPU profile is measured", profile.total());
            return Ok(None);
        }
        Ok(Some(profile))
    }

    fn stop(&mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT).context("ending `perf`")?;
        let until = Instant::now() + LIMIT;
        while self.child.try_wait().context("waiting for `perf`")?.is_none() {
            if Instant::now() > until {
                bail!("`perf record` does not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        // After `finish`, the process has already ended.
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Profile {
    /// Reads call chains in the format of `perf script`: one line for each function with its
    /// address and name, the innermost function first, and an empty line after each sample.
    fn read(text: &str) -> Self {
        let mut profile = Self::default();
        let mut chain: Vec<(&str, &str)> = Vec::new();
        for line in text.lines().chain([""]) {
            match line.trim().split_once(' ') {
                Some(frame) => chain.push(frame),
                None if chain.is_empty() => {}
                None => {
                    *profile.samples.entry(purpose(&chain)).or_default() += 1;
                    chain.clear();
                }
            }
        }
        profile
    }

    /// The number of samples.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.samples.values().sum()
    }

    /// The purposes with their shares of the CPU time, the largest first.
    #[must_use]
    pub fn shares(&self) -> Vec<(&'static str, f64)> {
        let total = self.total().max(1) as f64;
        let mut shares: Vec<_> = self.samples.iter().map(|(what, count)| (*what, *count as f64 / total)).collect();
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        shares
    }
}

fn purpose(chain: &[(&str, &str)]) -> &'static str {
    let is_kernel = |address: &str| address.len() == 16 && address.starts_with("ffff");
    let Some((address, function)) = chain.first().copied() else { return PROGRAM_REST };
    let has = |patterns: &[&str], function: &str| patterns.iter().any(|pattern| function.contains(pattern));
    if is_kernel(address) {
        let calls = chain.iter().take_while(|(address, _)| is_kernel(address));
        let is_for = |patterns: &[&str]| calls.clone().any(|(_, function)| has(patterns, function));
        return KERNEL.iter().find(|(_, patterns)| is_for(patterns)).map_or(KERNEL_REST, |(what, _)| *what);
    }
    PROGRAM.iter().find(|(_, patterns)| has(patterns, function)).map_or(PROGRAM_REST, |(what, _)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_counted_by_purpose() {
        let text = "
\tffffffff81b3a2f5 tcp_sendmsg_locked
\tffffffff81a00b87 __x64_sys_sendto
\tffffffff8120007e entry_SYSCALL_64_after_hwframe
\t    7f3a1c2b4a5e __libc_send

\tffffffff81b3a2f5 finish_task_switch
\tffffffff81a00b87 __x64_sys_epoll_wait
\t    7f3a1c2b4a5e epoll_wait

\t    55d0c8a01234 ring_core_0_17_14__aes_gcm_enc_update_vaes_avx2
\t           10000 [unknown]

\t    55d0c8a01234 headgate_control_plane::serve::session::Session::next_message
\t    55d0c8a05678 tokio::runtime::task::raw::poll

\t    7f3a1c2b4a5e [unknown]
";
        let profile = Profile::read(text);
        let expected =
            [("tls", 1), ("kernel-wake-ups", 1), ("kernel-writes", 1), ("other", 1), ("streams-and-frames", 1)];
        assert_eq!(profile.samples, BTreeMap::from(expected));
        assert_eq!((profile.total(), profile.shares().len()), (5, 5));
        assert!(profile.shares().iter().all(|(_, share)| (*share - 0.2).abs() < 1e-9));
    }
}
