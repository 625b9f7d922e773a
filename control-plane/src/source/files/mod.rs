//! Reads objects from a folder of manifests, and follows the changes of the files.
//!
//! inotify reports which files to read. A scan every [`RESCAN`] compares the names and metadata of
//! all files. The scan finds changes that inotify does not report: behind symlinks that lead out of
//! the folder, and on network file systems. `folder.rs` describes when an edit removes an object.

mod documents;
mod folder;
mod notices;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use notify::{RecursiveMode, Watcher as _};
use tokio_util::sync::CancellationToken;

use self::{
    folder::{Folder, Update},
    notices::{Look, Notices},
};
use super::SourceError;
use crate::{
    model::{Event, Model, NodeSelector},
    transaction::{Problem, Sink, SourceKind, Transaction},
};

/// Time between scans.
const RESCAN: Duration = Duration::from_secs(10);

/// A message for the reading thread.
enum Message {
    Noticed(notify::Result<notify::Event>),
    Stop,
}

/// Stops the reading thread, also when the future that waits for the thread is dropped.
struct StopOnDrop(mpsc::Sender<Message>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // Sending fails only if the thread has already ended.
        let _ = self.0.send(Message::Stop);
    }
}

/// Reads a folder until `shutdown`, and passes its changes to `sink`.
///
/// # Errors
/// The folder cannot be read at the start. If the folder becomes unreadable later, this function
/// reports to `sink` that the source is cut off. The objects that were read before stay in use.
pub(super) async fn run(
    folder: PathBuf,
    agent_nodes: NodeSelector,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    let (sender, messages) = mpsc::channel();
    let stop = StopOnDrop(sender.clone());
    let mut reading =
        tokio::task::spawn_blocking(move || Reader::start(&folder, agent_nodes, sink, sender)?.run(&messages));
    let ended = tokio::select! {
        () = shutdown.cancelled() => {
            drop(stop);
            reading.await
        }
        ended = &mut reading => ended,
    };
    ended.unwrap_or_else(|error| Err(SourceError::WatchEnded(error.to_string())))
}

/// The reading thread.
struct Reader {
    folder: Folder,
    intake: Intake,
    notices: Notices,
    /// The watcher, whose thread runs until the watcher is dropped; `None` if the system sends no
    /// notifications.
    _watcher: Option<notify::RecommendedWatcher>,
    next_scan: Instant,
}

/// Turns updates of the folder into transactions.
struct Intake {
    model: Model,
    shown_problems: Vec<Problem>,
    sink: Arc<dyn Sink>,
    position_ms: u64,
    /// True if the last scan could not read the folder.
    is_cut_off: bool,
}

impl Reader {
    /// Starts to watch the folder, and reads all its files once.
    fn start(
        root: &Path,
        agent_nodes: NodeSelector,
        sink: Arc<dyn Sink>,
        sender: mpsc::Sender<Message>,
    ) -> Result<Self, SourceError> {
        let unreadable = |error: std::io::Error| SourceError::Folder { path: root.to_owned(), why: error.to_string() };
        std::fs::read_dir(root).map_err(unreadable)?;
        // Notifications name files by absolute paths.
        let root = std::path::absolute(root).map_err(unreadable)?;
        // The watcher starts before the first scan, so that no change after the scan is missed.
        let watcher = watch(&root, sender).map_err(|error| {
            sink.count_error(SourceKind::Files, "no_notifications");
            let seconds = RESCAN.as_secs();
            tracing::warn!(
                "the system gives no notifications of changed files, so the folder is only scanned every {seconds} seconds: {error}"
            );
        });
        let model = Model::default().with_agent_nodes(agent_nodes);
        let mut reader = Self {
            folder: Folder::new(root),
            intake: Intake { model, shown_problems: Vec::new(), sink, position_ms: 0, is_cut_off: false },
            notices: Notices::default(),
            _watcher: watcher.ok(),
            next_scan: Instant::now(),
        };
        reader.scan(Instant::now());
        reader.intake.commit(reader.folder.unreadable(), Instant::now());
        reader.intake.sink.synced();
        Ok(reader)
    }

