//! Tests of the source `files:DIR` with real folders.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};

use headgate_control_plane::{
    model::Sink,
    objects::SourceKind,
    source::{self, SourceError, SourceSettings, SourceSpec},
};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::sink::{self, CollectingSink};

/// A folder with a running source. Dropping the value stops the source.
struct Reading {
    folder: TempDir,
    sink: Arc<CollectingSink>,
    shutdown: CancellationToken,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Reading {
    async fn of(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, text)| put(folder.path(), name, text));
        Self::of_folder(folder).await
    }

    async fn of_folder(folder: TempDir) -> Self {
        let root = folder.path().to_owned();
        let reading = Self::started(folder, &root);
        reading.until("the folder is read", |c| c.synced == 1).await;
        reading
    }

    /// Starts the source, without waiting until it has been listed.
    fn started(folder: TempDir, root: &Path) -> Self {
        let (sink, shutdown) = (Arc::new(CollectingSink::default()), CancellationToken::new());
        let spec: SourceSpec = format!("files:{}", root.display()).parse().unwrap();
        let to = Arc::clone(&sink) as Arc<dyn Sink>;
        tokio::spawn(source::run(spec, SourceSettings::default(), to, shutdown.clone()));
        Self { folder, sink, shutdown }
    }

    async fn until(&self, what: &str, condition: impl FnMut(&sink::Collected) -> bool) {
        self.sink.until(what, condition).await;
    }

    /// Waits until a problem contains this text.
    async fn until_problem(&self, text: &str) {
        self.until(text, |c| c.problem_texts().iter().any(|problem| problem.contains(text))).await;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        put(self.folder.path(), name, text);
    }

    /// Makes one more change, and waits until the source has read this change. The source reads
    /// edits in order, so it has read all earlier edits by then.
    async fn settle(&self, name: &str) {
        self.put("zz-settle.yaml", &service(name));
        self.sink.until("the last edit arrived", |c| c.serves("default", name)).await;
    }
}

fn put(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn service(name: &str) -> String {
    service_at(name, "10.0.0.1")
}

fn service_at(name: &str, address: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  clusterIP: {address}\n  ports:\n  - port: 80\n---\n"
    )
}

fn slice(name: &str, service: &str, addresses: &[&str]) -> String {
    let mut text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata:\n  name: {name}\n  labels: {{kubernetes.io/service-name: {service}}}\nports:\n- {{name: '', port: 8080}}\nendpoints:\n"
    );
    for address in addresses {
        text.push_str(&format!("- addresses: [{address}]\n"));
    }
    text + "---\n"
}

