//! Tests that pass with both the stand-in and a real `kube-apiserver`. The real server runs if
//! `KUBEBUILDER_ASSETS` names its folder. Otherwise each test prints that it was skipped.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_labelled_for_other_proxies_are_deleted_and_headless_services_are_not_watched() {
    for server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&headless("dns")).await.unwrap();
        let watching = Watching::start(&server.kubeconfig());
        watching.until("everything is listed", |c| c.synced == 1).await;
        server.apply(&headless("later")).await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        server.apply(&web_slice(&["10.1.0.1", "10.1.0.2"])).await.unwrap();
        let other = endpoint_slice("shop", "web-2", "web").port("http", "TCP", 8080).endpoint("10.1.0.3", "n1");
        server.apply(&other.build()).await.unwrap();
        for _ in 0..2 {
            let are_served = |c: &sink::Collected| c.serves("shop", "web") && c.endpoints("shop", "web").len() == 3;
            watching.until("both slices are served", are_served).await;
            let mut taken = web("10.96.0.10");
            taken["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = json!("other");
            server.apply(&taken).await.unwrap();
            let mut dns_only = web_slice(&["10.1.0.1", "10.1.0.2"]);
            dns_only["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
            server.apply(&dns_only).await.unwrap();
            let is_handed_off =
                |c: &sink::Collected| !c.serves("shop", "web") && c.endpoints("shop", "web") == ["10.1.0.3"];
            watching.until("both objects are removed", is_handed_off).await;
            server.apply(&web("10.96.0.10")).await.unwrap();
            server.apply(&web_slice(&["10.1.0.1", "10.1.0.2"])).await.unwrap();
        }
        watching.sink.look(|c| {
            assert!(!c.serves("shop", "dns") && !c.serves("shop", "later"), "{}", server.name());
            assert!(c.problems.is_empty(), "{}: {:?}", server.name(), c.problems);
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_waits_for_a_server_that_starts_later() {
    for mut server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        server.stop();
        let mut watching = Watching::start(&server.kubeconfig());
        watching.until("the failures are counted", |c| c.errors_for("connection_failed") >= 4).await;
        server.restart().await.unwrap();
        let is_served = |c: &sink::Collected| c.synced == 1 && c.serves("shop", "web");
        watching.until("everything is listed", is_served).await;
        watching.shutdown.cancel();
        (&mut watching.task).await.unwrap().unwrap();
    }
}

/// Creates, changes and deletes a Service, with restarts of the server in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_and_stand_in_servers_are_followed_alike() {
    for mut server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        let watching = Watching::start(&server.kubeconfig());
        watching.until("everything is listed", |c| c.synced == 1).await;
        let at = |address: &str| service("shop", "web").cluster_ip(address).port("http", "TCP", 80, 8080).build();
        server.apply(&at("10.96.0.77")).await.unwrap();
        server.apply(&web_slice(&["10.1.0.1", "10.1.0.2"])).await.unwrap();
        watching
            .until("the Service is served", |c| c.serves("shop", "web") && c.endpoints("shop", "web").len() == 2)
            .await;
        server.apply(&web_slice(&["10.1.0.2", "10.1.0.3"])).await.unwrap();
        watching.until("the change is followed", |c| c.endpoints("shop", "web") == ["10.1.0.2", "10.1.0.3"]).await;
        server.restart().await.unwrap();
        server.apply(&web_slice(&["10.1.0.3"])).await.unwrap();
        watching.until("the change after a restart is followed", |c| c.endpoints("shop", "web") == ["10.1.0.3"]).await;
        server.restart_without_history().await.unwrap();
        server.apply(&web_slice(&["10.1.0.4"])).await.unwrap();
        watching
            .until("the change after a loss of history is followed", |c| c.endpoints("shop", "web") == ["10.1.0.4"])
            .await;
        assert!(watching.sink.look(|c| c.serves("shop", "web")), "{}", server.name());
        server.delete(Kind::Service, "shop", "web").await.unwrap();
        watching.until("a deletion is followed", |c| !c.serves("shop", "web")).await;
        let removed = watching.removed();
        assert_eq!(removed.iter().filter(|key| key.starts_with("Service")).collect::<Vec<_>>(), ["Service shop/web"]);
    }
}

/// If one replica lists a kind earlier than another replica, it has a lower position of this kind.
/// No object of this kind needs to change for this difference. An agent that comes from the other
/// replica need not wait for the next bookmark.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_an_agent_saw_at_another_replica_is_requested_at_once() {
    for server in ApiUnderTest::all().await.unwrap() {
        if let Some(stand_in) = server.as_stand_in() {
            stand_in.set_options(|options| options.bookmark_interval = Duration::from_secs(3_600));
        }
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        let earlier = Watching::start(&server.kubeconfig());
        earlier.until("everything is listed", |c| c.synced == 1).await;
        // Change only slices. These changes also raise the version of the server.
        for address in ["10.1.0.1", "10.1.0.2"] {
            server.apply(&web_slice(&[address])).await.unwrap();
        }
        let later = Watching::start(&server.kubeconfig());
        later.until("everything is listed", |c| c.synced == 1).await;
        let seen = later.sink.look(|c| c.positions[&SourceKind::Services]);
        let (before, errors) = earlier.sink.look(|c| (c.positions[&SourceKind::Services], c.errors.clone()));
        assert!(before < seen, "{}: {before} {seen}", server.name());
        earlier.sink.want(SourceKind::Services, seen);
        earlier.until("the position is reached", |c| c.positions[&SourceKind::Services] >= seen).await;
        earlier.sink.look(|c| assert_eq!((&c.errors, c.went_back), (&errors, 0), "{}", server.name()));
        // Later changes still arrive.
        server.apply(&web_slice(&["10.1.0.9"])).await.unwrap();
        earlier.until("a change is followed", |c| c.endpoints("shop", "web") == ["10.1.0.9"]).await;
        server.delete(Kind::Service, "shop", "web").await.unwrap();
        earlier.until("a deletion is followed", |c| !c.serves("shop", "web")).await;
    }
}

/// A kind that never changes stays current, also with the default settings of etcd. Its position
/// follows the changes of other kinds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kind_that_never_changes_stays_current() {
    for server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        let watching = Watching::start_with(&server.kubeconfig(), Duration::from_secs(6));
        watching.until("everything is listed", |c| c.synced == 1).await;
        for round in 0..3 {
            server.apply(&web_slice(&[&format!("10.1.0.{}", round + 1)])).await.unwrap();
            let (heard, reached) =
                watching.sink.look(|c| (c.heard[&SourceKind::ServiceCidrs], c.positions[&SourceKind::EndpointSlices]));
            let is_current = |c: &sink::Collected| {
                c.heard[&SourceKind::ServiceCidrs] > heard && c.positions[&SourceKind::ServiceCidrs] > reached
            };
            watching.until("the kind is current", is_current).await;
        }
        watching.sink.look(|c| assert!(c.cut_offs.is_empty(), "{}: {:?}", server.name(), c.cut_offs));
    }
}
