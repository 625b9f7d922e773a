//! What holds for the stand-in and for a real `kube-apiserver` alike. The real one is run where
//! `KUBEBUILDER_ASSETS` names its folder; where not, each test says so.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_that_hand_objects_off_arrive_as_deletions_and_headless_services_do_not_arrive() {
    for server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&headless("dns")).await.unwrap();
        let watching = Watching::start(&server.kubeconfig());
        watching.sink.until("everything is listed", |c| c.synced == 1).await;
        server.apply(&headless("later")).await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        server.apply(&web_slice(&["10.1.0.1", "10.1.0.2"])).await.unwrap();
        let other = endpoint_slice("shop", "web-2", "web").port("http", "TCP", 8080).endpoint("10.1.0.3", "n1");
        server.apply(&other.build()).await.unwrap();
        for _ in 0..2 {
            let is_there = |c: &sink::Collected| c.serves("shop", "web") && c.endpoints("shop", "web").len() == 3;
            watching.sink.until("both are there", is_there).await;
            let mut taken = web("10.96.0.10");
            taken["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = json!("other");
            server.apply(&taken).await.unwrap();
            let mut dns_only = web_slice(&["10.1.0.1", "10.1.0.2"]);
            dns_only["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
            server.apply(&dns_only).await.unwrap();
            let is_handed_off =
                |c: &sink::Collected| !c.serves("shop", "web") && c.endpoints("shop", "web") == ["10.1.0.3"];
            watching.sink.until("both are handed off", is_handed_off).await;
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
async fn a_server_that_is_away_at_first_is_waited_for() {
    for mut server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        server.stop();
        let mut watching = Watching::start(&server.kubeconfig());
        watching.sink.until("it is counted", |c| c.errors_for("connection_failed") >= 4).await;
        server.restart().await.unwrap();
        let is_served = |c: &sink::Collected| c.synced == 1 && c.serves("shop", "web");
        watching.sink.until("everything is listed", is_served).await;
        watching.shutdown.cancel();
        (&mut watching.task).await.unwrap().unwrap();
    }
}

/// A life of a Service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_and_stand_in_servers_are_followed_alike() {
    for mut server in ApiUnderTest::all().await.unwrap() {
        server.ensure_namespace("shop").await.unwrap();
        let watching = Watching::start(&server.kubeconfig());
        watching.sink.until("everything is listed", |c| c.synced == 1).await;
        let at = |address: &str| service("shop", "web").cluster_ip(address).port("http", "TCP", 80, 8080).build();
        server.apply(&at("10.96.0.77")).await.unwrap();
        server.apply(&web_slice(&["10.1.0.1", "10.1.0.2"])).await.unwrap();
        watching.sink.until("it is served", |c| c.serves("shop", "web") && c.endpoints("shop", "web").len() == 2).await;
        server.apply(&web_slice(&["10.1.0.2", "10.1.0.3"])).await.unwrap();
        watching.sink.until("it is followed", |c| c.endpoints("shop", "web") == ["10.1.0.2", "10.1.0.3"]).await;
        server.restart().await.unwrap();
        server.apply(&web_slice(&["10.1.0.3"])).await.unwrap();
        watching.sink.until("a restart is survived", |c| c.endpoints("shop", "web") == ["10.1.0.3"]).await;
        server.restart_without_history().await.unwrap();
        server.apply(&web_slice(&["10.1.0.4"])).await.unwrap();
        watching.sink.until("lost history is survived", |c| c.endpoints("shop", "web") == ["10.1.0.4"]).await;
        assert!(watching.sink.look(|c| c.serves("shop", "web")), "{}", server.name());
        server.delete(Kind::Service, "shop", "web").await.unwrap();
        watching.sink.until("a deletion is followed", |c| !c.serves("shop", "web")).await;
        let removed = watching.removed();
        assert_eq!(removed.iter().filter(|key| key.starts_with("Service")).collect::<Vec<_>>(), ["Service shop/web"]);
    }
}

/// A replica that listed earlier has a lower position of a kind in which nothing has changed since.
/// An agent that comes from the other replica need not wait for the next bookmark.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_an_agent_has_seen_elsewhere_is_asked_for_at_once() {
    for server in ApiUnderTest::all().await.unwrap() {
        if let Some(stand_in) = server.as_stand_in() {
            stand_in.set_options(|options| options.bookmark_interval = Duration::from_secs(3_600));
        }
        server.ensure_namespace("shop").await.unwrap();
        server.apply(&web("10.96.0.10")).await.unwrap();
        let earlier = Watching::start(&server.kubeconfig());
        earlier.sink.until("everything is listed", |c| c.synced == 1).await;
        // Slices alone change, and the version of the server with them.
        for address in ["10.1.0.1", "10.1.0.2"] {
            server.apply(&web_slice(&[address])).await.unwrap();
        }
        let later = Watching::start(&server.kubeconfig());
        later.sink.until("everything is listed", |c| c.synced == 1).await;
        let seen = later.sink.look(|c| c.positions[&SourceKind::Services]);
        let (before, errors) = earlier.sink.look(|c| (c.positions[&SourceKind::Services], c.errors.clone()));
        assert!(before < seen, "{}: {before} {seen}", server.name());
        earlier.sink.want(SourceKind::Services, seen);
        earlier.sink.until("the position is reached", |c| c.positions[&SourceKind::Services] >= seen).await;
        earlier.sink.look(|c| assert_eq!((&c.errors, c.went_back), (&errors, 0), "{}", server.name()));
        // What comes later still arrives.
        server.apply(&web_slice(&["10.1.0.9"])).await.unwrap();
        earlier.sink.until("a change is followed", |c| c.endpoints("shop", "web") == ["10.1.0.9"]).await;
        server.delete(Kind::Service, "shop", "web").await.unwrap();
        earlier.sink.until("a deletion is followed", |c| !c.serves("shop", "web")).await;
    }
}
