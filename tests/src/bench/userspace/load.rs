//! The client and the server of the bench `userspace`.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::Pid,
};

/// The processor of client and server. The proxy has processor 0.
const OTHER_PROCESSOR: usize = 1;
/// Open files of a process for each connection that the agent can carry.
const FILES_PER_CONNECTION: u64 = 3;
/// Open files of a process, besides those of connections.
const OTHER_FILES: u64 = 3_000;
const ACCEPTING_THREADS: usize = 4;
/// After this time, the threads of a load have opened their connections.
const WARM_UP: Duration = Duration::from_millis(300);

/// The first byte of a connection says what the server does: it returns every byte,
pub(super) const ECHO: u8 = b'e';
/// sends bytes for ever,
pub(super) const SOURCE: u8 = b's';
/// returns the byte and closes the connection,
pub(super) const ONCE: u8 = b'c';
/// or returns the byte and keeps the connection.
pub(super) const KEEP: u8 = b'k';

/// Moves the calling thread, and threads that it starts later, to the processor that the proxy does
/// not use.
pub(super) fn use_the_other_processor() -> Result<()> {
    let mut processors = CpuSet::new();
    processors.set(OTHER_PROCESSOR)?;
    sched_setaffinity(Pid::from_raw(0), &processors).context("the bench needs two processors")
}

/// Raises the limit of open files of this process, and of the programs that it starts later, so
/// that they can carry `wanted` connections. Returns how many they can carry: a hard limit that
/// this process may not raise can allow fewer.
pub(super) fn raise_open_files(wanted: usize) -> Result<usize> {
    // HAProxy, and this process with client and server, need two files for each connection. The
    // agent uses three of four files for connections, and one Service gets eight of nine of them.
    let needed = wanted as u64 * FILES_PER_CONNECTION + OTHER_FILES;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = if setrlimit(Resource::RLIMIT_NOFILE, hard.max(needed), hard.max(needed)).is_ok() {
        hard.max(needed)
    } else {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raising the limit of open files")?;
        eprintln!("the hard limit of open files is {hard}, and raising it to {needed} needs CAP_SYS_RESOURCE");
        hard
    };
    Ok(wanted.min(usize::try_from(limit.saturating_sub(OTHER_FILES) / FILES_PER_CONNECTION)?))
}

/// Starts the server in the namespace of the calling thread.
pub(super) fn serve() -> Result<()> {
    use_the_other_processor()?;
    let listener = TcpListener::bind("0.0.0.0:8080").context("listening")?;
    let kept = Arc::<Mutex<Vec<TcpStream>>>::default();
    for _ in 0..ACCEPTING_THREADS {
        let (listener, kept) = (listener.try_clone()?, Arc::clone(&kept));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The client reports a connection that fails.
                let _ = answer(stream, &kept);
            }
        });
    }
    Ok(())
}

fn answer(mut stream: TcpStream, kept: &Mutex<Vec<TcpStream>>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let kept = || kept.lock().unwrap_or_else(PoisonError::into_inner);
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    match byte[0] {
        ONCE => stream.write_all(&byte)?,
        KEEP => {
            stream.write_all(&byte)?;
            kept().push(stream);
        }
        ECHO => {
            // A measurement begins with round trips: the connections of the last one are over.
            kept().clear();
            thread::spawn(move || while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {});
        }
        _ => {
            thread::spawn(move || {
                let block = vec![1; 256 << 10];
                while stream.write_all(&block).is_ok() {}
            });
        }
    }
    Ok(())
}

/// Opens a connection and says what the server should do.
pub(super) fn open(target: SocketAddr, what: u8) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(target).with_context(|| format!("connecting to {target}"))?;
    stream.set_nodelay(true)?;
    stream.write_all(&[what])?;
    Ok(stream)
}

/// The work of several threads.
#[derive(Default)]
pub(super) struct Work {
    is_over: AtomicBool,
    done: AtomicU64,
}

impl Work {
    pub(super) fn goes_on(&self) -> bool {
        !self.is_over.load(Relaxed)
    }

    pub(super) fn count(&self, done: u64) {
        self.done.fetch_add(done, Relaxed);
    }
}

/// What was done while a load was measured.
pub(super) struct Done {
    pub(super) count: f64,
    /// The processor time of the proxy.
    pub(super) cpu_seconds: f64,
}

/// Runs `work` on some threads, and measures it for a time.
pub(super) fn run(
    proxy: u32,
    threads: usize,
    measured: Duration,
    work: &(impl Fn(&Work) -> Result<()> + Sync),
) -> Result<Done> {
    let shared = Work::default();
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| work(&shared))).collect();
        thread::sleep(WARM_UP);
        let so_far = || -> Result<(u64, f64)> { Ok((shared.done.load(Relaxed), cpu_seconds(proxy)?)) };
        let measure = || -> Result<Done> {
            let (done_before, cpu_before) = so_far()?;
            thread::sleep(measured);
            let (done, cpu) = so_far()?;
            Ok(Done { count: (done - done_before) as f64, cpu_seconds: cpu - cpu_before })
        };
        let done = measure();
        shared.is_over.store(true, Relaxed);
        for thread in running {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        done
    })
}

/// The processor time of all threads of a process.
fn cpu_seconds(process: u32) -> Result<f64> {
    let mut nanoseconds = 0;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}
