//! kube-rs's watcher, with a map from names to objects. The watcher's events change the map.

use std::{collections::BTreeMap, fmt::Debug, pin::Pin, time::Duration};

use futures::{Stream, StreamExt};
use headgate_tests::apiserver::ApiServer;
use kube::{
    Api, Client, Config, Resource, ResourceExt,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;

/// A guard against hanging. No test asserts on time.
const GUARD: Duration = Duration::from_secs(60);

type Events<K> = Pin<Box<dyn Stream<Item = watcher::Result<Event<K>>> + Send>>;

pub(crate) struct Follower<K> {
    events: Events<K>,
    pub(crate) state: BTreeMap<String, K>,
    incoming: BTreeMap<String, K>,
    /// The number of complete lists.
    pub(crate) lists: usize,
    pub(crate) applied: usize,
    pub(crate) errors: Vec<watcher::Error>,
}

async fn client(server: &ApiServer) -> Client {
    let kubeconfig = Kubeconfig::from_yaml(&server.kubeconfig()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// Follows every object of a kind. The watcher lists the objects in pages.
pub(crate) async fn follow<K>(server: &ApiServer) -> Follower<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    Follower::new(Api::all(client(server).await), watcher::Config::default())
}

impl<K> Follower<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    pub(crate) fn new(api: Api<K>, config: watcher::Config) -> Self {
        Self {
            events: Box::pin(watcher(api, config)),
            state: BTreeMap::new(),
            incoming: BTreeMap::new(),
            lists: 0,
            applied: 0,
            errors: Vec::new(),
        }
    }

    fn take(&mut self, event: watcher::Result<Event<K>>) {
        match event {
            Ok(Event::Init) => self.incoming.clear(),
            Ok(Event::InitApply(object)) => {
                self.incoming.insert(object.name_any(), object);
            }
            Ok(Event::InitDone) => {
                self.state = std::mem::take(&mut self.incoming);
                self.lists += 1;
            }
            Ok(Event::Apply(object)) => {
                self.state.insert(object.name_any(), object);
                self.applied += 1;
            }
            Ok(Event::Delete(object)) => {
                assert!(
                    self.state.remove(&object.name_any()).is_some(),
                    "{} was deleted, but is not in the map",
                    object.name_any()
                );
            }
            Err(error) => self.errors.push(error),
        }
    }

    /// Reads events until a condition holds.
    pub(crate) async fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let guarded = tokio::time::timeout(GUARD, async {
            while !condition(self) {
                let errors = self.errors.len();
                let event = self.events.next().await.unwrap();
                self.take(event);
                if self.errors.len() > errors {
                    // The watcher retries at once. Give the server some time.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        });
        if guarded.await.is_err() {
            panic!("timed out waiting until {what}: have {:?}, errors {:?}", self.names(), self.errors);
        }
    }

    pub(crate) async fn until_listed(&mut self) {
        self.until("a list is complete", |follower| follower.lists > 0).await;
    }

    pub(crate) async fn until_names(&mut self, names: &[&str]) {
        self.until(&format!("the watcher sees {names:?}"), |follower| follower.names() == names).await;
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.state.keys().map(String::as_str).collect()
    }

    /// Polls the watcher until a condition on the server holds. Without polls, the watcher would
    /// send no requests.
    pub(crate) async fn poll_until(
        &mut self,
        what: &str,
        server: &ApiServer,
        condition: impl FnMut(&ApiServer) -> bool,
    ) {
        let mut waiting = Box::pin(server.wait_until(what, condition));
        loop {
            let event = tokio::select! {
                done = &mut waiting => break done.unwrap(),
                event = self.events.next() => event.unwrap(),
            };
            self.take(event);
        }
    }

    pub(crate) fn label(&self, name: &str, label: &str) -> Option<&str> {
        self.state.get(name)?.labels().get(label).map(String::as_str)
    }
}