#[tokio::test]
async fn a_folder_is_served_and_followed() {
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\n";
    let reading = Reading::of(&[
        ("web.yaml", &(service("web") + &slice("web-1", "web", &["10.1.0.1", "10.1.0.2"]))),
        ("deep/er/node.yml", node),
        ("cidr.json", r#"{"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "k"}, "spec": {"cidrs": ["10.0.0.0/16"]}}"#),
        ("deployment.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n"),
        (".hidden.yaml", &service("hidden")),
        ("notes.txt", "not a manifest"),
    ])
    .await;
    reading.sink.look(|c| {
        assert_eq!((c.state.service_count(), c.nodes.len()), (1, 1));
        assert_eq!(c.endpoints("default", "web"), ["10.1.0.1", "10.1.0.2"]);
        assert!(c.state.service_cidr("k").is_some());
        assert!(c.positions[&SourceKind::Files] > 1_700_000_000_000);
        assert_eq!(c.problem_texts(), [""; 0]);
        assert_eq!(c.commits, 1);
    });
    reading.put("web.yaml", &(service("web") + &slice("web-1", "web", &["10.1.0.1", "10.1.0.3"])));
    reading.until("the endpoint is replaced", |c| c.endpoints("default", "web") == ["10.1.0.1", "10.1.0.3"]).await;
    reading.sink.look(|c| assert_eq!((c.commit_sizes.last(), c.commits, c.went_back), (Some(&2), 2, 0)));
    reading.put("new/api.yaml", &service_at("api", "10.0.0.2"));
    reading.until("a new folder is read", |c| c.serves("default", "api")).await;
    fs::remove_dir_all(reading.path("new")).unwrap();
    reading.until("the Services of a removed folder are removed", |c| !c.serves("default", "api")).await;
    fs::rename(reading.path("web.yaml"), reading.path("web2.yaml")).unwrap();
    reading.settle("later").await;
    reading.sink.look(|c| assert!(!c.removed.contains(&"Service default/web".to_owned()), "{:?}", c.removed));
}

#[tokio::test]
async fn a_malformed_file_is_reported_and_removes_nothing() {
    let good = service("web") + &slice("web-1", "web", &["10.1.0.1"]);
    let reading = Reading::of(&[("web.yaml", &good), ("other.yaml", &service_at("other", "10.0.0.3"))]).await;
    for bad in ["kind: [", "}{", "\u{0}", "a: b\n a: c\n", "apiVersion: v1\nkind: Service\n"] {
        // Without their names, the objects would be removed after a second, and a slow machine may
        // need as long for this step.
        reading.put("web.yaml", &format!("# web web-1\n{bad}"));
        reading.until_problem("web.yaml, document 1 |").await;
        reading.put("web.yaml", &good);
        reading.until("the fault is fixed", |c| c.problems.is_empty()).await;
    }
    reading.sink.look(|c| assert_eq!(c.removed, [""; 0]));
    // Text that is no manifest defines nothing, so after a second the objects are gone.
    reading.put("web.yaml", "just text\n");
    reading.until_problem("web.yaml, document 1 |").await;
    reading.put("web.yaml", &good);
    let is_fixed = |c: &sink::Collected| c.problems.is_empty() && c.endpoints("default", "web") == ["10.1.0.1"];
    reading.until("the text is replaced", is_fixed).await;
    let removed = reading.sink.look(|c| c.removed.len());
    // One of three documents is broken. Changes in the other documents are read, and the objects of
    // the broken document stay.
    let three = |middle: &str| {
        format!("{}{middle}---\n{}", service_at("web", "10.0.0.7"), slice("web-1", "web", &["10.1.0.9"]))
    };
    reading.put("web.yaml", &three("kind: {\n"));
    reading.until("changes in the other documents are read", |c| c.endpoints("default", "web") == ["10.1.0.9"]).await;
    reading.sink.look(|c| {
        assert!(c.problem_texts().iter().any(|p| p.contains("web.yaml, document 2")), "{:?}", c.problem_texts());
        assert!(c.errors[&(SourceKind::Files, "malformed_file")] >= 7);
        assert_eq!(c.removed[removed..], ["Endpoint default/web 10.1.0.1"]);
    });
    // The problem names the field of the wrong type.
    let typed = "apiVersion: v1\nkind: Service\nmetadata: {name: other}\nspec:\n  ports:\n  - port: many\n";
    reading.put("other.yaml", typed);
    let is_reported = |p: &String| {
        p.starts_with("other.yaml, document 1 | Service default/other | spec.ports[0].port") && p.contains("line 1")
    };
    reading.until("the field is reported", |c| c.problem_texts().iter().any(is_reported)).await;
    reading.sink.look(|c| assert!(c.serves("default", "other")));
}

#[tokio::test]
async fn a_write_that_truncates_the_file_first_removes_nothing() {
    let text = service("web") + &service_at("api", "10.0.0.2") + &slice("web-1", "web", &["10.1.0.1", "10.1.0.2"]);
    let reading = Reading::of(&[("web.yaml", &text)]).await;
    // The file is emptied and left open. Next, its first document is written, and last, the other
    // documents are written.
    let mut file = fs::File::create(reading.path("web.yaml")).unwrap();
    reading.settle("one").await;
    file.write_all(&text.as_bytes()[..service("web").len()]).unwrap();
    reading.settle("two").await;
    file.write_all(&text.as_bytes()[service("web").len()..]).unwrap();
    drop(file);
    // An editor renames the old file and writes a new file.
    fs::rename(reading.path("web.yaml"), reading.path("web.yaml~")).unwrap();
    fs::write(reading.path("web.yaml"), text.replace("10.1.0.2", "10.1.0.3")).unwrap();
    reading.until("the new version is served", |c| c.endpoints("default", "web") == ["10.1.0.1", "10.1.0.3"]).await;
    reading.sink.look(|c| assert_eq!(c.removed, ["Endpoint default/web 10.1.0.2"]));
    // The file is emptied and closed.
    fs::write(reading.path("web.yaml"), "").unwrap();
    reading
        .until("the Services of the emptied file are removed", |c| {
            !c.serves("default", "web") && !c.serves("default", "api")
        })
        .await;
    reading.sink.look(|c| assert_eq!(c.endpoints("default", "web"), [""; 0]));
}

#[tokio::test]
async fn a_mounted_config_map_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "..2024_1/web.yaml", &service("web"));
    symlink("..2024_1", folder.path().join("..data")).unwrap();
    symlink("..data/web.yaml", folder.path().join("web.yaml")).unwrap();
    let reading = Reading::of_folder(folder).await;
    reading.sink.look(|c| assert_eq!(c.state.service_count(), 1));
    reading.put("..2024_2/web.yaml", &(service("web") + &service_at("api", "10.0.0.2")));
    symlink("..2024_2", reading.path("..data_tmp")).unwrap();
    fs::rename(reading.path("..data_tmp"), reading.path("..data")).unwrap();
    fs::remove_dir_all(reading.path("..2024_1")).unwrap();
    reading.until("the new version is served", |c| c.serves("default", "api")).await;
    reading.sink.look(|c| assert_eq!((c.removed.len(), c.problems.len()), (0, 0)));
}

