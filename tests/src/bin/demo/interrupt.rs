//! Ctrl-C, SIGTERM and SIGHUP make the demo clean up and end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// Tells whether a signal has asked the demo to end.
#[derive(Debug)]
pub(crate) struct Interrupt {
    came: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the handlers of the signals. Further signals have no effect, because the clean-up
    /// has already begun.
    pub(crate) fn install() -> Result<Self> {
        let came = Arc::new(AtomicBool::new(false));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("creating a runtime for signals")?;
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let signals: Vec<_> = {
            let _inside = runtime.enter();
            kinds.into_iter().map(signal).collect::<std::io::Result<_>>().context("catching signals")?
        };
        let flag = Arc::clone(&came);
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    let waits = signals.into_iter().map(|mut signal| Box::pin(async move { signal.recv().await }));
                    futures::future::select_all(waits).await;
                    flag.store(true, Ordering::Relaxed);
                    std::future::pending::<()>().await;
                });
            })
            .context("starting the thread for signals")?;
        Ok(Self { came })
    }

    /// Whether a signal has arrived.
    pub(crate) fn came(&self) -> bool {
        self.came.load(Ordering::Relaxed)
    }

    /// Returns an error if a signal has arrived.
    pub(crate) fn check(&self) -> Result<()> {
        if self.came() {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Waits for a signal.
    pub(crate) fn wait(&self) {
        while !self.came() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
