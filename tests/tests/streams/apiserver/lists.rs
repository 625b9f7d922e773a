//! Initial lists: by pages, and by streaming.

use headgate_tests::apiserver::{
    ApiServer, Kind, Options, RequestFault, RequestFilter, Verb,
    objects::{endpoint_slice, node, service, service_cidr},
};
use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use kube::{Api, api::ListParams, runtime::watcher};

use super::follower::{client, follow, follow_with};

fn with_services(count: usize) -> ApiServer {
    let server = ApiServer::start().unwrap();
    for number in 0..count {
        let object = service("shop", &format!("web-{number:03}"))
            .cluster_ip(&format!("10.96.0.{number}"))
            .port("http", "TCP", 80, 8080);
        server.apply(object.build()).unwrap();
    }
    server
}

#[tokio::test]
async fn pages_add_up_to_the_whole() {
    let server = with_services(25);
    let mut follower = follow_with::<Service>(&server, watcher::Config::default().page_size(10)).await;
    follower.until_listed().await;
    assert_eq!(follower.state.len(), 25);
    assert!(follower.errors.is_empty());
    assert_eq!(server.requests(Verb::List, Some(Kind::Service)), 3);
    let queries: Vec<String> = server.recorded().into_iter().map(|request| request.query).collect();
    assert!(queries[0].contains("limit=10") && !queries[0].contains("continue="), "{queries:?}");
    assert!(queries[1].contains("continue=") && queries[2].contains("continue="), "{queries:?}");
}

#[tokio::test]
async fn later_pages_are_of_the_first_pages_version() {
    let server = with_services(4);
    let services: Api<Service> = Api::namespaced(client(&server).await, "shop");
    let first = services.list(&ListParams::default().limit(2)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(2));
    server.delete(Kind::Service, "shop", "web-002").unwrap();
    server.apply(service("shop", "web-0025").build()).unwrap();
    server.apply(service("shop", "web-003").label("changed", "yes").build()).unwrap();
    let token = first.metadata.continue_.unwrap();
    let second = services.list(&ListParams::default().limit(2).continue_token(&token)).await.unwrap();
    let names: Vec<_> = second.items.iter().map(|object| object.metadata.name.clone().unwrap()).collect();
    assert_eq!(names, ["web-002", "web-003"]);
    assert!(second.items[1].metadata.labels.is_none());
    assert_eq!(second.metadata.resource_version, first.metadata.resource_version);
    assert_eq!(second.metadata.continue_, None);
}

#[tokio::test]
async fn an_expired_page_token_makes_the_watcher_list_anew() {
    let server = with_services(6);
    server.fail_next(
        1,
        RequestFilter::verb_of(Verb::List, Kind::Service),
        RequestFault::Delay(std::time::Duration::ZERO),
    );
    let mut follower = follow_with::<Service>(&server, watcher::Config::default().page_size(2)).await;
    follower.poll_until("one page is out", &server, |server| server.requests(Verb::List, None) >= 1).await;
    // The watcher is not polled here, so that at most the answer to its second page is on its way.
    server.expire_continue_tokens();
    follower.until_listed().await;
    assert_eq!(follower.state.len(), 6);
    assert!(follower.api_error_codes().iter().all(|code| *code == 410));
}

#[tokio::test]
async fn an_expired_token_carries_one_for_the_inconsistent_rest() {
    let server = with_services(4);
    let services: Api<Service> = Api::all(client(&server).await);
    let first = services.list(&ListParams::default().limit(2)).await.unwrap();
    server.delete(Kind::Service, "shop", "web-002").unwrap();
    server.compact();
    let token = first.metadata.continue_.unwrap();
    let query = format!("/api/v1/services?limit=2&continue={token}");
    let gone = super::plain_http::get(&server, &query);
    assert_eq!((gone.code, &gone.body["reason"]), (410, &"Expired".into()));
    let rest = gone.body["metadata"]["continue"].as_str().unwrap();
    let rest = services.list(&ListParams::default().limit(2).continue_token(rest)).await.unwrap();
    assert_eq!(rest.items.len(), 1);
}

