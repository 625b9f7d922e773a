//! `headgatectl cleanup`: a DaemonSet removes everything of Headgate from all nodes.

use std::io::Write;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::answer::Failure;
use crate::args::CleanupArgs;
use crate::cluster::Cluster;
use crate::render::plain;

/// The DaemonSet, as kustomize creates it.
const MANIFEST: &str = include_str!("../../deploy/kustomize/cleanup/cleanup.yaml");
/// The option of the agent that decides whether it cleans nodes without another proxy.
const OPTION: &str = "--cleanup-stay=";
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn run(wanted: &CleanupArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let cluster = Cluster::open(&wanted.cluster).await?;
    let namespace = &wanted.cluster.install_namespace;
    let collection = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets");
    let image = match &wanted.image {
        Some(image) => image.clone(),
        None => {
            let agents = cluster.get(&format!("{collection}/headgate-node-agent")).await?.unwrap_or_default();
            let image = agents["spec"]["template"]["spec"]["containers"][0]["image"].as_str().map(str::to_owned);
            image.ok_or_else(|| {
                Failure::Usage("no DaemonSet headgate-node-agent names an image: pass --image".to_owned())
            })?
        }
    };
    let daemon_set = manifest(namespace, &image, wanted.without_proxy)?;
    let path = format!("{collection}/headgate-cleanup");
    match cluster.get(&path).await? {
        Some(_) => cluster.patch(&path, &daemon_set).await?,
        None => cluster.create(&collection, &daemon_set).await?,
    }
    if !wanted.wait {
        writeln!(
            out,
            "Created the DaemonSet {namespace}/headgate-cleanup. Its pods are ready on clean nodes. Delete it then."
        )?;
        return Ok(());
    }
    let began = Instant::now();
    let result = loop {
        let status = cluster.get(&path).await?.unwrap_or_default();
        let nodes = status["status"]["desiredNumberScheduled"].as_u64().unwrap_or_default();
        let is_current = status["status"]["observedGeneration"] == status["metadata"]["generation"];
        let count = |field: &str| status["status"][field].as_u64().unwrap_or_default();
        if is_current && nodes > 0 && count("numberReady") == nodes && count("updatedNumberScheduled") == nodes {
            break Ok(nodes);
        }
        if began.elapsed() > wanted.timeout {
            break Err(unclean(&cluster, namespace).await?);
        }
        sleep(PAUSE).await;
    };
    cluster.delete(&path).await?;
    let nodes = result?;
    Ok(writeln!(out, "Nothing of Headgate is left on {nodes} nodes.")?)
}

fn manifest(namespace: &str, image: &str, without_proxy: bool) -> Result<Value, Failure> {
    let failed = |error| Failure::Cluster(format!("deploy/kustomize/cleanup/cleanup.yaml: {error}"));
    let mut daemon_set: Value = serde_saphyr::from_str(MANIFEST).map_err(failed)?;
    daemon_set["metadata"]["namespace"] = namespace.into();
    let container = &mut daemon_set["spec"]["template"]["spec"]["containers"][0];
    container["image"] = image.into();
    for arg in container["args"].as_array_mut().into_iter().flatten() {
        if without_proxy && arg.as_str().is_some_and(|arg| arg.starts_with(OPTION)) {
            *arg = format!("{OPTION}always").into();
        }
    }
    Ok(daemon_set)
}

/// Names the nodes that are not clean, with the reasons that their pods gave when they ended.
async fn unclean(cluster: &Cluster, namespace: &str) -> Result<Failure, Failure> {
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let pods = cluster.list(&path, "app.kubernetes.io/name=headgate-cleanup", "").await?;
    let mut lines = Vec::new();
    for pod in &pods {
        let container = &pod["status"]["containerStatuses"][0];
        if container["ready"] != true {
            let ended =
                [&container["state"], &container["lastState"]].map(|state| state["terminated"]["message"].as_str());
            let reason = ended.into_iter().flatten().next().unwrap_or("its pod has not ended yet: look at its log");
            let node = pod["spec"]["nodeName"].as_str().unwrap_or("(no node)");
            lines.push(format!("\n  {node}: {}", plain(reason.trim())));
        }
    }
    lines.sort();
    Ok(Failure::TimedOut(format!("not clean in time: {} of {} nodes{}", lines.len(), pods.len(), lines.concat())))
}
