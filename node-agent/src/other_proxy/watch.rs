//! Looks for the other proxy again and again, and says when the role of the agent changes.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use headgate_settings::Settings;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::{info, warn};

use super::{Decision, Look, Looker, Other, PROGRAMMED, ReadRules, STOOD_BY, has_programmed};
use crate::{
    dataplane_choice,
    options::{OnOtherProxy, Options, Standby},
    persist::ROLE_FILE,
};

/// The pause between two looks in standby. Each third one reads rules, if there is no other sign.
const IN_STANDBY: Duration = Duration::from_secs(2);

/// The pause between two looks while the agent programs the node.
const PROGRAMMING: Duration = Duration::from_secs(5);

/// The role of the agent, and what it knows of the other proxy.
pub(crate) struct OtherProxyWatch {
    asked: Standby,
    keeps: bool,
    folder: Option<PathBuf>,
    settings: Settings,
    looker: Arc<Mutex<Looker>>,
    decision: Decision,
    /// The other proxy while the agent stands by.
    standby: Option<Other>,
    /// True if rules of an earlier run of this process have to go.
    has_leftovers: bool,
    beside: watch::Sender<Option<String>>,
}

impl OtherProxyWatch {
    /// Looks for the first time, and chooses the role.
    pub(crate) async fn begin(options: &Options, settings: &Settings) -> Self {
        let folder = options.state_folder().map(PathBuf::from);
        let last = folder.as_deref().and_then(has_programmed);
        let looker = Arc::new(Mutex::new(Looker::new(settings)));
        // An agent that knows that it wrote the rules need not read them.
        let reads = if last == Some(true) { ReadRules::No } else { ReadRules::All };
        let (look, last) = match options.standby {
            Standby::Never => (Look::default(), None),
            Standby::Auto | Standby::Always => (looking(&looker, reads).await, last),
        };
        let (decision, stands_by) = Decision::begin(&look, last, Instant::now());
        let program = if stands_by { Other::KUBE_PROXY } else { Other::NONE };
        let other = look.other.unwrap_or_else(|| Other::of(program, None));
        let mut watch = Self {
            asked: options.standby,
            keeps: options.on_other_proxy == OnOtherProxy::Keep,
            folder,
            settings: settings.clone(),
            looker,
            decision,
            standby: None,
            has_leftovers: false,
            beside: watch::Sender::new(None),
        };
        watch.enter(Some(other).filter(|_| stands_by || options.standby == Standby::Always));
        watch
    }

    /// The other proxy while the agent stands by.
    pub(crate) fn standby(&self) -> Option<&Other> {
        self.standby.as_ref()
    }

    /// The other proxy that works beside this agent, with `--on-other-proxy=keep`.
    pub(crate) fn beside(&self) -> watch::Receiver<Option<String>> {
        self.beside.subscribe()
    }

    fn enter(&mut self, standby: Option<Other>) {
        match &standby {
            Some(other) => info!("standby: {other} runs on this node; this agent writes nothing until it has gone"),
            None => info!("this agent programs the node"),
        }
        if let Some(folder) = &self.folder {
            let role = if standby.is_some() { STOOD_BY } else { PROGRAMMED };
            if let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(ROLE_FILE), role)) {
                warn!(%error, "cannot write the role of this agent to {}", folder.display());
            }
        }
        self.standby = standby;
    }

    /// Waits until the agent has another role, or until more is known about the other proxy.
    /// `tells_chains` says whether the rules of this agent differ from kube-proxy's chains.
    pub(crate) async fn changed(&mut self, tells_chains: bool) {
        match &self.standby {
            Some(_) => self.until_taken_over().await,
            None if self.asked == Standby::Never => std::future::pending().await,
            None => self.until_yielded(tells_chains).await,
        }
    }

    /// Waits until the other proxy has gone, or until more is known about it, and enters the next
    /// role. Meanwhile removes the rules that this process wrote before it yielded.
    async fn until_taken_over(&mut self) {
        for number in 0_u64.. {
            let read = if number.is_multiple_of(3) { ReadRules::All } else { ReadRules::No };
            let look = looking(&self.looker, read).await;
            let has_gone = self.decision.takes_over(&look, Instant::now());
            if has_gone {
                let none = Some(Other::of(Other::NONE, None)).filter(|_| self.asked == Standby::Always);
                if none.is_none() || none != self.standby {
                    return self.enter(none);
                }
            }
            if self.has_leftovers
                && let Some(mode) = look.other.as_ref().and_then(Other::uses)
            {
                let (settings, mode) = (self.settings.clone(), mode.to_owned());
                let remove = move || dataplane_choice::remove_leftovers(&settings, Some(&mode)).is_empty();
                self.has_leftovers = !spawn_blocking(remove).await.unwrap_or_default();
            }
            let known = self.standby.as_ref();
            if let Some(other) = look.other.filter(|other| known.is_none_or(|known| other.says_more_than(known))) {
                return self.enter(Some(other));
            }
            sleep(IN_STANDBY).await;
        }
    }

    /// Waits until the agent yields to another proxy, and enters the next role.
    async fn until_yielded(&mut self, chains: bool) {
        loop {
            sleep(PROGRAMMING).await;
            let look = looking(&self.looker, ReadRules::Beside { chains }).await;
            let yields = self.decision.yields(&look, chains, Instant::now());
            if self.keeps {
                let beside = look.other.map(|other| other.to_string());
                self.beside.send_if_modified(|old| std::mem::replace(old, beside.clone()) != beside);
            } else if let Some(other) = look.other.filter(|_| yields) {
                warn!(
                    "{other} has returned to this node and works: this agent yields, and removes its rules. To let Headgate serve the node, keep {other} away from it (docs/migration.md)"
                );
                self.has_leftovers = true;
                return self.enter(Some(other));
            }
        }
    }
}

async fn looking(looker: &Arc<Mutex<Looker>>, read: ReadRules) -> Look {
    let looker = Arc::clone(looker);
    let look = spawn_blocking(move || looker.lock().unwrap_or_else(PoisonError::into_inner).look(read));
    // A look that fails has seen nothing, which is no absence.
    look.await.unwrap_or_else(|_| Look { other: Some(Other::of(Other::UNKNOWN, None)), ..Look::default() })
}
