//! Looks for the other proxy again and again, and says when the role of the agent changes.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use headgate_settings::Settings;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::{error, info, warn};

use super::{Decision, Kinds, LastRole, Look, Looker, Other, ReadRules, are_visible};
use crate::{
    dataplane::ErrorKind,
    dataplane_choice,
    options::{OnOtherProxy, Options, Standby},
};

/// The pause between two looks while the other proxy shows signs that cost little.
const SEEN: Duration = Duration::from_secs(2);

/// The pause between two looks that read rules, or that find nothing while the agent programs.
const SILENT: Duration = Duration::from_secs(5);

/// The role of the agent, and what it knows of the other proxy.
pub(crate) struct OtherProxyWatch {
    asked: Standby,
    keeps: bool,
    folder: Option<PathBuf>,
    settings: Settings,
    looker: Option<Looker>,
    decision: Decision,
    /// The other proxy while the agent stands by.
    standby: Option<Other>,
    /// True if rules of an earlier run of this process have to go.
    has_leftovers: bool,
    beside: watch::Sender<Option<String>>,
}

impl OtherProxyWatch {
    /// Looks for the first time, and chooses the role.
    pub(crate) async fn begin(options: &Options, settings: &Settings) -> Result<Self, std::io::Error> {
        let folder = options.state_folder().map(PathBuf::from);
        let last = folder.as_deref().and_then(LastRole::read);
        let (looker, look) = match options.standby {
            Standby::Never => (None, Look::default()),
            Standby::Auto | Standby::Always => {
                let looker = Looker::new(settings);
                // An agent that knows that it wrote the rules need not read them.
                let reads =
                    if last == Some(LastRole::Programmed) { ReadRules::Seen(Kinds::ALL) } else { ReadRules::Silent };
                let (looker, look) = looking(looker, reads).await?;
                (Some(looker), look)
            }
        };
        let (decision, stands_by) = Decision::begin(&look, last.filter(|_| looker.is_some()), Instant::now());
        if looker.is_some() && !are_visible() {
            info!(
                "this process does not see the processes of the node: another service proxy is known only by its pages and its rules"
            );
        }
        let stands_by = stands_by || options.standby == Standby::Always;
        let other = look.other.or_else(|| look.has_rules.then(|| Other::kube_proxy(None))).unwrap_or_else(Other::none);
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
        watch.enter(stands_by.then_some(other));
        Ok(watch)
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
        let role = if standby.is_some() { LastRole::StoodBy } else { LastRole::Programmed };
        if let Some(folder) = &self.folder
            && let Err(error) = role.write(folder)
        {
            warn!(%error, "cannot write the role of this agent to {}", folder.display());
        }
        self.standby = standby;
    }

    /// Waits until the other proxy has gone, or until more is known about it, and enters the next
    /// role. Meanwhile removes the rules that this process wrote before it yielded.
    pub(crate) async fn until_taken_over(&mut self) {
        loop {
            let look = self.look(ReadRules::Silent).await;
            let has_gone = self.decision.takes_over(&look, Instant::now());
            if has_gone && self.asked != Standby::Always {
                return self.enter(None);
            }
            if has_gone && self.standby != Some(Other::none()) {
                return self.enter(Some(Other::none()));
            }
            if self.has_leftovers
                && let Some(mode) = look.other.as_ref().and_then(Other::uses)
            {
                self.has_leftovers = !self.clean(mode.to_owned()).await;
            }
            let known = self.standby.as_ref();
            let is_seen = look.other.is_some();
            if let Some(other) = look.other.filter(|other| known.is_none_or(|known| other.says_more_than(known))) {
                return self.enter(Some(other));
            }
            sleep(if is_seen { SEEN } else { SILENT }).await;
        }
    }

    /// Waits until the agent yields to another proxy, and enters the next role.
    pub(crate) async fn until_yielded(&mut self, kinds: Kinds) {
        if self.looker.is_none() {
            std::future::pending::<()>().await;
        }
        loop {
            sleep(SILENT).await;
            let look = self.look(ReadRules::Seen(kinds)).await;
            let yields = self.decision.yields(&look, kinds, Instant::now());
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

    async fn look(&mut self, read: ReadRules) -> Look {
        let Some(looker) = self.looker.take() else { return Look::default() };
        match looking(looker, read).await {
            Ok((looker, look)) => {
                self.looker = Some(looker);
                look
            }
            Err(error) => {
                error!(%error, "cannot look for another service proxy");
                self.looker = Some(Looker::new(&self.settings));
                // What cannot be seen does not count as absence.
                Look { other: self.standby.clone(), ..Look::default() }
            }
        }
    }

    /// Removes this agent's rules. What a proxy in this mode uses stays. Returns false if something
    /// could not be removed.
    async fn clean(&self, mode: String) -> bool {
        let settings = self.settings.clone();
        let remove = move || {
            let mut is_clean = true;
            for leftover in dataplane_choice::leftovers(&settings, Some(&mode)) {
                if let Err(error) = leftover.remove()
                    && error.kind != ErrorKind::Unavailable
                {
                    is_clean = false;
                    warn!(backend = leftover.name, %error, "cannot remove the rules of this agent yet; trying again");
                }
            }
            is_clean
        };
        let is_clean = spawn_blocking(remove).await.unwrap_or_default();
        if is_clean {
            info!("the rules of this agent are removed");
        }
        is_clean
    }
}

async fn looking(mut looker: Looker, read: ReadRules) -> Result<(Looker, Look), std::io::Error> {
    let look = spawn_blocking(move || {
        let look = looker.look(read);
        (looker, look)
    });
    Ok(look.await?)
}
