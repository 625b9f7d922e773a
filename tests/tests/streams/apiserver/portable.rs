//! Tests that pass with both the stand-in and a real `kube-apiserver`. The real server runs if
//! `KUBEBUILDER_ASSETS` names its folder. Otherwise each test prints that it was skipped.

use headgate_tests::apiserver::{ApiUnderTest, Kind, objects::service};
use k8s_openapi::api::core::v1::Service;
use kube::{Api, api::ListParams, runtime::watcher};
use serde_json::Value;

use super::follower::Follower;

const NAMESPACE: &str = "headgate-watch";

fn web(turn: u32) -> Value {
    let object = service(NAMESPACE, "web").cluster_ip("10.96.7.7").port("http", "TCP", 80, 8080);
    object.label("app", "web").label("turn", &turn.to_string()).build()
}

async fn prepared(api: &ApiUnderTest, config: watcher::Config) -> Follower<Service> {
    println!("against the {}", api.name());
    api.ensure_namespace(NAMESPACE).await.unwrap();
    Follower::new(Api::namespaced(api.client(), NAMESPACE), config)
}

#[tokio::test]
async fn writes_reach_the_watcher() {
    for api in ApiUnderTest::all().await.unwrap() {
        let mut configs = vec![watcher::Config::default()];
        if api.has_streaming_lists().await.unwrap() {
            configs.push(watcher::Config::default().streaming_lists());
        } else {
            println!("the {} has no streaming lists: kube's watcher lists without them", api.name());
        }
        for config in configs {
            let mut services = prepared(&api, config).await;
            services.until_listed().await;
            api.apply(&web(1)).await.unwrap();
            services.until_names(&["web"]).await;
            api.apply(&web(2)).await.unwrap();
            services.until("the update arrives", |services| services.label("web", "turn") == Some("2")).await;
            api.delete(Kind::Service, NAMESPACE, "web").await.unwrap();
            services.until_names(&[]).await;
            assert!(services.errors.is_empty());
        }
    }
}

#[tokio::test]
async fn watches_follow_changes_of_selected_labels() {
    const LABEL: &str = "service.kubernetes.io/service-proxy-name";
    for api in ApiUnderTest::all().await.unwrap() {
        let mut services = prepared(&api, watcher::Config::default().labels(&format!("!{LABEL}"))).await;
        services.until_listed().await;
        api.apply(&web(1)).await.unwrap();
        services.until_names(&["web"]).await;
        let mut taken = web(2);
        taken["metadata"]["labels"][LABEL] = "other".into();
        api.apply(&taken).await.unwrap();
        services.until_names(&[]).await;
        api.apply(&web(3)).await.unwrap();
        services.until_names(&["web"]).await;
        api.delete(Kind::Service, NAMESPACE, "web").await.unwrap();
        services.until_names(&[]).await;
    }
}

#[tokio::test]
async fn watchers_continue_after_restarts_of_the_server() {
    for mut api in ApiUnderTest::all().await.unwrap() {
        let mut services = prepared(&api, watcher::Config::default()).await;
        services.until_listed().await;
        api.apply(&web(1)).await.unwrap();
        services.until_names(&["web"]).await;
        api.restart().await.unwrap();
        api.apply(&web(2)).await.unwrap();
        services.until("the update arrives", |services| services.label("web", "turn") == Some("2")).await;
        api.restart_without_history().await.unwrap();
        api.apply(&web(3)).await.unwrap();
        services.until("the update arrives", |services| services.label("web", "turn") == Some("3")).await;
        api.delete(Kind::Service, NAMESPACE, "web").await.unwrap();
        services.until_names(&[]).await;
    }
}

#[tokio::test]
async fn continue_tokens_lead_to_the_next_page() {
    for api in ApiUnderTest::all().await.unwrap() {
        println!("against the {}", api.name());
        api.ensure_namespace(NAMESPACE).await.unwrap();
        api.apply(&web(1)).await.unwrap();
        api.apply(&service(NAMESPACE, "db").cluster_ip("10.96.7.8").port("sql", "TCP", 5432, 5432).build())
            .await
            .unwrap();
        let services: Api<Service> = Api::namespaced(api.client(), NAMESPACE);
        let page = services.list(&ListParams::default().limit(1)).await.unwrap();
        assert_eq!(page.items[0].metadata.name.as_deref(), Some("db"));
        let token = page.metadata.continue_.unwrap();
        let page = services.list(&ListParams::default().limit(1).continue_token(&token)).await.unwrap();
        assert_eq!(page.items[0].metadata.name.as_deref(), Some("web"));
        assert_eq!(page.metadata.continue_.unwrap_or_default(), "");
        for name in ["db", "web"] {
            api.delete(Kind::Service, NAMESPACE, name).await.unwrap();
        }
    }
}