#[tokio::test]
async fn services_of_a_folder_that_disappears_stay_and_the_source_is_cut_off() {
    let reading = Reading::of(&[("web.yaml", &service("web"))]).await;
    let (folder, away) = (reading.folder.path().to_owned(), reading.folder.path().with_extension("away"));
    fs::rename(&folder, &away).unwrap();
    reading.until("the source is cut off", |c| c.cut_off.is_some() && !c.problems.is_empty()).await;
    reading.until_problem("cannot be read (No such file").await;
    let heard = reading.sink.look(|c| {
        assert!(c.cut_off.as_ref().unwrap().contains("cannot be read"), "{:?}", c.cut_off);
        let problem = &c.problems[0];
        assert_eq!(Path::new(&problem.object), folder.as_path(), "{problem:?}");
        assert!(problem.message.contains("create it") && !problem.message.contains("permissions"), "{problem:?}");
        c.heard.clone()
    });
    fs::rename(&away, &folder).unwrap();
    reading.until("the folder is read again", |c| c.cut_off.is_none() && c.problems.is_empty()).await;
    reading.sink.look(|c| assert!(c.heard != heard && c.serves("default", "web") && c.removed.is_empty()));
}

#[tokio::test]
async fn a_replica_that_starts_on_a_missing_or_empty_folder_waits_and_empties_nothing() {
    let above = tempfile::tempdir().unwrap();
    let root = above.path().join("clone/current");
    let reading = Reading::started(above, &root);
    let waits_for =
        |text: &'static str| move |c: &sink::Collected| c.cut_off.as_ref().is_some_and(|reason| reason.contains(text));
    reading.until("the missing folder is reported", waits_for("create it")).await;
    fs::create_dir_all(&root).unwrap();
    reading.until("the empty folder is reported", waits_for("contains no manifest")).await;
    reading.put("clone/1/web.yaml", &service("web"));
    reading.sink.look(|c| assert_eq!((c.synced, c.commits, c.heard.len(), c.problems.len()), (0, 0, 0, 1)));
    fs::remove_dir(&root).unwrap();
    symlink("1", &root).unwrap();
    reading.until("the folder is read", |c| c.synced == 1 && c.serves("default", "web")).await;
    reading.sink.look(|c| assert_eq!((c.cut_off.clone(), c.problems.len()), (None, 0)));
    // git-sync switches the symlink.
    reading.put("clone/2/web.yaml", &(service("web") + &service_at("api", "10.0.0.2")));
    symlink("2", reading.path("clone/next")).unwrap();
    fs::rename(reading.path("clone/next"), &root).unwrap();
    reading.until("the new clone is read", |c| c.serves("default", "api")).await;
    reading.put("clone/2/web.yaml", &service_at("more", "10.0.0.3"));
    reading.until("edits of the new clone are read", |c| c.serves("default", "more")).await;
    // The last object is removed.
    fs::write(reading.path("clone/2/web.yaml"), "").unwrap();
    reading.until("nothing is served", |c| c.state.service_count() == 0).await;
    reading.sink.look(|c| assert_eq!((c.cut_off.clone(), c.problems.len()), (None, 0)));
}

