//! The parts of an agent as tasks of one runtime without I/O, with a disk in memory.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    runtime::Builder,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{GUARD, in_memory};
use crate::{
    Parts,
    backoff::Backoff,
    metrics::Metrics,
    persist::Disk,
    reconcile::Timing,
    session::client::SessionConfig,
    testing::{endpoint, service, snapshot, update},
};

/// Files that outlive their agent.
#[derive(Debug, Clone, Default)]
struct MemoryDisk(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl MemoryDisk {
    fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().keys().cloned().collect()
    }
}

impl Disk for MemoryDisk {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn lock(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.0.lock().unwrap().get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(
        &self,
        name: &str,
        _lasts: bool,
        content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut bytes = Vec::new();
        content(&mut bytes)?;
        let written = bytes.len() as u64;
        self.0.lock().unwrap().insert(name.to_owned(), bytes);
        Ok(written)
    }

    fn rename(&self, from: &str, to: &str, _lasts: bool) -> io::Result<()> {
        let mut files = self.0.lock().unwrap();
        let bytes = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        files.insert(to.to_owned(), bytes);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.lock().unwrap().remove(name);
        Ok(())
    }

    fn boot_id(&self) -> io::Result<String> {
        Ok("boot".to_owned())
    }
}

/// The parts of an agent whose files are on `disk`.
fn connect(disk: &MemoryDisk) -> Parts {
    let config = SessionConfig {
        node_name: "node-1".into(),
        control_planes: Vec::new(),
        tls: None,
        backoff: Backoff::default(),
        carrier: None,
    };
    let (dataplane, disk) = (Box::new(in_memory::dataplane().0), Box::new(disk.clone()));
    Parts::connect(dataplane, config, Timing::default(), Some(disk), Duration::from_millis(100), &Metrics::default())
}

#[test]
fn an_agent_runs_as_tasks_of_one_runtime_and_begins_with_what_it_saved() {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let disk = MemoryDisk::default();
    let run = async {
        let Parts { state, reconciler, mut progress, saver, .. } = connect(&disk);
        let stop = CancellationToken::new();
        let saving = tokio::spawn(saver.unwrap().run(stop.clone()));
        let reconciling = tokio::spawn(reconciler.follow());
        state.blocking(|state| state.apply(snapshot(1, vec![service("web", 80)]))).await;
        while disk.names() != ["run", "state"] {
            sleep(Duration::from_millis(10)).await;
        }
        state.blocking(|state| state.apply(update(2, vec![endpoint("web", 1, 8080)]))).await;
        progress.wait_for(|progress| progress.generation() == Some(2)).await.unwrap();
        // After a crash, rules may be newer than the state.
        assert!(connect(&disk).state.is_unconfirmed());
        stop.cancel();
        state.stop();
        reconciling.await.unwrap();
        saving.await.unwrap().save_last();
        assert_eq!(disk.names(), ["state"]);
        let Parts { state, .. } = connect(&disk);
        assert_eq!((state.position(), state.is_unconfirmed()), (Some((1, 2)), false));
    };
    runtime.block_on(async { timeout(GUARD, run).await.unwrap() });
}
