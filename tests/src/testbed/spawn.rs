//! Starts programs inside a network namespace. The kernel kills the programs when this process
//! ends.
//!
//! This is the only module of the testbed with `unsafe` code: the code between fork and exec.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Mutex, OnceLock, mpsc};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::Signal;

type Job = Box<dyn FnOnce() + Send>;

/// Runs `job` on the one thread that starts every child process.
///
/// The kernel sends the parent-death signal when the *thread* that forked ends, not the process.
/// A test's threads may end early, so a thread that lives as long as the process starts all
/// children.
fn on_spawner<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Job>();
        std::thread::spawn(move || receiver.into_iter().for_each(|job| job()));
        Mutex::new(sender)
    });
    let gone = || io::Error::other("the thread that starts child processes has ended");
    let (reply, result) = mpsc::channel();
    let boxed: Job = Box::new(move || {
        // Sending fails only if the caller no longer waits for the reply.
        let _ = reply.send(job());
    });
    spawner.lock().map_err(|_| gone())?.send(boxed).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())
}

/// Starts `command` in `namespace`. The kernel kills the program with SIGKILL if this process ends
/// first.
pub(crate) fn spawn_in(namespace: File, mut command: Command) -> io::Result<Child> {
    on_spawner(move || {
        enter_before_exec(&mut command, namespace);
        command.spawn()
    })?
}

#[allow(unsafe_code)]
fn enter_before_exec(command: &mut Command, namespace: File) {
    let prepare = move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET)?;
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        Ok(())
    };
    // SAFETY: the closure runs in the forked child and does two system calls; it allocates nothing,
    // takes no lock and touches no state shared with other threads.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Makes `socket(AF_INET6, …)` fail with EAFNOSUPPORT in the program, as on a kernel that was
/// booted with `ipv6.disable=1`. The function installs a seccomp filter.
#[allow(unsafe_code)]
pub fn refuse_ipv6_sockets(command: &mut Command) {
    let statement = |code: u32, jump_true, jump_false, value| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: jump_false,
        k: value,
    };
    // Offsets in `struct seccomp_data` (linux/seccomp.h): the system call's number, and the low
    // half of its first argument.
    const NUMBER: u32 = 0;
    const FIRST_ARGUMENT: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let is_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let filter = [
        statement(load, 0, 0, NUMBER),
        statement(is_equal, 0, 3, libc::SYS_socket as u32),
        statement(load, 0, 0, FIRST_ARGUMENT),
        statement(is_equal, 0, 1, libc::AF_INET6 as u32),
        statement(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32),
        statement(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        nix::sys::prctl::set_no_new_privs()?;
        let mut filter = filter;
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: `program` and the filter that it points to live until the call returns; the
        // kernel copies both.
        let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure runs in the forked child and does two system calls; it allocates nothing,
    // takes no lock and touches no state shared with other threads.
    unsafe {
        command.pre_exec(install);
    }
}