#[tokio::test]
async fn streaming_lists_make_no_list_request() {
    let server = with_services(7);
    let mut follower = follow_with::<Service>(&server, watcher::Config::default().streaming_lists()).await;
    follower.until_listed().await;
    assert_eq!(follower.state.len(), 7);
    server.delete(Kind::Service, "shop", "web-003").unwrap();
    server.apply(service("shop", "new").build()).unwrap();
    follower.until("the changes came", |follower| follower.applied == 1 && follower.deleted == 1).await;
    assert!(follower.errors.is_empty());
    assert_eq!(server.requests(Verb::List, None), 0);
    assert_eq!(server.requests(Verb::Watch, Some(Kind::Service)), 1);
    let query = &server.recorded()[0].query;
    assert!(query.contains("sendInitialEvents=true") && query.contains("resourceVersionMatch=NotOlderThan"), "{query}");
}

#[tokio::test]
async fn an_empty_streaming_list_is_complete_too() {
    let server = ApiServer::start().unwrap();
    let mut follower = follow_with::<Node>(&server, watcher::Config::default().streaming_lists()).await;
    follower.until_listed().await;
    assert!(follower.state.is_empty());
}

#[tokio::test]
async fn servers_without_streaming_lists_answer_422() {
    let server = ApiServer::start_with(Options { streaming_lists: false, ..Options::default() }).unwrap();
    let mut follower = follow_with::<Service>(&server, watcher::Config::default().streaming_lists()).await;
    follower.until("it was refused", |follower| !follower.errors.is_empty()).await;
    assert_eq!(follower.api_error_codes(), [422]);
    server.set_options(|options| options.streaming_lists = true);
    follower.until_listed().await;
}

#[tokio::test]
async fn every_kind_is_typed_as_kubernetes_types_it() {
    let server = ApiServer::start().unwrap();
    server
        .apply(service("shop", "web").cluster_ip("10.96.0.1").port("http", "TCP", 80, 8080).node_port(30080).build())
        .unwrap();
    server.apply(node("n1").address("InternalIP", "192.0.2.1").pod_cidr("10.1.0.0/24").zone("a").build()).unwrap();
    server
        .apply(endpoint_slice("shop", "web-x", "web").port("http", "TCP", 8080).endpoint("10.1.0.5", "n1").build())
        .unwrap();
    server.apply(service_cidr("kubernetes", &["10.96.0.0/16"]).build()).unwrap();

    let mut services = follow::<Service>(&server).await;
    services.until_listed().await;
    let spec = services.state["web"].spec.as_ref().unwrap();
    assert_eq!(spec.ports.as_ref().unwrap()[0].node_port, Some(30080));
    let mut nodes = follow::<Node>(&server).await;
    nodes.until_listed().await;
    assert_eq!(nodes.state["n1"].spec.as_ref().unwrap().pod_cidr.as_deref(), Some("10.1.0.0/24"));
    let mut slices = follow::<EndpointSlice>(&server).await;
    slices.until_listed().await;
    assert_eq!(slices.state["web-x"].endpoints.as_ref().unwrap()[0].addresses, ["10.1.0.5"]);
    let mut cidrs = follow::<ServiceCIDR>(&server).await;
    cidrs.until_listed().await;
    assert_eq!(
        cidrs.state["kubernetes"].spec.as_ref().unwrap().cidrs.as_deref(),
        Some(&["10.96.0.0/16".to_owned()][..])
    );
    for kind in Kind::ALL {
        assert_eq!(server.requests(Verb::List, Some(kind)), 1, "{kind:?}");
    }
}

#[tokio::test]
async fn selectors_restrict_lists() {
    let server = ApiServer::start().unwrap();
    server.apply(service("shop", "web").cluster_ip("10.96.0.1").label("app", "web").build()).unwrap();
    server.apply(service("shop", "db").cluster_ip("None").label("app", "db").build()).unwrap();
    server.apply(service("blog", "web2").cluster_ip("10.96.0.2").build()).unwrap();
    let services: Api<Service> = Api::all(client(&server).await);
    let names = async |params: ListParams| {
        let list = services.list(&params).await.unwrap();
        list.items.into_iter().map(|object| object.metadata.name.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(names(ListParams::default().labels("app in (web,db)")).await, ["db", "web"]);
    assert_eq!(names(ListParams::default().labels("!app")).await, ["web2"]);
    assert_eq!(names(ListParams::default().labels("app!=db")).await, ["web2", "web"]);
    assert_eq!(names(ListParams::default().fields("spec.clusterIP!=None")).await, ["web2", "web"]);
    assert_eq!(names(ListParams::default().fields("metadata.namespace=blog")).await, ["web2"]);
    // With a selector the server cannot say how many remain.
    let page = services.list(&ListParams::default().labels("app").limit(1)).await.unwrap();
    assert_eq!((page.items.len(), page.metadata.remaining_item_count), (1, None));
    assert!(page.metadata.continue_.is_some());
}