    fn run(mut self, messages: &mpsc::Receiver<Message>) -> Result<(), SourceError> {
        loop {
            let now = Instant::now();
            let due =
                [self.notices.due(), self.folder.next_look()].into_iter().flatten().fold(self.next_scan, Instant::min);
            if due <= now {
                self.work(now);
                continue;
            }
            match messages.recv_timeout(due - now) {
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(Message::Noticed(Ok(event))) => self.notices.note(&event, &self.folder, Instant::now()),
                Ok(Message::Noticed(Err(error))) => {
                    self.intake.sink.count_error(SourceKind::Files, "notification_error");
                    tracing::warn!("a notification of changed files was lost ({error}); the folder is scanned");
                    self.notices.note_all(Instant::now());
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Reads the files that are due, and commits their changes.
    fn work(&mut self, now: Instant) {
        let received = Instant::now();
        match self.notices.take(now) {
            Some(Look::Everywhere) => self.scan(now),
            Some(Look::At(paths)) => self.intake.take_in(self.folder.look_at(paths, now)),
            None if now >= self.next_scan => self.scan(now),
            None => self.intake.take_in(self.folder.look_again(now)),
        }
        self.intake.commit(self.folder.unreadable(), received);
    }

    fn scan(&mut self, now: Instant) {
        // Reads of single files between two scans do not change the time of the next scan.
        self.next_scan = now + RESCAN;
        let Self { folder, intake, notices, .. } = self;
        folder.scan(now, |path| notices.is_being_written(path), |update| intake.take_in(update));
    }
}

impl Intake {
    fn take_in(&mut self, update: Update) {
        for (location, reason, problems) in update.problems {
            let new = self.model.set_location_problems(&location, problems);
            (0..new).for_each(|_| self.sink.count_error(SourceKind::Files, reason));
        }
        for (event, origin) in update.events {
            let new = self.model.event(event, &origin);
            (0..new).for_each(|_| self.sink.count_error(SourceKind::Files, "malformed_object"));
        }
    }

    /// Commits the updates. `problem` says why the folder cannot be read; `None` if the folder can
    /// be read.
    fn commit(&mut self, problem: Option<&str>, received: Instant) {
        if problem.is_none() {
            self.sink.heard(SourceKind::Files);
        }
        if problem.is_some() != self.is_cut_off {
            self.is_cut_off = problem.is_some();
            self.sink.cut_off(problem.map(str::to_owned));
        }
        if let Some(problems) = self.model.take_problems() {
            super::show_problems(&*self.sink, &mut self.shown_problems, problems);
        }
        let ((changes, nodes), pods) = (self.model.take_changes(), self.model.take_pods());
        let is_first = self.position_ms == 0;
        if is_first || !(changes.is_empty() && nodes.is_empty() && pods.is_empty()) {
            self.position_ms = unix_ms().max(self.position_ms + 1);
            let positions = vec![(SourceKind::Files, self.position_ms)];
            self.sink.commit(Transaction {
                changes,
                nodes,
                pods,
                positions,
                received: Some(received),
                ..Transaction::default()
            });
        }
    }
}

fn watch(root: &Path, sender: mpsc::Sender<Message>) -> notify::Result<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event| {
        // Sending fails only if the reading thread has ended.
        let _ = sender.send(Message::Noticed(event));
    })?;
    watcher.watch(root, RecursiveMode::Recursive)?;
    Ok(watcher)
}

fn unix_ms() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// The events for the objects that a file defines.
pub(crate) fn manifest_events(name: &str, bytes: &[u8]) -> Vec<Event> {
    documents::parse(name, bytes).definitions.into_iter().map(|definition| definition.event).collect()
}
