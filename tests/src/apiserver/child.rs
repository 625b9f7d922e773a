//! Child processes that never outlive the test: ended by id on drop, and by the kernel if the test dies first.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::sys::{prctl, signal::Signal};

/// A program to run: arguments, and the file that takes its output.
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) arguments: Vec<OsString>,
    /// Variables besides the test's own.
    pub(super) environment: Vec<(&'static str, &'static str)>,
    pub(super) log: PathBuf,
}

/// A running child. Its thread lives as long as it does, since the kernel ties the death signal to the thread that
/// spawned, not to the process.
pub(super) struct Child {
    stop: Option<mpsc::Sender<()>>,
    keeper: Option<thread::JoinHandle<io::Result<ExitStatus>>>,
}

/// How often the keeper looks whether its child has ended by itself.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Child {
    /// Starts a program. Fails if it cannot be executed or its log cannot be written.
    pub(super) fn start(program: Program) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (started, outcome) = mpsc::channel();
        let keep = move || {
            let mut child = match spawn(&program) {
                Ok(child) => {
                    // The receiver waits for this; if it is gone, `stopped` is closed and the child ends below.
                    started.send(Ok(())).unwrap_or_default();
                    child
                }
                Err(error) => {
                    let copy = io::Error::new(error.kind(), error.to_string());
                    started.send(Err(copy)).unwrap_or_default();
                    return Err(error);
                }
            };
            loop {
                match stopped.recv_timeout(LOOK_EVERY) {
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        if let Some(status) = child.try_wait()? {
                            return Ok(status);
                        }
                    }
                    Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
                        child.kill()?;
                        return child.wait();
                    }
                }
            }
        };
        let keeper = thread::Builder::new().name("child-keeper".to_owned()).spawn(keep)?;
        outcome.recv().map_err(|_| io::Error::other("the keeper of the child ended"))??;
        Ok(Self { stop: Some(stop), keeper: Some(keeper) })
    }

    /// Whether the child has not ended by itself.
    pub(super) fn is_running(&self) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| !keeper.is_finished())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.stop.take();
        match self.keeper.take().map(thread::JoinHandle::join) {
            Some(Ok(Err(error))) => tracing::warn!(%error, "could not end a child process"),
            Some(Err(_)) => tracing::error!("the keeper of a child process panicked"),
            Some(Ok(Ok(_))) | None => {}
        }
    }
}

#[allow(unsafe_code)]
fn spawn(program: &Program) -> io::Result<std::process::Child> {
    let log = File::options().create(true).append(true).open(&program.log)?;
    let mut command = Command::new(&program.path);
    command
        .args(&program.arguments)
        .envs(program.environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe and touches no memory of
    // the parent.
    unsafe {
        command.pre_exec(|| prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from));
    }
    command.spawn()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sleeper(folder: &tempfile::TempDir, command: &str) -> Program {
        let arguments = ["-c", command].map(OsString::from).to_vec();
        Program { path: "/bin/sh".into(), arguments, environment: Vec::new(), log: folder.path().join("log") }
    }

    #[test]
    fn a_child_is_gone_after_its_handle() {
        let folder = tempfile::tempdir().unwrap();
        let child = Child::start(sleeper(&folder, "echo $$; exec sleep 600")).unwrap();
        let id = loop {
            let text = std::fs::read_to_string(folder.path().join("log")).unwrap();
            match text.trim().parse::<i32>() {
                Ok(id) => break id,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        assert!(child.is_running());
        drop(child);
        let gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let program = Program {
            path: folder.path().join("nothing"),
            arguments: Vec::new(),
            environment: Vec::new(),
            log: folder.path().join("log"),
        };
        assert_eq!(Child::start(program).err().unwrap().kind(), io::ErrorKind::NotFound);
    }
}
