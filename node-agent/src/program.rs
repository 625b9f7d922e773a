//! What the programs that contain an agent share: the log, the signals, and the tasks that end.

mod cleanup;

use std::{
    io::{self, IsTerminal as _, Read as _, Write as _, stderr},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use headgate_settings as settings;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use crate::{
    dataplane::{ErrorKind, iptables},
    dataplane_choice, instance,
    options::{CleanupStay, LogFormat, Options},
    persist, run,
};

/// Starts the log of the process, on standard error. Errors: `--log` is no filter.
pub fn start_log(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| anyhow!("--log: {error}; write a filter such as info or headgate_node_agent=debug"))?;
    // The program goes on if nobody reads the log any more. The subscriber would print the error of
    // a write to standard error, and panic there.
    let log = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let log = log.with_writer(stderr).with_ansi(stderr().is_terminal());
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}

/// Returns a token that SIGTERM and SIGINT cancel. Must be called in a tokio runtime.
/// Errors: the system registers no signal handler.
pub fn cancelled_by_signals() -> std::io::Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("stopping");
        stop.cancel();
    });
    Ok(shutdown)
}

/// Runs the task that the options name: `--write-config-to`, `--cleanup` or `--init-only`. Returns
/// false if they name no task. Errors: the task failed. The error names the remedy.
pub fn run_task(options: &Options) -> anyhow::Result<bool> {
    if let Some(path) = &options.write_config_to {
        settings::write_defaults(path)?;
        info!(path = %path.display(), "wrote the default configuration");
    } else if options.cleanup {
        let is_beside_proxy = options.cleanup_stay == Some(CleanupStay::BesideProxy);
        if is_beside_proxy {
            cleanup::until_replaced(options)?;
        }
        clean(options, is_beside_proxy)?;
        if options.cleanup_stay.is_some() {
            cleanup::stay()?;
        }
    } else if options.init_only {
        let settings = options.configured()?.settings;
        run::prepare(&settings)?;
        dataplane_choice::prepare(&settings, options.iptables_variant)?;
        info!("--init-only: kernel parameters are set");
    } else {
        return Ok(false);
    }
    Ok(true)
}

/// Removes everything of Headgate. Beside another proxy, an agent stands by and writes nothing.
fn clean(options: &Options, is_beside_proxy: bool) -> anyhow::Result<()> {
    let agent = instance::running().context("--cleanup: looking for an agent on this node")?;
    if let Some(process) = agent.filter(|_| !is_beside_proxy) {
        anyhow::bail!(
            "--cleanup: an agent of Headgate runs on this node (process {process}), and would write its rules again: stop the agent, and repeat --cleanup"
        );
    }
    let settings = options.configured()?.settings;
    let health = settings.healthz_bind_address;
    let running = settings.metrics_bind_address.map(|metrics| running_mode(metrics, health)).transpose()?.flatten();
    if let Some(mode) = &running {
        info!(mode, "a service proxy runs on this node: its rules and other objects stay");
    }
    let mut failed = Vec::new();
    for leftover in dataplane_choice::leftovers(&settings, running.as_deref()) {
        let backend = leftover.name;
        match leftover.remove() {
            Ok(()) => info!(backend, "no rules or other objects of this backend remain"),
            Err(error) if error.kind == ErrorKind::Unavailable => {
                info!(backend, %error, "this machine does not support the backend, so nothing had to be removed");
            }
            Err(error) => {
                error!(backend, %error, "cannot remove everything");
                failed.push(backend);
            }
        }
    }
    if let Some(sentence) = iptables::left_settings() {
        warn!("{sentence}");
    }
    if let Some(folder) = options.state_folder().filter(|_| agent.is_none()) {
        let help = || format!("--cleanup: removing the saved state in {}", folder.display());
        persist::remove(folder).with_context(help)?;
    }
    anyhow::ensure!(
        failed.is_empty(),
        "--cleanup: rules or other objects of {} may remain; see the errors above",
        failed.join(", ")
    );
    Ok(())
}

/// How long a proxy may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The mode of the service proxy that runs on this node, which is kube-proxy when a node leaves
/// Headgate. kube-proxy answers `/proxyMode` at the address of its metrics. `None` if nothing
/// listens at this address, nor at the address of kube-proxy's health checks.
fn running_mode(address: SocketAddr, health: Option<SocketAddr>) -> anyhow::Result<Option<String>> {
    let remedy = || {
        format!(
            "--cleanup: cannot ask {address} which service proxy runs on this node; write the address of \
             kube-proxy's metrics as --metrics-bind-address, or stop the program at this address"
        )
    };
    match ask_mode(address) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => match health {
            Some(health) if TcpStream::connect_timeout(&health, ANSWER_TIMEOUT).is_ok() => {
                Err(error).with_context(remedy).with_context(|| {
                    format!("--cleanup: a program listens at {health}, where kube-proxy serves health checks")
                })
            }
            _ => Ok(None),
        },
        answer => answer.map(Some).with_context(remedy),
    }
}

fn ask_mode(address: SocketAddr) -> io::Result<String> {
    // Linux connects 0.0.0.0 and [::] to the node itself.
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("GET /proxyMode HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(4096).read_to_string(&mut answer)?;
    let mode = answer.split_once("\r\n\r\n").map(|(_, body)| body.trim()).unwrap_or_default();
    let is_mode = !mode.is_empty() && mode.bytes().all(|byte| byte.is_ascii_lowercase());
    if answer.split(' ').nth(1) == Some("200") && is_mode {
        Ok(mode.to_owned())
    } else {
        Err(io::Error::other(format!(
            "the answer to GET /proxyMode is {:?}",
            answer.lines().next().unwrap_or_default()
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    fn asked(answer: &'static str) -> anyhow::Result<Option<String>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            // Otherwise closing the socket would reset the connection before the answer is read.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap();
        });
        let mode = running_mode(address, None);
        server.join().unwrap();
        mode
    }

    #[test]
    fn a_running_proxy_tells_its_mode_and_other_programs_are_an_error() {
        assert_eq!(asked("HTTP/1.0 200 OK\r\nDate: now\r\n\r\niptables").unwrap().as_deref(), Some("iptables"));
        for answer in ["HTTP/1.0 404 Not Found\r\n\r\nnone", "HTTP/1.0 200 OK\r\n\r\n<html>", "", "220 ready\r\n"] {
            let error = format!("{:#}", asked(answer).unwrap_err());
            assert!(error.contains("--metrics-bind-address"), "{answer:?}: {error}");
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(running_mode(closed, Some(closed)).unwrap(), None);
        let health = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = running_mode(closed, Some(health.local_addr().unwrap())).unwrap_err();
        assert!(format!("{error:#}").contains("--metrics-bind-address"), "{error:#}");
    }
}