#[tokio::test]
async fn a_replica_that_cannot_know_what_to_serve_waits() {
    let invalid = service("api").replace("port: 80", "port: 70000");
    let other = service_at("other", "10.0.0.2");
    for (bad, expected) in [
        (service("api").replace("ports:", "ports: ["), "web.yaml, document 2"),
        (service("api").replace("port: 80", "port: '80'"), "Service default/api is invalid"),
        (invalid, "Service default/api is invalid"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), "web.yaml", &(service("web") + &bad));
        put(folder.path(), "other.yaml", &other);
        let root = folder.path().to_owned();
        let reading = Reading::started(folder, &root);
        reading
            .until("the replica says why it waits", |c| c.cut_off.as_ref().is_some_and(|why| why.contains(expected)))
            .await;
        reading.sink.look(|c| assert_eq!((c.synced, c.commits, c.heard.len()), (0, 0, 0), "{bad}"));
        assert!(reading.sink.look(|c| !c.problems.is_empty()));
        reading.put("web.yaml", &service("web"));
        reading.until("the folder is read", |c| c.synced == 1).await;
        reading.sink.look(|c| assert!(c.serves("default", "web") && c.cut_off.is_none() && c.commits == 1));
    }
}

/// As by a loop of `kubectl get … > web.yaml`: the file is empty or a half nearly all the time.
#[tokio::test]
async fn a_file_that_is_written_in_place_again_and_again_is_read_whole() {
    let text = |port: u32| {
        let other = service("other").replace("port: 80", &format!("port: {port}"));
        other + &slice("other-1", "other", &["10.1.0.1", "10.1.0.2"])
    };
    let reading = Reading::of(&[("web.yaml", &(service_at("web", "10.0.0.2") + &text(80)))]).await;
    let path = reading.path("web.yaml");
    let writer = tokio::spawn(async move {
        let pause = |milliseconds| tokio::time::sleep(std::time::Duration::from_millis(milliseconds));
        for port in 1_000.. {
            let text = text(port);
            // The first half is a slice with one of the two endpoints.
            let half = text.find("- addresses: [10.1.0.2]").unwrap();
            let mut file = fs::File::create(&path).unwrap();
            pause(30).await;
            file.write_all(&text.as_bytes()[..half]).unwrap();
            pause(30).await;
            file.write_all(&text.as_bytes()[half..]).unwrap();
            drop(file);
            pause(2).await;
        }
    });
    reading.until("the removed Service is not served", |c| !c.serves("default", "web")).await;
    let commits = reading.sink.look(|c| c.commits);
    reading.until("later versions of the file are read", |c| c.commits >= commits + 2).await;
    reading.sink.look(|c| {
        assert_eq!(c.removed, ["Service default/web"], "a half was served");
        assert_eq!(c.endpoints("default", "other"), ["10.1.0.1", "10.1.0.2"]);
    });
    writer.abort();
}

#[tokio::test]
async fn a_folder_needs_no_kubeconfig() {
    let sink = Arc::new(CollectingSink::default());
    let spec = SourceSpec::Files("/tmp".into());
    let useless = source::run(
        spec,
        SourceSettings { kubeconfig: Some("/k".into()), ..SourceSettings::default() },
        sink,
        CancellationToken::new(),
    )
    .await
    .unwrap_err();
    assert!(matches!(useless, SourceError::UselessKubeconfig(..)), "{useless}");
}
